"""Commits of repositories on the Hugging Face hub: what a revision is, and which files it has."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.places import answered
from orbax_t5x.storage.remote.hub import HubPath, hub_endpoint, require_network
from orbax_t5x.storage.remote.hub_requests import HubRequests, HubResponse, await_answer
from orbax_t5x.storage.remote.transport import Response
from orbax_t5x.storage.remote.web_answer import PAGE_BYTES, read_answer
from orbax_t5x.storage.remote.web_request import WebRequest
from orbax_t5x.storage.response_clock import ResponseClock
from orbax_t5x.storage.strict_json import parse_object
from orbax_t5x.storage.values import BoundedRange

_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}", re.ASCII)
_DOING = "asking the hub for its files"


class Commit(NamedTuple):
    """A commit of a repository, and the sizes of its files by name; a size may be unknown."""

    revision: str
    sizes: Mapping[str, int | None]


# Of the commits that were found, by hub and URL; a commit never changes.
_COMMITS: dict[tuple[str, str], Commit] = {}
_MOST_COMMITS = 64


def known_commit(base: str) -> Commit | None:
    """Returns the commit of `hf://org/name@commit`, where it was found before."""
    return _COMMITS.get((hub_endpoint(), base))


def find_commit(wanted: HubPath) -> Commit:
    """Asks the hub for the commit of a revision.

    Raises:
      CheckpointError: the hub refused, or its answer is none.
      OSError: there is no answer.
      ImportError: `huggingface_hub` is not installed.
    """
    require_network()
    path, limits = f"hf://{wanted.repository}", Limits()
    clock = ResponseClock(limits.io_timeout_secs)
    hub = HubRequests(clock)
    revision = f"/revision/{urllib.parse.quote(wanted.revision, safe='')}" if wanted.revision else ""
    url = f"{hub.endpoint}/api/models/{wanted.repository}{revision}?blobs=true"
    span = BoundedRange.whole(limits.json_bytes)

    def ask() -> bytes | None:
        request = WebRequest(lambda request: hub.send(url, span, _read_listing, request), clock, retries=0)
        try:
            answer = await_answer(request, clock, _DOING, path)
        finally:
            hub.close_idle()
        return None if answer is None else answer.data

    data = answered(["commit", url], ask)
    if data is None:
        raise CheckpointNotFoundError(
            "not on the hub: it has no such repository or revision, or not for this token", path=path
        )
    commit = _parse(data, path)
    if len(_COMMITS) >= _MOST_COMMITS:
        _COMMITS.clear()
    return _COMMITS.setdefault((hub.endpoint, f"{path}@{commit.revision}"), commit)


def _read_listing(answer: HubResponse) -> Response | None:
    status = answer.response.status
    if status in (200, 206):
        return read_answer(answer.response, answer.wanted)
    answer.response.body(PAGE_BYTES)
    if status in (401, 404):
        return None
    raise CheckpointIOError(f"{_DOING}: HTTP code {status}")


def _parse(data: bytes, path: str) -> Commit:
    found = parse_object(data, path, allow_nan=True)
    revision, files = found.get("sha"), found.get("siblings")
    if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
        raise CheckpointIOError(f"{_DOING}: its answer names no commit", path=path)
    sizes: dict[str, int | None] = {}
    for file in cast("list[Any]", files) if isinstance(files, list) else []:
        described = cast("dict[str, Any]", file) if isinstance(file, dict) else {}
        name, size = described.get("rfilename"), described.get("size")
        if not isinstance(name, str):
            raise CheckpointIOError(f"{_DOING}: its answer names no files", path=path)
        sizes[name] = size if type(size) is int and 0 <= size < 1 << 63 else None
    return Commit(revision, sizes)
