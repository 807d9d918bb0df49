"""Files of web servers, buckets and the Hugging Face hub.

obstore reads files by ranges and lists directories; TensorStore reads arrays by its own http, gcs and s3 stores.
Proxies, TLS, retries and redirects are theirs. A file is opened by one ranged request, which gives its size, its ETag
and its first bytes, also where HEAD requests are refused. Ranges are read in batches of a few MiB, and at the end of an
execution each file's size and ETag are asked for again. Memory: one batch for each thread that reads.
"""

from __future__ import annotations

import errno
import functools
import os
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import obstore
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, HTTPStore, S3Store

from orbax_t5x import on_demand
from orbax_t5x.concurrency import OnceEach, waiting_pool
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
    for_caller,
)
from orbax_t5x.files.interface import ArrayDirectory, Files, Look, Snapshot, Subdirectories
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.native_errors import is_bad_range, is_denied, store_reason
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.places import FILE_SUFFIXES, StoreUrl, current_opening, split_url
from orbax_t5x.files.windows import MAX_GAP_BYTES, held_bytes
from orbax_t5x.text.masked import masked

_hub_store = on_demand.function("orbax_t5x.files.hub", "HubStore")
_fetched_directory = on_demand.function("orbax_t5x.files.fetched", "fetched_directory")

# What the request that opens a file reads. Less: headers take a request more. More: files whose arrays alone are wanted
# cost it for nothing.
FIRST_BYTES = 64 << 10
# Ranges that a thread fetches at a time. More waits longer for the first byte and holds more memory, less pays for more
# requests.
_BATCH_BYTES = 4 << 20
_BATCH_RANGES = 256
_RETRY_SECS = 60
CLIENT: Any = {"allow_http": True, "connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=8), "base": 2}
RETRIES: Any = {"max_retries": 20, "retry_timeout": timedelta(seconds=_RETRY_SECS), "backoff": _BACKOFF}
# Marks of formats, then files of models: a web server does not list its directories.
_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint")
_MODEL_FILES = (
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *("flax_model.msgpack", "flax_model.msgpack.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
)


class OpenedFile(NamedTuple):
    """Size, ETag (or the time of its last change) and first bytes of a file."""

    size: int
    mark: str
    data: bytes


class Listing(NamedTuple):
    """Names in a directory: files, and directories."""

    files: frozenset[str]
    directories: frozenset[str]


class RemoteStore:
    """Web server or bucket.

    Attributes:
      base: URL of the server or bucket, without a slash at the end.
      can_list: Whether it lists its files; web servers do not.
      is_fixed: Whether its files never change.
      refusal: Error of the last request that was denied, or None.
    """

    is_fixed = False

    def __init__(self, base: str):
        """Sends no request."""
        self.base = base
        scheme, _, name = base.partition("://")
        self.can_list: bool = scheme not in ("http", "https")
        self.refusal: BaseException | None = None
        self._kvstore: dict[str, Any] = {}
        self._store: Any
        try:
            if scheme == "s3":
                self._store, self._kvstore = _amazon_bucket(name)
            elif scheme == "gs":
                self._store, self._kvstore = _google_bucket(name)
            else:
                self._store = self._web_server()
        except (BaseError, ValueError) as error:
            raise UnsupportedCheckpointError(f"the URL cannot be used: {_reason(error)}", path=base) from None
        self.forget()

    def _web_server(self) -> Any:
        return HTTPStore.from_url(self.base, client_options=CLIENT, retry_config=RETRIES)

    def forget(self) -> None:
        """Drops first bytes and listings; they serve one opening."""
        self._opened: OnceEach[str, OpenedFile | None] = OnceEach()
        self._listings: dict[str, Listing] = {}

    def url(self, key: str) -> str:
        """Returns the URL of a key, as text."""
        return f"{self.base}/{key}" if key else self.base

    def place(self, key: str) -> str:
        """Returns the path of a key in the object store."""
        return key

    def open(self, key: str) -> OpenedFile | None:
        """Reads the first bytes of a file once, or returns None if it is missing or denied.

        Raises:
          CheckpointIOError: The store failed.
        """
        return self._opened.get(key, lambda: self.open_again(key, FIRST_BYTES))

    def open_again(self, key: str, size: int) -> OpenedFile | None:
        """Reads the first bytes of a file with a new request."""
        try:
            try:
                response = obstore.get(self._store, self.place(key), options={"range": (0, size)})
            except BaseError as error:
                if not is_bad_range(error):
                    raise
                response = obstore.get(self._store, self.place(key))  # an empty file has no range
            data = bytes(response.bytes())
        except FileNotFoundError:
            return None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            # Buckets that may not be listed deny what they do not hold.
            self.refusal = error
            return None
        except NotSupportedError as error:
            if not key.endswith(FILE_SUFFIXES):
                return None  # a page about a directory
            message = f"{_reason(error)}; only a server that answers byte ranges (206) can be read"
            raise UnsupportedCheckpointError(message, path=self.url(key)) from None
        except (BaseError, OSError) as error:
            raise store_error(error, "opening it", path=self.url(key)) from None
        meta = response.meta
        return OpenedFile(meta["size"], meta["e_tag"] or str(meta["last_modified"]), data)

    def list(self, directory: str) -> Listing:
        """Lists one level of a directory, once."""
        if directory not in self._listings:
            self._listings[directory] = self._list(directory)
        return self._listings[directory]

    def _list(self, directory: str) -> Listing:
        try:
            level = obstore.list_with_delimiter(self._store, directory or None)  # pyright: ignore[reportUnknownMemberType]
        except (BaseError, OSError) as error:
            raise store_error(error, "listing it", path=self.url(directory)) from None
        start = len(directory) + 1 if directory else 0
        names = (meta["path"][start:] for meta in level["objects"])
        directories = (prefix[start:].rstrip("/") for prefix in level["common_prefixes"])
        return Listing(frozenset(filter(None, names)), frozenset(filter(None, directories)))

    def is_listed(self, directory: str) -> bool:
        """Returns True if `list` has been called for a directory."""
        return directory in self._listings

    def fetch(self, key: str, ranges: Sequence[tuple[int, int]], leaf: str | None) -> list[memoryview]:
        """Reads ranges (start, stop) of a file; joins those with gaps below 4 KiB.

        Raises:
          CheckpointError: The store failed, or the file ends before a range.
        """
        starts, stops = zip(*ranges, strict=True)
        path = self.url(key)
        try:
            pieces = obstore.get_ranges(
                self._store, self.place(key), starts=starts, ends=stops, coalesce=MAX_GAP_BYTES - 1
            )
        except FileNotFoundError:
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=path, leaf=leaf) from None
        except (BaseError, OSError) as error:
            if is_bad_range(error):
                message = f"ends before byte {max(stops)}"
                raise CorruptCheckpointError(message, path=path, leaf=leaf) from None
            raise store_error(error, "reading it", path=path, leaf=leaf) from None
        except BaseException as error:
            # Of a file that was cut obstore cuts out a range that it does not have, and its thread panics.
            if type(error).__name__ != "PanicException":
                raise
            raise CorruptCheckpointError(f"ends before byte {max(stops)}", path=path, leaf=leaf) from None
        for data, start, stop in zip(pieces, starts, stops, strict=True):
            if len(data) != stop - start:
                raise CorruptCheckpointError(f"ends before byte {stop}", path=path, leaf=leaf)
        return [memoryview(data) for data in pieces]

    def kvstore(self, root: str, metadata: str) -> dict[str, Any] | None:
        """Returns TensorStore's spec of a directory, or None if TensorStore cannot read it.

        `metadata` is the name of a file in it, whose redirect tells where a web server has moved the directory.
        """
        if self.can_list:
            return {**self._kvstore, "path": f"{root}/" if root else ""}
        url = _redirected(self.url(""), f"{root}/{metadata}" if root else metadata)
        if not url.endswith(f"/{urllib.parse.quote(metadata)}"):
            return None
        server = urllib.parse.urlsplit(url.removesuffix(urllib.parse.quote(metadata)))
        base = urllib.parse.urlunsplit((server.scheme, server.netloc, "", "", ""))
        return {"driver": "http", "base_url": base, "path": urllib.parse.unquote(server.path)}

    def download(self, directory: str, names: Sequence[str]) -> str:
        """Fetches files of a directory whole, and returns the local directory that holds them."""
        return _fetched_directory(self, directory, names)

    def copy(self, key: str, path: str) -> int:
        """Writes a whole file to a local path, in pieces; returns its size.

        Raises:
          CheckpointGoneError: The file is missing.
          CheckpointIOError: The store or the disk failed.
        """
        try:
            with open(path, "wb") as file:
                for piece in obstore.get(self._store, self.place(key)).stream(min_chunk_size=_BATCH_BYTES):
                    file.write(piece)
                return file.tell()
        except FileNotFoundError:
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=self.url(key)) from None
        except (BaseError, OSError) as error:
            raise store_error(error, "fetching it", path=self.url(key)) from None

    def put(self, key: str, data: Any) -> None:
        """Writes an object; `data` is a local path or bytes."""
        try:
            obstore.put(self._store, key, data)
        except (BaseError, OSError) as error:
            raise store_error(error, "writing it", path=self.url(key)) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects."""
        try:
            obstore.delete(self._store, list(keys))
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise store_error(error, "removing it", path=self.url(keys[0])) from None

    def all_keys(self, directory: str) -> list[str]:
        """Lists the keys of all objects under a directory."""
        try:
            pages = obstore.list(self._store, directory)  # pyright: ignore[reportUnknownMemberType]
            return [meta["path"] for page in pages for meta in page]
        except (BaseError, OSError) as error:
            raise store_error(error, "listing it", path=self.url(directory)) from None


def _amazon_bucket(bucket: str) -> tuple[Any, dict[str, Any]]:
    """Connects to a bucket of Amazon's protocol, for obstore and for TensorStore.

    Credentials are those of the environment, or of boto3's session where it is installed; without any, access is
    anonymous.
    """
    options: dict[str, Any] = {"client_options": CLIENT, "retry_config": RETRIES}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    has_keys = any(name in os.environ for name in _AMAZON_CREDENTIALS)
    session = None if has_keys else _boto3_session()
    if session is not None:
        from_boto3 = on_demand.function("obstore.auth.boto3", "Boto3CredentialProvider")
        options["credential_provider"] = from_boto3(session)
        region = region or session.region_name
        spec["aws_credentials"] = {"type": "default", "profile": session.profile_name}
    elif not has_keys:
        options["skip_signature"] = True
        spec["aws_credentials"] = {"type": "anonymous"}
    if endpoint:
        region = region or "us-east-1"  # any will do there
        options["endpoint"] = spec["endpoint"] = endpoint
    if region := region or _region_of(bucket):
        options["region"] = spec["aws_region"] = region
    return S3Store(bucket, **options), spec


_AMAZON_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)


def _boto3_session() -> Any:
    """Returns boto3's session if boto3 is installed and finds credentials, or None."""
    try:
        session = on_demand.function("boto3", "Session")()
        return session if session.get_credentials() is not None else None
    except ImportError:
        return None
    except Exception as error:  # of botocore, such as a profile that is not configured
        message = f"the credentials of s3:// cannot be used: {masked(str(error))}"
        raise CheckpointIOError(message, errno=errno.EACCES) from None


def _region_of(bucket: str) -> str | None:
    """Asks Amazon for the region of a bucket; it tells without credentials."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.headers.get("x-amz-bucket-region")
    except urllib.error.HTTPError as error:
        return error.headers.get("x-amz-bucket-region")
    except OSError:
        return None


def _google_bucket(bucket: str) -> tuple[Any, dict[str, Any]]:
    """Connects to a bucket of Google, for obstore and for TensorStore."""
    options: dict[str, Any] = {"client_options": CLIENT, "retry_config": RETRIES}
    if base_url := os.environ.get("GOOGLE_BASE_URL"):
        options["base_url"] = base_url
    if not _has_google_credentials():
        options["skip_signature"] = True
    return GCSStore(bucket, **options), {"driver": "gcs", "bucket": bucket}


def _has_google_credentials() -> bool:
    """Returns True if keys are configured, or the machine is Google's and has an account."""
    if any(name.startswith(("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT")) for name in os.environ):
        return True
    if os.path.exists(os.path.expanduser("~/.config/gcloud/application_default_credentials.json")):
        return True
    if "GCE_METADATA_HOST" in os.environ:
        return True
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return file.read().strip().startswith("Google")
    except OSError:
        return False


def _redirected(base: str, key: str) -> str:
    """Returns the URL to which a server sends for a file, or the file's own URL."""
    url = f"{base}/{urllib.parse.quote(key)}"
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with urllib.request.urlopen(request, timeout=_RETRY_SECS) as response:
            return response.url
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise CheckpointIOError(f"finding where it is: {masked(str(reason))}", path=url) from None


def _reason(error: BaseException) -> str:
    """Returns the reason of obstore's error, without secrets of URLs."""
    return masked(store_reason(error))


def store_error(error: BaseException, doing: str, *, path: str, leaf: str | None = None) -> CheckpointError:
    """Makes the typed error of a failed request."""
    message = f"{doing}: {_reason(error)}"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or is_denied(error):
        message += "; credentials are missing or do not suffice"
        return CheckpointIOError(message, path=path, leaf=leaf, errno=errno.EACCES)
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(message, path=path, leaf=leaf)
    return CheckpointIOError(message, path=path, leaf=leaf)


class RemoteFile:
    """File of a store; implements `StoredFile`.

    Attributes:
      name: Name relative to the root.
      path: URL.
      size: Size in bytes at the opening.
      limits: Limits of the opening.
      require_open: Raises ValueError after the checkpoint was closed.
    """

    is_remote = True

    def __init__(self, files: RemoteFiles, key: str, name: str, opened: OpenedFile):
        self._store = files.store
        self._key = key
        self._opened = opened
        # The last bytes that were read beyond the first ones, and where they begin.
        self._held = 0, b""
        self.name = name
        self.path: str = files.store.url(key)
        self.size: int = opened.size
        self.limits: Limits = files.limits
        self.require_open: Callable[[], None] = files.require_open

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Implements `StoredFile.read`."""
        self.require_open()
        if offset < 0 or size < 0 or offset + size > self.size:
            message = f"bytes {offset} to {offset + size} requested of a file of {self.size} bytes"
            raise CorruptCheckpointError(message, path=self.path, leaf=leaf)
        if (window := held_bytes(self, offset, size)) is not None:
            return bytearray(window)
        start, data = self._held
        if offset + size <= len(self._opened.data):
            start, data = 0, self._opened.data
        elif not start <= offset or offset + size > start + len(data):
            stop = min(self.size, offset + max(size, FIRST_BYTES))
            # Archives are read from their end.
            start = offset if stop < self.size else max(0, min(offset, stop - FIRST_BYTES))
            data = bytes(self._store.fetch(self._key, [(start, stop)], leaf)[0]) if size else b""
            self._held = start, data
        return bytearray(data[offset - start : offset - start + size])

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredFile.read_into`."""
        size = sum([buffer.nbytes for buffer in buffers])
        self.ahead([(offset, size)]).read_into(offset, buffers, leaf=leaf)

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> RangesAhead:
        """Implements `StoredBytes.ahead`."""
        return RangesAhead(self, ranges)

    def fetch(self, ranges: Sequence[tuple[int, int]], leaf: str | None) -> list[memoryview]:
        """Reads ranges (offset, size)."""
        self.require_open()
        return self._store.fetch(self._key, [(offset, offset + size) for offset, size in ranges], leaf)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Asks for size and ETag again; implements `StoredBytes.check_unchanged`."""
        self.require_open()
        if self._store.is_fixed:
            return
        current = self._store.open_again(self._key, 1)
        if current is None:
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=self.path, leaf=leaf)
        if (current.size, current.mark) != (self.size, self._opened.mark):
            before, after = (f"{file.size} bytes, ETag {file.mark}" for file in (self._opened, current))
            message = f"changed after the checkpoint was opened: it was {before}, and is {after}"
            raise CheckpointGoneError(message, path=self.path, leaf=leaf)


class RangesAhead:
    """Announced ranges of a file, fetched a batch at a time; for a single thread."""

    def __init__(self, file: RemoteFile, ranges: Iterable[tuple[int, int]]):
        self._file = file
        self._ranges = iter(ranges)
        self._fetched: deque[memoryview] = deque()
        # Of a range larger than a batch: what is left of it.
        self._rest: tuple[int, int] | None = None

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `ReadAhead.read_into`."""
        if (window := held_bytes(self._file, offset, sum([buffer.nbytes for buffer in buffers]))) is not None:
            next(self._ranges, None)
            self._fetched.append(window.data)
        data = memoryview(b"")
        for buffer in buffers:
            out = buffer.reshape(-1).view(np.uint8)
            while out.size:
                if not data:
                    if not self._fetched:
                        self._fetch(leaf)
                    data = self._fetched.popleft()
                count = min(len(data), out.size)
                out[:count] = np.frombuffer(data[:count], np.uint8)
                data, out = data[count:], out[count:]

    def _fetch(self, leaf: str | None) -> None:
        """Fetches the next ranges together, or the next part of a large one."""
        batch: list[tuple[int, int]] = []
        room = _BATCH_BYTES
        while room and len(batch) < _BATCH_RANGES:
            following = self._rest or next(self._ranges, None)
            self._rest = None
            if following is None:
                break
            offset, size = following
            if size > room and batch:
                self._rest = following
                break
            count = min(size, room)
            if count:
                batch.append((offset, count))
            room -= count
            if count < size:
                self._rest = offset + count, size - count
        self._fetched.extend(self._file.fetch(batch, leaf))


class RemoteFiles(Files):
    """Files below a URL; see `Files`.

    They are made within an `opening`, and outlive it.

    Attributes:
      store: Server, bucket or repository.
      limits: Limits of the opening.
    """

    is_remote = True

    def __init__(self, url: str):
        """Sends no request."""
        opening = current_opening()
        parsed = split_url(url)
        if parsed.base not in opening.stores:
            opening.stores[parsed.base] = (_hub_store if parsed.base.startswith("hf:") else RemoteStore)(parsed.base)
        self.store: RemoteStore = opening.stores[parsed.base]
        self.limits: Limits = opening.limits
        self.can_list = self.store.can_list
        self._parsed: StoreUrl = parsed
        self.named: str = self.store.url(parsed.key)
        self._is_closed = False
        self._directories: OnceEach[str, dict[str, Any]] = OnceEach()

    @property
    def path(self) -> str:
        return self.named

    def _key(self, name: str, *, leaf: str | None = None) -> str:
        parts = split_name(name, path=self.path, leaf=leaf) if name else []
        return "/".join([self._parsed.key, *parts] if self._parsed.key else parts)

    # -- the root itself

    def is_directory(self) -> bool:
        return self._kind == "directory"

    @functools.cached_property
    def _kind(self) -> str:
        """Kind of the root: "file", "directory" or "missing"."""
        key, is_directory = self._parsed.key, self._parsed.is_directory
        if not is_directory and key.endswith(FILE_SUFFIXES):
            return "missing" if self.store.open(key) is None else "file"
        if self.can_list:
            listing = self.store.list(key)
            if listing.files or listing.directories:
                return "directory"
            return "missing" if is_directory or self.store.open(key) is None else "file"
        opened = None if is_directory else self.store.open(key)
        # A web server may answer for a directory with a page.
        if opened is not None and not opened.data.lstrip().startswith(b"<"):
            return "file"
        if self.names():
            return "directory"
        return "missing" if opened is None else "file"

    def names(self) -> list[str]:
        if self.can_list:
            listing = self.store.list(self._parsed.key)
            return sorted(listing.files | listing.directories)
        for names in (_MARKS, _MODEL_FILES):
            if existing := [name for name, exists in zip(names, self.has_files(names), strict=True) if exists]:
                return sorted(existing)
        return []

    def subdirectories(self) -> Subdirectories:
        if not self.can_list:
            raise UnsupportedCheckpointError("web servers do not list their files", path=self.path)
        return Subdirectories(sorted(self.store.list(self._parsed.key).directories), [])

    # -- names below

    def join(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        return self.store.url(self._key(name, leaf=leaf))

    def exists(self, name: str = "") -> bool:
        return self.has_file(name)

    def has_file(self, name: str) -> bool:
        key = self._key(name)
        directory, _, last = key.rpartition("/")
        if not key:
            return False
        if self.can_list and (name or self.store.is_listed(directory)):
            return last in self.store.list(directory).files
        return self.store.open(key) is not None

    def _is_missing(self, key: str) -> bool:
        """Returns True if a listing that is known lacks a file."""
        directory, _, name = key.rpartition("/")
        return self.store.is_listed(directory) and name not in self.store.list(directory).files

    def has_files(self, names: Sequence[str]) -> list[bool]:
        if self.can_list:
            return [self.has_file(name) for name in names]
        return list(waiting_pool().map(self.has_file, names))

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        kind = "file" if name else self._kind
        if kind == "directory":
            return Look(kind, names=frozenset(self.names()))
        if kind == "missing" or self.store.open(self._key(name)) is None:
            if not name and self.store.refusal is not None:
                raise store_error(self.store.refusal, "reading its status", path=self.path)
            return Look("missing")
        file = self.file(name)
        last = file.read(max(0, file.size - tail), min(file.size, tail)) if tail else b""
        return Look("file", bytes(file.read(0, min(head, file.size))), bytes(last), file.size)

    def file(self, name: str, *, leaf: str | None = None) -> RemoteFile:
        key = self._key(name, leaf=leaf)
        opened = None if self._is_missing(key) else self.store.open(key)
        if opened is None:
            if self.store.refusal is not None:
                raise store_error(self.store.refusal, "opening it", path=self.store.url(key), leaf=leaf)
            raise CheckpointNotFoundError("no such file", path=self.store.url(key), leaf=leaf)
        return RemoteFile(self, key, name, opened)

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        file = self.file(name, leaf=leaf)
        if file.size > limit:
            message = f"{file.size} bytes, more than {bound} = {limit}"
            raise LimitExceededError(message, path=file.path, leaf=leaf)
        return bytes(file.read(0, file.size, leaf=leaf))

    def read_end(self, name: str, size: int) -> bytes:
        file = self.file(name)
        size = min(size, file.size)
        return bytes(file.read(file.size - size, size))

    def require_open(self) -> None:
        if self._is_closed:
            raise for_caller(ValueError(f"{self.path}: the checkpoint is closed; its leaves can no longer be read"))

    def close(self) -> None:
        self._is_closed = True

    # -- what TensorStore reads by itself

    def kvstore(self, name: str, metadata: str, files: Callable[[], Sequence[str]]) -> dict[str, Any]:
        spec = self._directories.get("", lambda: self._root_kvstore(f"{name}/{metadata}" if name else metadata))
        if spec:
            return {**spec, "path": spec["path"] + (f"{name}/" if name else "")}
        return self._directories.get(name or ".", lambda: self._fetched(name, files()))

    def _root_kvstore(self, metadata: str) -> dict[str, Any]:
        return self.store.kvstore(self._parsed.key, metadata) or {}

    def _fetched(self, name: str, files: Sequence[str]) -> dict[str, Any]:
        """Fetches files of a directory whole, for a store that TensorStore does not read."""
        return {"driver": "file", "path": self.store.download(self._key(name), files)}

    def entries(self, name: str) -> dict[str, bool]:
        listing = self.store.list(self._key(name))
        return {**dict.fromkeys(listing.files, False), **dict.fromkeys(listing.directories, True)}

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> RemoteFile:
        return self.file(metadata, leaf=leaf)

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> Any:
        stamp.check_unchanged(leaf=leaf)
        return stamp

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        path = self.locate(directory, leaf=leaf) if directory else self.path
        name = f"{directory}/{metadata}" if directory else metadata
        data = self.read_whole(name, limit=limit, leaf=leaf, bound="Limits.json_bytes")
        return ArrayDirectory(path, path, data, Snapshot(self, [directory], name, leaf=leaf))
