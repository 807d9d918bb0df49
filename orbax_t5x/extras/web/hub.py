"""`hf://org/name[@revision][/file]`: models of the Hugging Face hub, through the `huggingface_hub` package.

The package downloads the files that a format needs into its own cache, with its own token, and finds them there again
without a network; from there they are read like all local files. It is an extra, `orbax-t5x[hf]`, and is imported when
such a path is opened. `HF_ENDPOINT` names another hub.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import re
import sys
import urllib.parse
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.places import IO_TIMEOUT_SECS, answered
from orbax_t5x.files.strict_json import parse_object

# Of repositories and revisions that do not exist, or that others may not know of.
_NOT_THERE = (401, 404)
_PART_BYTES = 1 << 16
# A revision that begins with `refs/` has three parts: a pull request's, `refs/pr/3`, or a converted one's.
_REVISION = r"refs/[^/]+/[^/]+|(?!refs/)[^/]+"
_PATH = re.compile(rf"hf://(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>{_REVISION}))?(?:/(?P<file>.*))?", re.ASCII)
_INDEX_SUFFIX = ".index.json"
_TABLE_SUFFIX = ".index"
_CONFIG = "config.json"
# Errors of the libraries that versions of the package use.
_HTTPX = ("NetworkError", "TimeoutException", "ProxyError")
_SILENCE = {"requests": ("ConnectionError", "Timeout"), "httpx": _HTTPX, "httpx2": _HTTPX}
# What a repository may hold, best first; each also in several files with an index.
MODEL_FILES = ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")


class HubPath(NamedTuple):
    """A parsed path on the hub.

    Attributes:
      repository: "org/name".
      revision: a branch, a tag, a commit, or a reference such as `refs/pr/3`; None for the main branch.
      file: a file or a directory in the repository, or "".
    """

    repository: str
    revision: str | None
    file: str


def parse_hub_path(path: str) -> HubPath:
    """Parses a path."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise UnsupportedCheckpointError("a path on the hub is hf://org/name, hf://org/name@revision/file", path=path)
    file = (match["file"] or "").strip("/")
    if file:
        split_name(file, path=path)
    # As in the hub's own URLs, where a slash is `%2F`.
    revision = match["revision"] and urllib.parse.unquote(match["revision"])
    return HubPath(match["repository"], revision, file)


def _package() -> Any:
    """Imports `huggingface_hub` as Any.

    Its own annotations hold types that no checker can resolve.
    """
    for module in ("huggingface_hub.constants", "huggingface_hub.errors"):
        importlib.import_module(module)
    return importlib.import_module("huggingface_hub")


def is_silence(error: Exception) -> bool:
    """Tests if the hub did not answer."""
    modules = [(sys.modules[name], kinds) for name, kinds in _SILENCE.items() if name in sys.modules]
    known = [getattr(module, kind) for module, kinds in modules for kind in kinds]
    return isinstance(error, (ConnectionError, TimeoutError, *known))


def describe_repository(wanted: HubPath, timeout: float, most: int) -> bytes:
    """Asks the hub for a commit and its files.

    The package's own functions keep an answer of any size. Its session has its token, proxies and certificates.

    Raises:
      LimitExceededError: the list is longer.
      CheckpointError: the hub refused.
      Exception: of the library that the package uses.
    """
    package = _package()
    revision = "" if wanted.revision is None else f"/revision/{urllib.parse.quote(wanted.revision, safe='')}"
    url = f"{hub_endpoint()}/api/models/{wanted.repository}{revision}"
    headers = {**package.utils.build_hf_headers(), "Accept-Encoding": "identity"}
    session = package.utils.get_session()
    options = {"params": {"blobs": "true"}, "headers": headers, "timeout": timeout}
    # Of httpx, or of requests in earlier versions of the package.
    is_httpx = hasattr(session, "stream")
    with session.stream("GET", url, **options) if is_httpx else session.get(url, stream=True, **options) as response:
        if response.status_code != 200:
            reason = f"HTTP code {response.status_code} {response.headers.get('x-error-message', '')}".rstrip()
            reason = _first_line(ValueError(reason), hub_token())
            if response.status_code in _NOT_THERE or response.headers.get("x-error-code") == "GatedRepo":
                raise CheckpointNotFoundError(f"not on the hub: {reason}")
            raise CheckpointIOError(f"the hub failed: {reason}")
        data = bytearray()
        for part in response.iter_bytes() if is_httpx else response.iter_content(_PART_BYTES):
            data += part
            if len(data) > most:
                raise LimitExceededError(f"a list of files with more than Limits.index_bytes = {most} bytes")
    return bytes(data)


def hub_token() -> str | None:
    """Returns the user's token of the hub."""
    return _package().get_token()


def hub_endpoint() -> str:
    """Returns the URL of the hub.

    It is read at each call, while the package reads it when it is imported.
    """
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_cached(repository: str, commit: str, file: str) -> bool:
    """Reports whether a file of a commit is in the hub's cache."""
    package = _package()
    cache = package.constants.HF_HUB_CACHE
    return isinstance(package.try_to_load_from_cache(repository, file, cache_dir=cache, revision=commit), str)


def download(path: str, *, is_offline: bool = False, is_whole: bool = False) -> str:
    """Downloads the files that the hub's cache lacks.

    `is_whole` takes all files of a repository, and not only those of a model.
    """
    wanted = parse_hub_path(path)
    if wanted.file:
        found = os.path.join(_snapshot(path, wanted, _patterns_of(wanted.file), is_offline), wanted.file)
        if not os.path.lexists(found) and not os.path.lexists(f"{found}{_TABLE_SUFFIX}"):  # a bundle's prefix
            raise CheckpointNotFoundError("the repository has no such file", path=path)
        return found
    if is_offline or is_whole:
        return _snapshot(path, wanted, ["*"], is_offline)
    for file in MODEL_FILES:
        patterns = (file, f"{file}{_INDEX_SUFFIX}", _shards_of(file), _CONFIG)
        snapshot = Path(_snapshot(path, wanted, patterns))
        if any(found.name != _CONFIG for pattern in patterns for found in snapshot.glob(pattern)):
            return str(snapshot)
    raise UnsupportedCheckpointError(
        f"the repository has neither {' nor '.join(MODEL_FILES)} (nor the index of one) at its top; name a file or a "
        "directory in it: hf://org/name/file",
        path=path,
    )


def download_files(path: str, names: Sequence[str]) -> str:
    """Downloads the files that a directory on the hub has."""
    wanted = parse_hub_path(path)
    below = f"{wanted.file}/" if wanted.file else ""
    return os.path.join(_snapshot(path, wanted, [below + name for name in names]), wanted.file)


def _patterns_of(file: str) -> list[str]:
    """Returns patterns of a file and the files that belong to it."""
    file = glob.escape(file)
    directory = f"{file.rpartition('/')[0]}/" if "/" in file else ""
    patterns = [file, f"{file}/*", f"{directory}{_CONFIG}"]
    if file.endswith(_INDEX_SUFFIX):
        patterns.append(_shards_of(file.removesuffix(_INDEX_SUFFIX)))
    if file.rpartition("/")[2] == "checkpoint":  # beside which T5X has its arrays, and TensorFlow its bundle
        patterns.append(f"{directory}*")
    # One of several parts, and of a bundle its prefix, its table or a shard.
    prefix = re.sub(r"\.index$|\.data-[0-9]+-of-[0-9]+$", "", file)
    return [*patterns, re.sub(r"-[0-9]+-of-", "-*-of-", file), f"{prefix}{_TABLE_SUFFIX}", f"{prefix}.data-*"]


def _shards_of(file: str) -> str:
    """Returns the pattern of a split file's parts."""
    stem, suffix = os.path.splitext(file)
    return f"{stem}-*{suffix}"


def _snapshot(path: str, wanted: HubPath, patterns: Sequence[str], is_offline: bool = False) -> str:
    with typed_hub_errors(path):
        return _package().snapshot_download(
            wanted.repository,
            revision=wanted.revision,
            allow_patterns=list(patterns),
            endpoint=hub_endpoint(),
            local_files_only=is_offline,
        )


@contextlib.contextmanager
def typed_hub_errors(path: str) -> Generator[None, None, None]:
    """Types `huggingface_hub`'s errors about a path."""
    try:
        errors = _package().errors
    except ImportError as error:
        raise UnsupportedCheckpointError(
            "hf:// paths need the package huggingface_hub: pip install 'orbax-t5x[hf]'", path=path
        ) from error
    token = hub_token()
    try:
        yield
    except CheckpointError as error:
        raise error_at(error, path=path, leaf=None) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise CheckpointNotFoundError(f"not on the hub: {_first_line(error, token)}", path=path) from None
    except (OSError, ValueError, RuntimeError, errors.HfHubHTTPError) as error:
        reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise CheckpointIOError(f"the hub failed: {_first_line(reason, token)}", path=path) from None
    except Exception as error:  # what the package raises where an answer is of another form than it expects
        raise CheckpointIOError(
            f"the hub's answer could not be read: {type(error).__name__}: {_first_line(error, token)}", path=path
        ) from None


def commit_files(wanted: HubPath, parent: str, message: str, files: Mapping[str, Path], remove: Iterable[str]) -> str:
    """Adds and removes a repository's files in a new commit."""
    package = _package()
    operations = [package.CommitOperationAdd(name, str(file)) for name, file in sorted(files.items())]
    operations += [package.CommitOperationDelete(name, is_folder=False) for name in remove]
    made = package.HfApi(endpoint=hub_endpoint()).create_commit(
        wanted.repository, operations, commit_message=message, revision=wanted.revision, parent_commit=parent
    )
    return made.oid


def _first_line(error: BaseException, token: str | None) -> str:
    """Returns the first line of an error without the token.

    Errors are raised without this one as their cause, because a traceback prints all of it.
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.replace(token, "…") if token else line


_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}", re.ASCII)
_DOING = "asking the hub for its files"


class Commit(NamedTuple):
    """A commit, and its files' sizes by name, if known."""

    revision: str
    sizes: Mapping[str, int | None]


# Of the commits that were found, by hub and URL; a commit never changes.
_COMMITS: dict[tuple[str, str], Commit] = {}
_MOST_COMMITS = 64


def known_commit(base: str) -> Commit | None:
    """Returns the commit of `hf://org/name@commit`, if it was found before."""
    return _COMMITS.get((hub_endpoint(), base))


def find_commit(wanted: HubPath) -> Commit:
    """Asks the hub for the commit of a revision."""
    path = f"hf://{wanted.repository}"
    revision, found = answered(["commit", hub_endpoint(), *wanted[:2]], lambda: _ask(wanted, path))
    if revision is None:
        raise ConnectionError(found)
    if len(_COMMITS) >= _MOST_COMMITS:
        _COMMITS.clear()
    return _COMMITS.setdefault((hub_endpoint(), f"{path}@{revision}"), Commit(revision, found))


def _ask(wanted: HubPath, path: str) -> list[Any]:
    """Returns a commit with its files' sizes, or None."""
    with typed_hub_errors(path):
        try:
            data = describe_repository(wanted, IO_TIMEOUT_SECS, Limits().index_bytes)
        except Exception as error:  # of whatever library the package uses
            if isinstance(error, CheckpointError) or not is_silence(error):
                raise
            return [None, f"{type(error).__name__}: {error}"]
    found = parse_object(data, path, allow_nan=True)
    commit, files = found.get("sha"), found.get("siblings") or []
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise CheckpointIOError(f"{_DOING}: its answer names no commit", path=path)
    sizes: dict[str, int | None] = {}
    for file in files if isinstance(files, list) else [files]:
        if not isinstance(file, dict) or not isinstance(name := file.get("rfilename"), str):
            raise CheckpointIOError(f"{_DOING}: its answer names no files", path=path)
        size = file.get("size")
        sizes[name] = size if type(size) is int and 0 <= size < 1 << 63 else None
    return [commit, sizes]
