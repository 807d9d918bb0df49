"""Decides where a path on the hub is read: there, by ranges of its files, or whole, from the hub's cache."""

from __future__ import annotations

import logging

from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.remote.hub import MODEL_FILES, download, is_cached, parse_hub_path
from orbax_t5x.storage.remote.hub_commit import find_commit
from orbax_t5x.storage.remote.hub_ranges import HubFiles
from orbax_t5x.storage.response_clock import ResponseClock

_logger = logging.getLogger(__name__)
# Files beside which arrays are in chunks, which TensorStore reads by itself.
_CHUNKED = frozenset({"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint", ".zarray"})


def locate(path: str) -> str:
    """Returns the URL of the commit and the file whose ranges are read, or the local path of downloaded files.

    Files are downloaded whole where the hub does not list them or answers no ranges, where arrays are in chunks, and
    where they are in the hub's cache already, which then needs no network.

    Raises:
      CheckpointError: as `download`.
    """
    wanted = parse_hub_path(path)
    try:
        commit = find_commit(wanted)
    except Exception as error:  # the package's settings may reach the hub where ours do not; and it has a cache
        _logger.info("%s: the hub does not list its files (%s); they are read whole", path, type(error).__name__)
        if not isinstance(error, CheckpointError):
            return download(path)
        try:
            return download(path, is_offline=True)
        except CheckpointError:
            raise error_at(error, path=path, leaf=None) from None
    below = f"{wanted.file}/" if wanted.file else ""
    inside = [name.removeprefix(below) for name in commit.sizes if name.startswith(below)]
    beside = [name for name in commit.sizes if name == wanted.file or name.startswith(f"{wanted.file}.")]
    models = (name for file in MODEL_FILES for name in (file, f"{file}.index.json"))
    file = next((f"{below}{name}" for name in models if name in inside), None)
    files = [*([file] if file else []), *(beside if wanted.file else []), *(f"{below}{name}" for name in inside)]
    if not files:
        return download(path)
    own_names = {wanted.file.rpartition("/")[2], *(name for name in inside if "/" not in name)}
    names_below = {name.rpartition("/")[2] for name in inside if file is None}
    if (own_names | names_below) & _CHUNKED:
        _logger.warning("%s: arrays in chunks are not read from the hub in place; the files are downloaded whole", path)
        return download(path)
    if is_cached(wanted.repository, commit.revision, files[0]):
        return download(path)
    base = f"hf://{wanted.repository}@{commit.revision}"
    if not HubFiles(base, ResponseClock(Limits().io_timeout_secs)).takes_ranges(files[0]):
        _logger.warning("%s: the hub answers no byte ranges; the files are downloaded whole", path)
        return download(path)
    return f"{base}/{wanted.file}" if wanted.file else base
