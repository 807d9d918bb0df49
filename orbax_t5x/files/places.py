"""Files of a caller's path, local or remote, and the opening that calls share.

Nothing else asks if a path is a URL. Only the caller's own URL comes here; no file decides where a request goes.
"""

from __future__ import annotations

import functools
import os
import urllib.parse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

from orbax_t5x import on_demand
from orbax_t5x.errors import UnsupportedCheckpointError, error_at
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.paths import url_scheme

_Opened = TypeVar("_Opened", covariant=True)
_remote_files = on_demand.function("orbax_t5x.files.remote", "RemoteFiles")
_find_hub_url = on_demand.function("orbax_t5x.files.hub", "find_hub_url")
# Names of files of all formats: no directory is imagined under them.
FILE_SUFFIXES = (".index", ".json", ".msgpack", ".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf")
SCHEMES = ("http", "https", "s3", "gs", "hf")


class StoreUrl(NamedTuple):
    """A parsed URL.

    Attributes:
      base: Server, bucket or commit on the hub, as text, without a slash at the end.
      key: What follows, without slashes around it; as a name, not percent-encoded.
      is_directory: Whether the URL ended in a slash, or names no file.
    """

    base: str
    key: str
    is_directory: bool


def resolved_path(path: str) -> str:
    """Returns a local path with `~` expanded, or the URL of a remote path.

    A URL is returned without percent-encoding, so that names can be appended; of the hub, with the commit.

    Raises:
      UnsupportedCheckpointError: URLs of this scheme or form are not read.
      CheckpointError: The hub failed.
    """
    scheme = url_scheme(path)
    if scheme is None:
        return os.path.expanduser(path)
    if scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise UnsupportedCheckpointError(f"{scheme}:// paths are not read; {known} and local paths are", path=path)
    url = f"{scheme}://{path.partition('://')[2]}"
    if scheme == "hf":
        try:
            return _find_hub_url(url)
        except UnsupportedCheckpointError as error:
            raise error_at(error, path=path, leaf=None) from None
    split_url(url)
    if scheme in ("s3", "gs"):
        return url
    if "?" in url or "#" in url:
        raise UnsupportedCheckpointError(
            "URLs with a query or a fragment are not read: the names of further files could not be appended", path=path
        )
    return f"{scheme}://{urllib.parse.unquote(url.partition('://')[2])}"


def split_url(url: str) -> StoreUrl:
    """Parses a URL of a server, a bucket or a commit on the hub.

    Raises:
      UnsupportedCheckpointError: It has no host or bucket, or a password.
    """
    scheme = url_scheme(url)
    if scheme == "hf":
        organisation, _, rest = url.partition("://")[2].partition("/")
        name, _, key = rest.partition("/")
        return StoreUrl(f"hf://{organisation}/{name}", key.strip("/"), not key.strip("/"))
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
    return StoreUrl(f"{scheme}://{where}", key, not key or rest.endswith("/"))


class Opening:
    """Limits and stores of a call.

    Attributes:
      limits: of the files that are opened.
      stores: servers and buckets by their URL.
    """

    def __init__(self, limits: Limits, stores: dict[str, Any]):
        self.limits = limits
        self.stores = stores


_OPENING: ContextVar[Opening | None] = ContextVar("orbax_t5x_opening", default=None)


def current_opening() -> Opening:
    """Returns the opening that runs, or a new opening."""
    return _OPENING.get() or Opening(Limits(), {})


@contextmanager
def opening(limits: Limits | None = None) -> Generator[Opening, None, None]:
    """Shares limits and stores during a call, and calls inside it, which may set other limits."""
    outer = _OPENING.get()
    entered = Opening(limits or (outer.limits if outer else Limits()), outer.stores if outer else {})
    token = _OPENING.set(entered)
    try:
        yield entered
    finally:
        _OPENING.reset(token)
        if outer is None:
            for store in entered.stores.values():
                store.forget()


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
    return LocalFiles(path, limits=current_opening().limits)


def open_directory_of(path: str) -> tuple[Files, str]:
    """Makes the files of a named file's directory."""
    file = files_at(path)
    directory, name = os.path.split(file.path if file.is_link() else file.named)
    return files_at(directory), name
