"""Commits of the Hugging Face hub: their names and files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.extras.web.hub import HubPath, describe_repository, hub_endpoint, is_silence, typed_hub_errors
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import answered
from orbax_t5x.files.strict_json import parse_object

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
            data = describe_repository(wanted, Limits().io_timeout_secs, Limits().index_bytes)
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
