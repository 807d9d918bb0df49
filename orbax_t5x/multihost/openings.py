"""Openings of the processes of a job: the opener publishes what its store answered, the others receive it."""

from __future__ import annotations

import collections
import logging
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from orbax_t5x.concurrency import call_in_thread
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.files.error_data import error_as_data, error_from_data
from orbax_t5x.files.recorded import using
from orbax_t5x.files.transcript import MOST_TRANSCRIPT_BYTES, Transcript, Viewpoint
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.heartbeat import POLL_SECS, wait_with_living_peers
from orbax_t5x.multihost.publication import Publication, begun_publications

_REPORT_SECS = 10.0  # between two log lines
# How long a process waits for the opener to begin: in collective calls, and where it may be the only caller.
_COLLECTIVE_BEGIN_SECS = 60.0
_BEGIN_SECS = 20.0

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
# Openings of each name: made by the opener, or consumed by this process.
_openings: collections.Counter[str] = collections.Counter()


def publish(store: Any, name: str, function: Callable[[], _Result], is_collective: bool) -> _Result:
    """Calls a function that opens, and publishes what the store answered, or how it failed; for the opener."""
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
        publication.write({"alone": whole is None}, None if whole is None else zlib.compress(whole, 1))
        return result
    finally:
        publication.keep(is_collective)


def received(store: Any, name: str, path: str, group: ProcessGroup, is_collective: bool) -> Transcript | None:
    """Returns what the opener has published of this call; None where this process shall open for itself."""
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
        return wait_with_living_peers(call_in_thread(receive, "orbax_t5x-catalogue"), group.members, path)
    finally:
        abandoned.set()


def _taken(
    store: Any, name: str, path: str, group: ProcessGroup, is_collective: bool, abandoned: threading.Event
) -> tuple[Publication, list[Publication]] | None:
    """Waits for the opener to begin a call that this process has not made; None in vain.

    Returns:
      The newest publication, since what was stored may have changed between calls that only the opener has made; and
      those that this call consumes.
    """
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
        time.sleep(POLL_SECS)
    return None


def _transcript(
    publication: Publication, path: str, group: ProcessGroup, abandoned: threading.Event
) -> Transcript | None:
    """Waits for the end of an opening; None where this process shall open for itself; raises the opener's error."""
    begin = time.monotonic()
    while (head := publication.head(_REPORT_SECS)) is None:
        if abandoned.is_set():
            raise CheckpointIOError("the wait for the process that opens it was interrupted", path=path)
        if publication.is_removed():
            return None
        waited = time.monotonic() - begin
        _logger.warning("%s: have waited %.0f s for process %d to open it", path, waited, group.primary)
    return _parsed(publication, head, path, group)


def _parsed(publication: Publication, head: dict[str, Any], path: str, group: ProcessGroup) -> Transcript | None:
    """Returns the transcript of an opening that has ended; as `_transcript`."""
    if "error" in head:
        if head["error"] is None:
            message = f"opening it failed on process {group.primary}; the error raised there has the reason"
            raise CheckpointIOError(message, path=path)
        raise error_from_data(head["error"])
    if head["alone"]:
        return None
    try:
        packed = publication.data(head)
        if packed is None:
            return None
        unpacking = zlib.decompressobj()
        whole = unpacking.decompress(packed, MOST_TRANSCRIPT_BYTES + 1)  # one more, so that its end is seen
        if unpacking.eof:
            return Transcript.decode(whole, Viewpoint(group.process, group.primary))
        raise ValueError("it has no end")
    except (ValueError, zlib.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointIOError(f"what process {group.primary} sent of the checkpoint is damaged", path=path) from error
