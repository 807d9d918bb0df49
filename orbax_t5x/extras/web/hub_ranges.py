"""Files of the hub, by byte range or from its cache.

`locate` decides which. The hub answers a request for a file with the bytes, or sends on to the server that holds them,
under a URL that is valid for some minutes, and that is in no message; the token goes to the hub alone. What is read
belongs to one commit: a server that then answers with another ETag or another size gives other bytes.
"""

from __future__ import annotations

import functools
import logging
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import TypeVar

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    LimitExceededError,
    error_at,
)
from orbax_t5x.extras.web.hub import (
    MODEL_FILES,
    Commit,
    HubPath,
    download,
    download_files,
    find_commit,
    hub_endpoint,
    hub_token,
    is_cached,
    known_commit,
    parse_hub_path,
)
from orbax_t5x.extras.web.web_response import PAGE_BYTES, WebResponse, content_range, read_answer
from orbax_t5x.extras.web.web_server import WebClient, WebRequest
from orbax_t5x.files.paths import shared_path
from orbax_t5x.files.places import IO_TIMEOUT_SECS, Scheme, StoreUrl, answered, lower_scheme
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import (
    PendingResponse,
    RequestError,
    RequestKind,
    Response,
    ResponseClock,
    Version,
    known_response,
)
from orbax_t5x.files.remote.server import Server

_Result = TypeVar("_Result")

REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_STEPS = (("http", "http"), ("http", "https"), ("https", "https"))
_PORTS = {"http": 80, "https": 443}


HubJudge = Callable[[str, WebResponse, BoundedRange], _Result]
"""Function of a response, with the URL and the bytes that were requested: the hub sends on to other servers."""


class HubRequests:
    """Client of a hub.

    Attributes:
      endpoint: URL of the hub.
    """

    def __init__(self) -> None:
        self.endpoint: str = hub_endpoint()
        self._token = hub_token()
        self._clients: dict[str, WebClient] = {}

    def send(self, url: str, wanted: BoundedRange, judge: HubJudge[_Result], request: WebRequest) -> _Result:
        """Sends a request once, and follows redirects; like `WebClient.exchange`.

        `judge` is called with redirects, too; what it returns of them is not used.
        """
        sent_on: list[str] = []

        def follow(response: WebResponse, wanted: BoundedRange) -> _Result:
            judged = judge(url, response, wanted)
            if response.status in REDIRECTS:
                response.body(PAGE_BYTES)
                sent_on.append(_next_url(url, response.headers.get("location")))
            return judged

        for _ in range(_MOST_REDIRECTS):
            client, target, headers = self._client(url)
            found = client.exchange(target, wanted, follow, request, headers=headers)
            if not sent_on:
                return found
            url = sent_on.pop()
        raise RequestError(f"more than {_MOST_REDIRECTS} redirects")

    def _client(self, url: str) -> tuple[WebClient, str, Mapping[str, str]]:
        """Returns a URL's client, path with query, and its headers."""
        base = server_of(url)
        if base not in self._clients:
            self._clients[base] = WebClient(base)
        is_hub = base == server_of(self.endpoint)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token and is_hub else {}
        parts = urllib.parse.urlsplit(url)
        # As it was sent, but for what no request may hold.
        target = urllib.parse.quote(parts.path.removeprefix("/"), safe="%/-._~!$&'()*+,;=:@")
        query = urllib.parse.quote(parts.query, safe="%/-._~!$&'()*+,;=:@?")
        return self._clients[base], f"{target}?{query}" if query else target, headers

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        for client in list(self._clients.values()):
            client.close_idle()


def _next_url(url: str, location: str | None) -> str:
    """Returns the web URL of a redirect, never less encrypted."""
    target = urllib.parse.urljoin(url, location or "")
    parts = urllib.parse.urlsplit(target)
    schemes = (urllib.parse.urlsplit(url).scheme, parts.scheme)
    if location is None or not parts.hostname or schemes not in _STEPS:
        raise RequestError("the hub sends on to no URL of the web")
    return target


def server_of(url: str) -> str:
    """Returns scheme, host and port of a URL."""
    parts = urllib.parse.urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = parts.port or _PORTS.get(parts.scheme)
    return f"{parts.scheme}://{host}" if port == _PORTS.get(parts.scheme) else f"{parts.scheme}://{host}:{port}"


# The package's own settings may reach a server to which ours do not lead.
_NOT_BY_RANGE = (RequestKind.IGNORED_RANGE, RequestKind.UNREACHABLE, RequestKind.BROKEN, RequestKind.SILENT)
_REFUSED = (400, 401, 403, 404, 410)


class HubServer(Server):
    """The files of a commit; its base is `hf://org/name@commit`."""

    has_list = True

    def __init__(self, base: str, clock: ResponseClock):
        super().__init__(base, clock)
        self._repository = parse_hub_path(base).repository
        self._requests = HubRequests()
        self._commit = known_commit(base) or find_commit(parse_hub_path(base))
        # The files of a commit never change.
        self._version = Version(self._commit.revision.encode())
        self._sizes = dict(self._commit.sizes)
        self._locations: dict[str, str] = {}
        self._tags: dict[tuple[str, str], str] = {}

    def names(self, prefix: str, timeout: float) -> list[str]:
        return [name for name in self._sizes if name.startswith(prefix)]

    def request(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        if key not in self._sizes:
            return known_response(None)
        size = self._sizes[key]
        if size is not None and not wanted.is_empty:
            start = max(0, size + wanted.start) if wanted.start < 0 else wanted.start
            stop = size if wanted.stop is None else wanted.stop
            if stop > size or start > size:
                return known_response(RequestError(f"the file ends at byte {size}", RequestKind.BEYOND_END))
            if stop - start > wanted.most:
                return known_response(LimitExceededError(f"more bytes than the limit of {wanted.most} permits"))
            wanted = BoundedRange.between(start, stop, wanted.into)
        if wanted.is_empty:
            return known_response(Response(b"", self._version))
        return WebRequest(functools.partial(self._attempt, key, wanted), self.clock, is_awaited=is_awaited)

    def takes_ranges(self, key: str) -> bool:
        """Tests if the hub serves a single byte of a file."""
        return answered(["takes ranges", self.url(key)], lambda: self._takes_ranges(key))

    def _takes_ranges(self, key: str) -> bool:
        wanted = BoundedRange.between(0, min(1, self._sizes[key] or 1))
        try:
            answer = self.end(self.begin(key, wanted), "reading it", is_known=True)
        except CheckpointError as error:
            if isinstance(cause := error.__cause__, RequestError) and cause.kind in _NOT_BY_RANGE:
                return False
            raise
        finally:
            self.close_idle()
        if answer is None:
            raise CheckpointNotFoundError("the hub lists the file, and does not have it", path=self.url(key))
        return True

    def close_idle(self) -> None:
        self._requests.close_idle()

    def _attempt(self, key: str, wanted: BoundedRange, request: WebRequest) -> Response | None:
        """Sends a request to the file's last known place."""
        found = self._locations.get(key)
        judge = functools.partial(self._read_answer, key, found)
        return self._requests.send(found or self._url(key), wanted, judge, request)

    def _url(self, key: str) -> str:
        path = f"{self._repository}/resolve/{self._commit.revision}/{urllib.parse.quote(key)}"
        return f"{self._requests.endpoint}/{path}"

    def _read_answer(
        self, key: str, found: str | None, url: str, response: WebResponse, wanted: BoundedRange
    ) -> Response | None:
        """Checks a response against commit and request, reads its body."""
        status = response.status
        if status in REDIRECTS:
            return self._compare(key, url, response)
        if status == 200:
            if self._sizes[key] is not None and response.headers.get("content-length") != str(self._sizes[key]):
                raise CheckpointIOError("the answer to a range is neither that range nor the file")
            raise RequestError("the requested byte range was ignored by server", RequestKind.IGNORED_RANGE)
        if status in _REFUSED and url == found:
            # The URL's time is over; the hub is asked for a new one, unless another request did so already.
            if self._locations.get(key) == found:
                self._locations.pop(key, None)
            response.body(PAGE_BYTES)
            raise RequestError(f"HTTP code {status}", RequestKind.PASSING)
        if status != 206:
            return read_answer(response, wanted)
        self._compare(key, url, response)
        size, known = content_range(response, wanted).total, self._sizes[key]
        if size is None:
            raise CheckpointIOError("the server's answer does not say how long the file is")
        if known is not None and size != known:
            raise CheckpointGoneError(f"changed after the checkpoint was opened: it has {size} bytes, and had {known}")
        data = read_answer(response, wanted)
        self._sizes[key] = size
        self._locations[key] = url
        return None if data is None else data._replace(version=self._version, file_bytes=size)

    def _compare(self, key: str, url: str, response: WebResponse) -> None:
        """Compares a server's claims about a file with earlier claims."""
        headers, server = response.headers, server_of(url)
        if headers.get("x-repo-commit", self._commit.revision) != self._commit.revision:
            raise CheckpointGoneError("the hub answers with a file of another commit")
        for name in ("x-linked-etag", "etag"):
            tag = headers.get(name, "")
            there = self._tags.setdefault((key, name + server), tag)
            # Redirects of several steps have marks in some of them.
            is_left_out = not tag and (response.status != 206 or name != "etag")
            if there and tag != there and not is_left_out:
                raise CheckpointGoneError("changed after the checkpoint was opened: its ETag is another")
            self._tags[key, name + server] = there or tag


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
    if not HubServer(base, ResponseClock(IO_TIMEOUT_SECS)).takes_ranges(probed):
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
