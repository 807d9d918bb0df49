"""Buckets, read by TensorStore.

Credentials are those that TensorStore finds by itself: the usual environment variables, files and metadata services of
Amazon and Google, and no credentials without these, which public buckets allow.
"""

from __future__ import annotations

import os
from typing import Any, cast

import tensorstore as ts

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.native_errors import parse_error
from orbax_t5x.files.places import Scheme, lower_scheme, split_url
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE, BoundedRange
from orbax_t5x.files.remote.responses import (
    FIRST_DELAY_SECS,
    LONGEST_DELAY_SECS,
    MAX_RETRIES,
    PendingResponse,
    RequestError,
    RequestKind,
    Response,
    ResponseClock,
    Version,
)
from orbax_t5x.files.remote.server import Server

# Server of a bucket of Amazon's protocol; TensorStore requires a region then, and any will do.
_S3_ENDPOINT = "AWS_ENDPOINT_URL"
_S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ANY_REGION = "us-east-1"
# TensorStore's own waits between retries begin at one second and grow to half a minute, for half an hour: short
# outages would cost a full initial delay, and long ones would be waited for far too long.
_RETRIES = {"max_retries": MAX_RETRIES, "initial_delay": f"{FIRST_DELAY_SECS}s", "max_delay": f"{LONGEST_DELAY_SECS}s"}
_SETTINGS = {
    f"{driver}_{name}": value
    for driver in ("s3", "gcs")
    for name, value in (("request_concurrency", {"limit": REQUESTS_AT_ONCE}), ("request_retries", _RETRIES))
}
# Values that mean no generation: of a store without one, and of an emulator of Google's that sends it for stats and
# not for reads.
_NO_GENERATIONS = (b"\x10", b"\x00" + bytes(8), b"")


class Bucket(Server):
    """A bucket, read by TensorStore.

    TensorStore keeps all of a response before it looks at it, so that the bound holds only for what an honest store
    sends.
    """

    is_bounded = False

    def __init__(self, base: str, clock: ResponseClock):
        super().__init__(base, clock)
        self._kvstore = open_kvstore(base)

    def request(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        return _BucketRead(self._kvstore.read(key, byte_range=slice(wanted.start, wanted.stop)), wanted.most)

    def names(self, prefix: str, timeout: float) -> list[str]:
        keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0") if prefix else None  # all below a directory
        listing: Any = self._kvstore.list(keys)
        try:
            # A list comes in pages, and TensorStore does not report single ones.
            return [name.decode("utf-8", "replace") for name in listing.result(timeout=timeout)]
        except TimeoutError:
            listing.cancel()
            raise
        except ValueError as error:
            raise request_error(error) from error

    def close_idle(self) -> None:
        """Does nothing: TensorStore closes its connections by itself."""


class _BucketRead(PendingResponse):
    def __init__(self, future: Any, most: int):
        self._future = future
        self._most = most

    def result(self, timeout: float | None = None) -> Response | None:
        try:
            found = cast("ts.KvStore.ReadResult", self._future.result(timeout=timeout))
        except ValueError as error:
            raise request_error(error) from error
        if found.state != "value":
            return None
        if len(found.value) > self._most:
            raise CheckpointIOError(f"the answer has more than the {self._most} bytes asked for")
        generation = found.stamp.generation
        return Response(found.value, Version(b"" if generation in _NO_GENERATIONS else generation))

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        self._future.cancel()


_KINDS = {
    "PERMISSION_DENIED": RequestKind.DENIED,
    "UNAUTHENTICATED": RequestKind.DENIED,
    "NOT_FOUND": RequestKind.MISSING,
    "OUT_OF_RANGE": RequestKind.BEYOND_END,
}


def request_error(error: ValueError) -> RequestError:
    """Converts a failure of TensorStore."""
    found = parse_error(error)
    kind = _KINDS.get(found.status, RequestKind.OTHER)
    if kind is RequestKind.OTHER and found.is_ignored_range:
        kind = RequestKind.IGNORED_RANGE
    elif kind is RequestKind.OTHER and found.is_redirect:
        kind = RequestKind.REDIRECT
    return RequestError(found.reason, kind)


def open_kvstore(base: str) -> ts.KvStore:
    """Opens a bucket."""
    scheme, _, bucket = base.partition("://")
    spec: dict[str, Any] = {"driver": "gcs" if scheme == "gs" else scheme, "bucket": bucket}
    if scheme == "s3" and (endpoint := os.environ.get(_S3_ENDPOINT)):
        region = next((found for name in _S3_REGIONS if (found := os.environ.get(name))), _ANY_REGION)
        spec |= {"endpoint": endpoint, "aws_region": region}
    return ts.KvStore.open(spec, context=ts.Context(_SETTINGS)).result()


def _plain_url(url: str) -> str:
    split_url(url)
    return lower_scheme(url)


BUCKETS = Scheme(_plain_url, split_url, Bucket)
