"""Table of the schemes of URLs.

It tells how URLs are read, and who answers requests to their servers. Only the caller's own URL ever comes here; no
file decides where a request goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.registry import Registry

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
        "http": "orbax_t5x.extras.web.schemes:WEB",
        "https": "orbax_t5x.extras.web.schemes:WEB",
        "s3": "orbax_t5x.files.remote.buckets:BUCKETS",
        "gs": "orbax_t5x.files.remote.buckets:BUCKETS",
        "hf": "orbax_t5x.extras.web.schemes:HUB",
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
