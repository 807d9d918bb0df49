"""Decides how a path on the hub is read.

It is read there, by ranges of its files, or whole, from the hub's cache.
"""

from __future__ import annotations

import logging
import re
import urllib.parse

from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointIOError, error_at
from orbax_t5x.extras.web.hub import (
    MODEL_FILES,
    Commit,
    HubPath,
    download,
    download_files,
    find_commit,
    is_cached,
    parse_hub_path,
)
from orbax_t5x.extras.web.hub_ranges import HubServer
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import shared_path
from orbax_t5x.files.places import Scheme, StoreUrl, lower_scheme
from orbax_t5x.files.remote.responses import ResponseClock

_logger = logging.getLogger(__name__)
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}", re.ASCII)
# Files beside which arrays are in chunks, which TensorStore reads by itself.
_CHUNKED = frozenset({"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint", ".zarray"})


def locate(path: str) -> str:
    """Returns a URL for ranges, or the path of downloaded files.

    Files are downloaded whole where the hub does not list them or answers no ranges, where arrays are in chunks, and
    where they are in the hub's cache already. Without a network the cache is read, with a warning that names the
    commit.
    """
    path = lower_scheme(path)
    wanted = parse_hub_path(path)
    try:
        commit = find_commit(wanted)
    except (CheckpointError, ConnectionError) as error:
        return _locate_in_cache(path, wanted, error)
    below = f"{wanted.file}/" if wanted.file else ""
    inside = [name.removeprefix(below) for name in commit.sizes if name.startswith(below)]
    beside = [name for name in commit.sizes if name == wanted.file or name.startswith(f"{wanted.file}.")]
    models = [name for file in MODEL_FILES for name in (file, f"{file}.index.json") if name in inside]
    file = f"{below}{models[0]}" if models else None
    files = [*([file] if file else []), *(beside if wanted.file else []), *(f"{below}{name}" for name in inside)]
    if not files:
        return _download(path, commit)
    own_names = {wanted.file.rpartition("/")[2], *(name for name in inside if "/" not in name)}
    names_below = {name.rpartition("/")[2] for name in inside if file is None}
    if (own_names | names_below) & _CHUNKED:
        _logger.warning("%s: arrays in chunks are not read from the hub in place; the files are downloaded whole", path)
        return _download(path, commit, is_whole=bool(own_names & _CHUNKED))
    # Which files a prefix or another directory needs is not known here, and several encodings may be two owners.
    encodings = {name.partition(".")[0] for name in models}
    others = {name for name in inside if "/" not in name and name.endswith((".safetensors", ".gguf"))}
    is_known = wanted.file in commit.sizes or "model" in encodings or (len(encodings) == 1 and not others)
    if is_known and is_cached(wanted.repository, commit.revision, files[0]):
        return _download(path, commit)
    base = f"hf://{wanted.repository}@{commit.revision}"
    probed = next(filter(commit.sizes.get, files), files[0])  # of an empty file there is no range
    if not HubServer(base, ResponseClock(Limits().io_timeout_secs)).takes_ranges(probed):
        _logger.warning("%s: the hub answers no byte ranges; the files are downloaded whole", path)
        return _download(path, commit)
    return f"{base}/{wanted.file}" if wanted.file else base


def _download(path: str, commit: Commit, *, is_whole: bool = False) -> str:
    """Does `download`.

    Its package takes an older commit from its cache if the hub fails.
    """
    found = download(path, is_whole=is_whole)
    there = parse_hub_path(shared_path(found)).revision
    if there != commit.revision:
        raise CheckpointGoneError(f"the hub named the commit {commit.revision}, and sent {there}", path=path)
    return found


def _locate_in_cache(path: str, wanted: HubPath, error: CheckpointError | ConnectionError) -> str:
    """Returns the cached files of a revision."""
    is_commit = wanted.revision is not None and _COMMIT_HASH.fullmatch(wanted.revision) is not None
    if isinstance(error, CheckpointError) and not is_commit:
        raise error_at(error, path=path, leaf=None) from None
    try:
        found = download(path, is_offline=True)
    except CheckpointError:
        if isinstance(error, CheckpointError):
            raise error_at(error, path=path, leaf=None) from None
        message = f"the hub does not answer ({error}), and its cache does not have the files"
        raise CheckpointIOError(message, path=path) from None
    if not is_commit:
        there = parse_hub_path(shared_path(found)).revision
        _logger.warning(
            "%s: the hub does not answer (%s); its cache has the commit %s, which is read", path, error, there
        )
    return found


def _split_hub_url(url: str) -> StoreUrl:
    wanted = parse_hub_path(url)
    revision = f"@{urllib.parse.quote(wanted.revision, safe='')}" if wanted.revision else ""
    return StoreUrl(f"hf://{wanted.repository}{revision}", wanted.file, not wanted.file)


HUB = Scheme(locate, _split_hub_url, HubServer, download=download_files)
