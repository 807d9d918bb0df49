"""Opens a checkpoint once for all processes of a job.

The opener, the primary process of the group that calls, runs the readers, records what the store answered
(`files.transcript`), and publishes that in the key-value store of `jax.distributed`: a mark that it has begun, a head,
and compressed pieces below the limit of a message. It waits for no one. The others run the same readers over these
answers. What fails in the opener is raised by all, with the same type and text.

The others wait for the opener to begin the same opening, and then for its end without limit. Where it
does not begin, because it opens something else, has failed before or is late, a process opens for itself. Outside of
collective calls (`plan_restore`) a process may be the only one that calls, and waits less.

A publication is removed when every other process has consumed it. One that some process does not consume is removed by
the opener: of calls that not every process makes a while after its end, by the opener's own clock; of collective calls
its bytes, when others follow, so that only the mark is left.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax

from orbax_t5x.concurrency import call_in_thread
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.files.transcript import MOST_TRANSCRIPT_BYTES, Transcript, Viewpoint, error_as_data, error_from_data
from orbax_t5x.multihost.coordination import (
    has_backend,
    key_value_store,
    lost_process,
    read_pieces,
    service_process_count,
    waited_for_bytes,
    write_pieces,
)
from orbax_t5x.multihost.groups import ProcessGroup

_KEYS = "orbax_t5x/catalogue/"
_BEGUN = "orbax_t5x/catalogue_begun/"  # no key below it holds bytes, so that it can be read as text
_EXPIRED = "expired"
# How long after its end a publication is kept for processes that may not ask for it.
_RECENT_SECS = 60.0
# Publications of collective calls whose bytes are kept for slow processes.
_KEPT = 16
_REPORT_SECS = 10.0  # between two log lines
_POLL_SECS = 0.1
# How long a process waits for the opener to begin: in collective calls, and where it may be the only caller.
_COLLECTIVE_BEGIN_SECS = 60.0
_BEGIN_SECS = 20.0

_Result = TypeVar("_Result")


def current_transcript():
    return True


using = contextlib.nullcontext
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_kept: collections.deque[Publication] = collections.deque()
# Openings of each name: made by the opener, or consumed by this process.
_openings: collections.Counter[str] = collections.Counter()


class _GroupCall(NamedTuple):
    group: ProcessGroup
    is_collective: bool
    # Openings of each name: a comparison may open a path twice.
    openings: collections.Counter[str]


_call: ContextVar[_GroupCall | None] = ContextVar("orbax_t5x_call", default=None)


@contextlib.contextmanager
def call_of_group(group: ProcessGroup, *, is_collective: bool = True) -> Generator[None, None, None]:
    """Marks a call of a group for openings inside it."""
    token = _call.set(_GroupCall(group, is_collective, collections.Counter()))
    try:
        yield
    finally:
        _call.reset(token)


@contextlib.contextmanager
def openings_of(processes: Any) -> Generator[None, None, None]:
    """Marks a call that some members may skip."""
    with call_of_group(ProcessGroup.of(processes), is_collective=False):
        yield


def opened_once(call: Sequence[Any], path: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that reads metadata once for all processes."""
    if current_transcript() is not None or not jax.distributed.is_initialized() or service_process_count() < 2:
        return function()
    current = _call.get()
    if current is None:
        if not has_backend():
            return function()  # which numbers the members
        current = _GroupCall(ProcessGroup.of(), False, collections.Counter())
    group, is_collective, counts = current
    if group.size == 1:
        return function()
    text = json.dumps([group.key, is_collective, *call])
    name = hashlib.sha256(f"{text}{counts[text] if is_collective else 0}".encode()).hexdigest()[:32]
    counts[text] += 1
    try:
        store = key_value_store()
        if group.is_primary:
            return _publish(store, name, function, is_collective)
        transcript = _received(store, name, path, group, is_collective)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError) or not _is_of_service(error):
            raise
        raise lost_process(error, path) from error
    if transcript is None:
        return function()
    with using(transcript):
        return function()


def _is_of_service(error: BaseException) -> bool:
    """Tests if the coordination service raised an error."""
    return type(error).__module__.partition(".")[0] in ("jaxlib", "jax")


class Publication(NamedTuple):
    """Publication of an opening; equal calls are numbered from 0."""

    store: Any
    name: str
    number: int
    is_expired: bool = False

    @property
    def _key(self) -> str:
        return f"{_KEYS}{self.name}/{self.number}"

    @property
    def _begun(self) -> str:
        return f"{_BEGUN}{self.name}/{self.number}"

    # -- the opener

    def begin(self) -> None:
        """Announces the opening."""
        self.store.key_value_set(self._begun, "", allow_overwrite=True)

    def write(self, head: dict[str, Any], data: bytes | None = None) -> None:
        """Writes the outcome of the opening, and bytes."""
        if data is not None:
            head = {**head, **write_pieces(self.store, self._key, data)}
        self.store.key_value_set_bytes(f"{self._key}/head", json.dumps(head).encode(), allow_overwrite=True)

    def keep(self, is_collective: bool) -> None:
        """Removes the publication later, if no consumer does."""
        if not is_collective:
            timer = threading.Timer(_RECENT_SECS, self._remove_if_connected)
            timer.daemon = True
            timer.start()
            return
        begun = {key for key, _ in self.store.key_value_dir_get(_BEGUN)}
        with _lock:
            known = [one for one in [*_kept, self] if one._begun in begun]
            _kept.clear()
            _kept.extend(known[-_KEPT:])
        for one in known[:-_KEPT]:
            self.store.key_value_set(one._begun, _EXPIRED, allow_overwrite=True)
            self.store.key_value_delete(one._key)

    def _remove_if_connected(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self._remove()

    def _remove(self) -> None:
        self.store.key_value_delete(self._begun)  # first: whoever waits for the head looks for it
        self.store.key_value_delete(self._key)  # and all keys below

    # -- the other processes

    def head(self, timeout_secs: float) -> dict[str, Any] | None:
        """Waits for the end of the opening, or returns None."""
        found = waited_for_bytes(self.store, f"{self._key}/head", timeout_secs)
        return None if found is None else json.loads(found)

    def data(self, head: dict[str, Any]) -> bytes | None:
        """Returns the written bytes, or None; see `read_pieces`."""
        return read_pieces(self.store, self._key, head, MOST_TRANSCRIPT_BYTES)

    def is_removed(self) -> bool:
        """Tests if nothing is left to wait for."""
        return self not in begun_publications(self.store, self.name)

    def consume(self, consumers: int) -> None:
        """Records a consumer; the last removes the publication."""
        if self.store.key_value_increment(f"{self._key}/consumed", 1) >= consumers:
            self._remove()


def begun_publications(store: Any, name: str) -> list[Publication]:
    """Returns the publications of a call, the oldest first."""
    begun = store.key_value_dir_get(f"{_BEGUN}{name}/")
    return sorted(Publication(store, name, int(key.rpartition("/")[2]), text == _EXPIRED) for key, text in begun)


def _publish(store: Any, name: str, function: Callable[[], _Result], is_collective: bool) -> _Result:
    with _lock:
        publication = Publication(store, name, _openings[name])
        _openings[name] += 1
    publication.begin()
    transcript = Transcript()
    try:
        with using(transcript):
            result = function()
            whole = transcript.encode()
    except BaseException as error:
        publication.write({"error": error_as_data(error)})
        raise
    else:
        if whole is None:
            _logger.warning("the metadata are too many to be sent to the other processes; each reads them for itself")
        publication.write({"alone": whole is None}, whole)
        return result
    finally:
        publication.keep(is_collective)


def _received(store: Any, name: str, path: str, group: ProcessGroup, is_collective: bool) -> Transcript | None:
    """Returns the opener's transcript, or None."""
    abandoned = threading.Event()

    def receive() -> Transcript | None:
        taken = _taken(store, name, path, group, is_collective, abandoned)
        if taken is None:
            return None
        newest, consumed = taken
        try:
            return None if newest.is_expired else _transcript(newest, path, group, abandoned)
        finally:
            for publication in consumed:
                publication.consume(group.size - 1)

    try:
        return call_in_thread(receive, "orbax_t5x-catalogue").result()
    finally:
        abandoned.set()


def _taken(
    store: Any, name: str, path: str, group: ProcessGroup, is_collective: bool, abandoned: threading.Event
) -> tuple[Publication, list[Publication]] | None:
    """Waits for an opening that this process has not made."""
    begin = time.monotonic()
    most = _COLLECTIVE_BEGIN_SECS if is_collective else _BEGIN_SECS
    while not abandoned.is_set():
        new = [one for one in begun_publications(store, name) if one.number >= _openings[name]]
        if new:
            # All make the same collective calls; of others the opener's are as many as this process makes.
            consumed = new if is_collective else new[:1]
            with _lock:
                _openings[name] = consumed[-1].number + 1
            return new[-1], consumed
        if time.monotonic() - begin > most:
            _logger.warning(
                "%s: process %d has not begun to open it within %g s; this process opens it for itself",
                *(path, group.primary, most),
            )
            return None
        time.sleep(_POLL_SECS)
    return None


def _transcript(
    publication: Publication, path: str, group: ProcessGroup, abandoned: threading.Event
) -> Transcript | None:
    """Waits for the end of an opening; raises the opener's error."""
    begin = time.monotonic()
    while (head := publication.head(_REPORT_SECS)) is None:
        if abandoned.is_set():
            raise CheckpointIOError("the wait for the process that opens it was interrupted", path=path)
        if publication.is_removed():
            return None
        waited = time.monotonic() - begin
        _logger.warning("%s: have waited %.0f s for process %d to open it", path, waited, group.primary)
    if "error" in head:
        if head["error"] is None:
            message = f"opening it failed on process {group.primary}; the error raised there has the reason"
            raise CheckpointIOError(message, path=path)
        raise error_from_data(head["error"])
    if head["alone"]:
        return None
    try:
        whole = publication.data(head)
        return None if whole is None else Transcript.decode(whole, Viewpoint(group.process, group.primary))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointIOError(f"what process {group.primary} sent of the checkpoint is damaged", path=path) from error
