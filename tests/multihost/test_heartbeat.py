"""Heartbeats of a process through the coordination service, and the peers that it takes for lost."""

from __future__ import annotations

import threading
from unittest import mock

from orbax_t5x.multihost import heartbeat


class Service:
    """A key-value store with the numbers of many processes, one of which never changes."""

    def __init__(self, processes: int):
        self.values = {f"orbax_t5x/beat/{process}": "0" for process in range(processes)}
        self.still = "orbax_t5x/beat/1"
        self.requests = 0
        self.reads = threading.Semaphore(0)

    def key_value_set(self, key, text, *, allow_overwrite):
        assert allow_overwrite
        self.requests += 1
        self.values[key] = text

    def key_value_dir_get(self, prefix):
        self.requests += 1
        for key in self.values.keys() - {self.still}:
            self.values[key] += "1"
        self.reads.release()
        return [(key, text) for key, text in self.values.items() if key.startswith(prefix)]


def test_the_numbers_of_512_processes_are_one_request_and_the_still_one_is_named():
    service = Service(512)
    with mock.patch.multiple(heartbeat, _BEAT_SECS=0.01, _SILENT_SECS=1.0):
        own = heartbeat.Heartbeat(service, 0)
        try:
            lost = None
            while lost is None:
                assert service.reads.acquire(timeout=30)
                lost = own.lost_peer()
            beats, requests = own.count, service.requests
        finally:
            own.stop()
    assert lost.startswith("process 1 has sent no heartbeat")
    assert 2 * beats - 1 <= requests <= 2 * beats + 2


def test_a_process_that_has_left_its_call_is_not_lost():
    service = Service(2)
    service.values[service.still] = "gone"
    with mock.patch.multiple(heartbeat, _BEAT_SECS=0.01, _SILENT_SECS=0.05):
        own = heartbeat.Heartbeat(service, 0)
        try:
            for _ in range(20):
                assert service.reads.acquire(timeout=30)
                assert "process 1" not in (own.lost_peer() or "")
        finally:
            own.stop()


def test_a_process_that_reads_nothing_does_not_take_the_others_for_lost():
    """What it has not read for long may have changed long ago."""
    service, answers = Service(2), threading.Event()
    read = service.key_value_dir_get

    def read_once(prefix):
        if service.reads.acquire(blocking=False):  # it was read before
            answers.wait()
        return read(prefix)

    service.key_value_dir_get = read_once
    with mock.patch.multiple(heartbeat, _BEAT_SECS=0.01, _SILENT_SECS=0.5):
        own = heartbeat.Heartbeat(service, 7)
        try:
            while (lost := own.lost_peer()) is None:
                pass
        finally:
            answers.set()
            own.stop()
    assert lost.startswith("the coordination service of JAX has not answered")
