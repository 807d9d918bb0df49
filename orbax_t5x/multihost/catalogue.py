"""Opens a checkpoint once for all processes of a job: one process reads its metadata, the others receive the answers.

The opener, process 0 of the coordination service, runs the readers, records what the store answered
(`storage.transcript`), and puts that into the key-value store of `jax.distributed`, compressed and in pieces below the
limit of a message. It waits for no one. The others run the same readers over these answers. What fails in the opener is
raised by all, with the same type and text.

The others wait for the opener to begin the same opening, and then for its end as long as the heartbeats go on. Where it
does not begin, because it opens something else, has failed before or is late, a process opens for itself. Outside of
collective calls (`plan_restore`, `verify`, `diff`) a process may be the only one that calls, and waits less.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

from orbax_t5x.concurrency import call_in_thread
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.multihost.coordination import (
    has_backend,
    key_value_store,
    service_process_count,
    service_process_id,
    waited_for_bytes,
)
from orbax_t5x.multihost.heartbeat import POLL_SECS, sending_heartbeats, wait_with_living_peers
from orbax_t5x.storage.error_data import error_as_data, error_from_data
from orbax_t5x.storage.transcript import MOST_TRANSCRIPT_BYTES, Transcript, Viewpoint, current_transcript, using

_Result = TypeVar("_Result")

_KEYS = "orbax_t5x/catalogue/"
_BEGUN = "orbax_t5x/catalogue_begun/"  # no key below it holds bytes, so that it can be read as text
_OPENER = 0
# A message of gRPC has 4 MiB by default.
_PIECE_BYTES = 1 << 20
_REPORT_SECS = 10.0  # between two log lines
# How long a process waits for the opener to begin: in collective calls, and where it may be the only caller; there, how
# old that beginning may be.
_COLLECTIVE_BEGIN_SECS = 60.0
_BEGIN_SECS = 20.0
_RECENT_SECS = 60.0
# Openings that are kept for slow processes; of older ones only a mark is left.
_KEPT = 16
_EXPIRED = b"expired"

_logger = logging.getLogger(__name__)
_is_collective: ContextVar[bool] = ContextVar("orbax_t5x_collective", default=False)
_lock = threading.Lock()
_openings: collections.Counter[str] = collections.Counter()
_published: collections.deque[tuple[str, int]] = collections.deque()


@contextmanager
def collective_call() -> Generator[None, None, None]:
    """Marks a call that every process makes: openings inside it are waited for."""
    token = _is_collective.set(True)
    try:
        yield
    finally:
        _is_collective.reset(token)


def opened_once(call: Sequence[Any], path: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that only reads metadata, from a store that one process of the job asks for all.

    Args:
      call: names the call and its arguments; equal on processes that open the same.
      path: for errors and the log.
      function: opens, the same on every process.

    Raises:
      CheckpointError: what the function raises on this process, or has raised on the opener; or a process is lost.
    """
    if current_transcript() is not None or not jax.distributed.is_initialized() or service_process_count() < 2:
        return function()
    is_collective = _is_collective.get()
    if not is_collective and not has_backend():
        return function()  # whoever waits sends heartbeats, which bear the number that the backend gives
    name = hashlib.sha256(json.dumps([is_collective, *call]).encode()).hexdigest()[:32]
    with sending_heartbeats():
        try:
            store = key_value_store()
            if service_process_id() == _OPENER:
                return _Publication(store, name, _next(name)).open(function)
            received = _received(store, name, path, is_collective)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError) or not _is_of_service(error):
                raise
            reason = " ".join(str(error).split())
            message = f"another process of this call has died, or cannot be reached: {reason}"
            raise CheckpointIOError(message, path=path) from error
        if received is None:
            return function()
        with using(received):
            return function()


def _is_of_service(error: BaseException) -> bool:
    """Tests whether an error is of the coordination service, and not of the function."""
    return type(error).__module__.partition(".")[0] in ("jaxlib", "jax")


def _next(name: str) -> int:
    with _lock:
        number = _openings[name]
        _openings[name] += 1
    return number


class _Publication:
    """One opening of the opener."""

    def __init__(self, store: Any, name: str, number: int):
        self._store = store
        self._key = f"{_KEYS}{name}/{number}"
        self._begun = f"{_BEGUN}{name}/{number}"

    def open(self, function: Callable[[], _Result]) -> _Result:
        """Calls the function, and publishes what the store answered, or how it failed."""
        self._store.key_value_set(self._begun, str(time.time()), allow_overwrite=True)
        transcript = Transcript()
        try:
            with using(transcript):
                result = function()
            whole = transcript.encode()
        except BaseException as error:
            self._publish_head({"error": error_as_data(error)})
            raise
        if whole is None:
            _logger.warning("the metadata are too many to be sent to the other processes; each reads them for itself")
            self._publish_head({"alone": True})
            return result
        packed = zlib.compress(whole, 1)
        pieces = range(0, len(packed), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._set(str(number), packed[start : start + _PIECE_BYTES])
        self._publish_head({"pieces": len(pieces), "sha256": hashlib.sha256(packed).hexdigest()})
        self._expire(len(pieces))
        return result

    def _set(self, name: str, data: bytes) -> None:
        self._store.key_value_set_bytes(f"{self._key}/{name}", data, allow_overwrite=True)

    def _publish_head(self, head: Any) -> None:
        self._set("head", json.dumps(head).encode())

    def _expire(self, pieces: int) -> None:
        with _lock:
            _published.append((self._key, pieces))
            old = [_published.popleft() for _ in range(len(_published) - _KEPT)]
        for key, count in old:
            self._store.key_value_set_bytes(f"{key}/head", _EXPIRED, allow_overwrite=True)
            for number in range(count):
                self._store.key_value_delete(f"{key}/{number}")


def _received(store: Any, name: str, path: str, is_collective: bool) -> Transcript | None:
    """Returns what the opener has published of this call; None where this process shall open for itself."""
    abandoned = threading.Event()

    def receive() -> Transcript | None:
        number = _begun(store, name, path, is_collective, abandoned)
        if number is None:
            return None
        head = _wait_for(store, f"{_KEYS}{name}/{number}/head", path, abandoned)
        if head == _EXPIRED:
            return None
        return _parsed(store, f"{_KEYS}{name}/{number}", json.loads(head), path)

    try:
        return wait_with_living_peers(call_in_thread(receive, "orbax_t5x-catalogue"), path)
    finally:
        abandoned.set()


def _begun(store: Any, name: str, path: str, is_collective: bool, abandoned: threading.Event) -> int | None:
    """Waits for the opener to begin a call that this process has not received; returns its number, None in vain."""
    begin, earliest = time.monotonic(), 0.0 if is_collective else time.time() - _RECENT_SECS
    most = _COLLECTIVE_BEGIN_SECS if is_collective else _BEGIN_SECS
    while not abandoned.is_set():
        known = [(int(key.rpartition("/")[2]), text) for key, text in store.key_value_dir_get(f"{_BEGUN}{name}/")]
        new = sorted(number for number, text in known if float(text) >= earliest and number >= _openings[name])
        if new:
            with _lock:
                # All make the same collective calls; of others the opener's are as many as this process makes.
                _openings[name] = (new[-1] if is_collective else new[0]) + 1
            # The newest: what was stored may have changed between calls that only the opener has made.
            return new[-1]
        if time.monotonic() - begin > most:
            _logger.warning(
                "%s: process %d has not begun to open it within %g s; this process opens it for itself",
                *(path, _OPENER, most),
            )
            return None
        time.sleep(POLL_SECS)
    return None


def _wait_for(store: Any, key: str, path: str, abandoned: threading.Event) -> bytes:
    begin = time.monotonic()
    while not abandoned.is_set():
        if (found := waited_for_bytes(store, key, _REPORT_SECS)) is not None:
            return found
        waited = time.monotonic() - begin
        _logger.warning("%s: have waited %.0f s for process %d to open it", path, waited, _OPENER)
    raise CheckpointIOError("the wait for the process that opens it was interrupted", path=path)


def _parsed(store: Any, key: str, head: dict[str, Any], path: str) -> Transcript | None:
    """Returns the transcript of a publication, None where there is none; raises the opener's error."""
    if "error" in head:
        if head["error"] is None:
            message = f"opening it failed on process {_OPENER}; the error raised there has the reason"
            raise CheckpointIOError(message, path=path)
        raise error_from_data(head["error"])
    if "alone" in head:
        return None
    pieces = [waited_for_bytes(store, f"{key}/{number}", _REPORT_SECS) for number in range(head["pieces"])]
    packed = b"".join(piece or b"" for piece in pieces)
    unpacking = zlib.decompressobj()
    if hashlib.sha256(packed).hexdigest() == head["sha256"]:
        whole = unpacking.decompress(packed, MOST_TRANSCRIPT_BYTES + 1)  # one more, so that its end is seen
        if unpacking.eof:
            return Transcript.decode(whole, Viewpoint(service_process_id(), _OPENER))
    raise CheckpointIOError(f"what process {_OPENER} sent of the checkpoint is damaged", path=path)
