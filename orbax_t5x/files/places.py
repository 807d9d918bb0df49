"""Files of a caller's path, and the table of URLs' schemes.

Nothing else asks if a path is a URL. Only the caller's own URL comes here; no file decides where a request goes. Here
is also the opening that calls share.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from orbax_t5x import on_demand
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.registry import Registry

if TYPE_CHECKING:
    from orbax_t5x.files.transcript import Transcript

_Result = TypeVar("_Result")
_Opened = TypeVar("_Opened", covariant=True)
_remote_files = on_demand.function("orbax_t5x.files.remote.remote_files", "RemoteFiles")
_recorded_files = on_demand.function("orbax_t5x.files.recorded", "RecordedFiles")
# How long one read of a remote store may take without an answer.
IO_TIMEOUT_SECS = 60.0
# Names of files of all formats: no directory is imagined under them.
FILE_SUFFIXES = (".index", ".json", ".msgpack", ".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf")


class StoreUrl(NamedTuple):
    """A parsed URL.

    Attributes:
      base: the server or the bucket, as text, without a slash at the end.
      key: what follows, without slashes around it; as a name, not percent-encoded.
      is_directory: whether the URL ended in a slash.
    """

    base: str
    key: str
    is_directory: bool


class Scheme(NamedTuple):
    """Scheme of URLs.

    Attributes:
      find: returns the URL of a user without encoding, from where names are appended to it as they are; or the path of
        local files that it downloaded.
      parse: splits such a URL.
      server: makes the `Server` of a URL's base, with the clock of its responses.
      download: returns a local directory with those of some files that a directory has; None if they are read in place.
    """

    find: Callable[[str], str]
    parse: Callable[[str], StoreUrl]
    server: Callable[[str, Any], Any]
    download: Callable[[str, Sequence[str]], str] | None = None


SCHEMES: Registry[Scheme] = Registry(
    "scheme",
    {
        "http": "orbax_t5x.extras.web.web_server:WEB",
        "https": "orbax_t5x.extras.web.web_server:WEB",
        "s3": "orbax_t5x.extras.buckets.buckets:BUCKETS",
        "gs": "orbax_t5x.extras.buckets.buckets:BUCKETS",
        "hf": "orbax_t5x.extras.web.hub_ranges:HUB",
    },
    group="orbax_t5x.schemes",
)


def scheme_of(path: str) -> Scheme | None:
    """Returns the scheme of a URL, or None.

    None for a local path.

    Raises:
      UnsupportedCheckpointError: no such URLs are read.
    """
    name = url_scheme(path)
    if name is None:
        return None
    try:
        return SCHEMES.get(name)
    except KeyError:
        known = ", ".join(SCHEMES.names())
        raise UnsupportedCheckpointError(
            f"{name}:// paths are not read; {known} and local paths are", path=path
        ) from None


def lower_scheme(url: str) -> str:
    """Returns a URL with its scheme in lower case."""
    return f"{url_scheme(url)}://{url.partition('://')[2]}"


def split_url(url: str) -> StoreUrl:
    """Parses a URL of a server or a bucket.

    Raises:
      UnsupportedCheckpointError: no host or bucket, or a password in it.
    """
    where, _, rest = url.partition("://")[2].partition("/")
    if not where:
        raise UnsupportedCheckpointError("the URL names no server or bucket", path=url)
    if not where.isprintable() or " " in where:
        raise UnsupportedCheckpointError("blanks and control characters in the name of a host are refused", path=url)
    if "@" in where:
        raise UnsupportedCheckpointError("names and passwords in URLs are not used", path=url)
    port = where.rpartition("]")[2].partition(":")[2]
    if port and not port.isdecimal():
        # A password with a slash looks like a port; the whole URL is masked up to the '@'.
        raise UnsupportedCheckpointError(
            "the host has a port that is no number; names and passwords in URLs are not used", path=url
        )
    key = rest.strip("/")
    return StoreUrl(f"{url_scheme(url)}://{where}", key, not key or rest.endswith("/"))


class Opening:
    """Servers and buckets of a call.

    Attributes:
      limits: of the files that are opened.
      timeout: seconds that one read of a remote store may take.
      servers: by their URL.
    """

    def __init__(self, limits: Limits, servers: dict[str, Any]):
        self.limits = limits
        self.timeout = IO_TIMEOUT_SECS
        self.servers = servers

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        for server in self.servers.values():
            server.close_idle()


_OPENING: ContextVar[Opening | None] = ContextVar("orbax_t5x_opening", default=None)
_TRANSCRIPT: ContextVar[Transcript | None] = ContextVar("orbax_t5x_transcript", default=None)


def current_opening() -> Opening:
    """Returns the opening that runs, or a new opening."""
    return _OPENING.get() or Opening(Limits(), {})


def current_transcript() -> Transcript | None:
    """Returns the transcript of an opening that processes share."""
    return _TRANSCRIPT.get()


def answered(request: Sequence[Any], ask: Callable[[], _Result]) -> _Result:
    """Asks a question that belongs to no files yet."""
    transcript = current_transcript()
    return ask() if transcript is None else transcript.answer(request, ask)


@contextmanager
def using(transcript: Transcript) -> Generator[None, None, None]:
    """Records or replays the answers of an opening."""
    token = _TRANSCRIPT.set(transcript)
    try:
        yield
    finally:
        _TRANSCRIPT.reset(token)
        transcript.close()


@contextmanager
def opening(limits: Limits | None = None) -> Generator[Opening, None, None]:
    """Shares limits and servers during a call, and calls inside it, which may set other limits."""
    outer = _OPENING.get()
    entered = Opening(limits or (outer.limits if outer else Limits()), outer.servers if outer else {})
    token = _OPENING.set(entered)
    try:
        yield entered
    except BaseException:
        if outer is None:
            entered.close_idle()
        raise
    finally:
        _OPENING.reset(token)
        if outer is None:
            for server in entered.servers.values():
                server.forget()


class LimitedOpener(Protocol[_Opened]):
    """Function that opens a path within limits."""

    def __call__(self, path: str | os.PathLike[str], *, limits: Limits | None = None, **arguments: Any) -> _Opened:
        """Opens a path; None for the limits of the opening that runs."""
        ...


def within_limits(opener: Callable[..., _Opened]) -> LimitedOpener[_Opened]:
    """Decorates a function so that the files it opens hold its argument `limits`."""

    @functools.wraps(opener)
    def opened(path: str | os.PathLike[str], *, limits: Limits | None = None, **arguments: Any) -> _Opened:
        with opening(limits):
            return opener(path, **arguments)

    return opened


def files_at(path: str) -> Files:
    """Makes the files of a directory or file, local or remote."""
    if "://" in path and url_scheme(path) is not None:
        return _remote_files(path)
    transcript = _TRANSCRIPT.get()
    if transcript is not None:
        return _recorded_files(path, transcript)
    return LocalFiles(path, limits=current_opening().limits)


def open_directory_of(path: str) -> tuple[Files, str]:
    """Makes the files of a named file's directory."""
    file = files_at(path)
    directory, name = os.path.split(file.path if file.is_link() else file.named)
    return files_at(directory), name
