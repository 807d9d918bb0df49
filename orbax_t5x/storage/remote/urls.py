"""URLs of stores: `http(s)://`, `s3://` and `gs://`, parsed; those of buckets are made into TensorStore's specs.

Only the caller's own URL ever comes here; no file decides where a request goes. Credentials are those that TensorStore
finds by itself: the usual environment variables, files and metadata services of Amazon and Google, and none where there
are none, which public buckets allow.
"""

from __future__ import annotations

import os
import urllib.parse
from typing import Any, NamedTuple

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.storage.paths import url_scheme
from orbax_t5x.storage.remote import hub

_HTTP = ("http", "https")
_BUCKETS = {"s3": "s3", "gs": "gcs"}
# Server of a bucket of Amazon's protocol; TensorStore requires a region then, and any will do.
_S3_ENDPOINT = "AWS_ENDPOINT_URL"
_S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ANY_REGION = "us-east-1"


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

    @property
    def can_list(self) -> bool:
        """True if the protocol lists objects; web servers do not."""
        return url_scheme(self.base) not in _HTTP


def is_remote(path: str) -> bool:
    """Reports whether a path is a URL of a store."""
    scheme = url_scheme(path)
    return scheme in _HTTP or scheme in _BUCKETS


def plain_url(url: str) -> str:
    """Returns the URL of a user without percent-encoding: from here on names are appended to it as they are.

    Raises:
      UnsupportedCheckpointError: no store is behind it, or it has a query or a fragment.
    """
    parse_url(url)
    if url_scheme(url) not in _HTTP:
        return f"{url_scheme(url)}://{url.partition('://')[2]}"
    if "?" in url or "#" in url:
        raise UnsupportedCheckpointError(
            "URLs with a query or a fragment are not read: the names of further files could not be appended", path=url
        )
    return f"{url_scheme(url)}://{urllib.parse.unquote(url.partition('://')[2])}"


def parse_url(url: str) -> StoreUrl:
    """Parses a plain URL.

    Raises:
      UnsupportedCheckpointError: another scheme, no host or bucket, or a password in it.
    """
    scheme = url_scheme(url)
    if scheme == hub.SCHEME:
        wanted = hub.parse_hub_path(url)
        revision = f"@{urllib.parse.quote(wanted.revision, safe='')}" if wanted.revision else ""
        return StoreUrl(f"hf://{wanted.repository}{revision}", wanted.file, not wanted.file)
    if scheme not in (*_HTTP, *_BUCKETS):
        raise UnsupportedCheckpointError(
            f"{scheme}:// paths are not read; http, https, s3, gs, hf and local paths are", path=url
        )
    where, _, rest = url.partition("://")[2].partition("/")
    if not where:
        raise UnsupportedCheckpointError("the URL names no server or bucket", path=url)
    if "@" in where:
        raise UnsupportedCheckpointError("names and passwords in URLs are not used", path=url)
    key = rest.strip("/")
    return StoreUrl(f"{scheme}://{where}", key, not key or rest.endswith("/"))


def kvstore_spec(base: str) -> dict[str, Any]:
    """Returns TensorStore's spec of a bucket, with an empty path."""
    scheme, _, where = base.partition("://")
    if scheme == hub.SCHEME:
        raise UnsupportedCheckpointError(
            "arrays in chunks are not read from the hub: download the files, and open the directory", path=base
        )
    spec: dict[str, Any] = {"driver": _BUCKETS[scheme], "bucket": where, "path": ""}
    if scheme == "s3" and (endpoint := os.environ.get(_S3_ENDPOINT)):
        region = next((found for name in _S3_REGIONS if (found := os.environ.get(name))), _ANY_REGION)
        spec |= {"endpoint": endpoint, "aws_region": region}
    return spec
