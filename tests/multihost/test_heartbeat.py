"""Heartbeats of a process through the coordination service, and the peers that it takes for lost."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

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
    assert 1.5 * beats - 1 <= requests <= 1.5 * beats + 2.5


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


class Clock:
    """The time, and a heartbeat of process 0 whose thread is these calls."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.service = Service(2)
        self.service.still = None
        monkeypatch.setattr(heartbeat, "call_in_thread", lambda run, name: None)
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        self.own = heartbeat.Heartbeat(self.service, 0)

    def read(self, *, is_still):
        self.service.still = "orbax_t5x/beat/1" if is_still else None
        self.own._read_others()
        return self.own.lost_peer()


def read_times(start):
    """Times of reads, one of which is at `start` seconds after a process's last heartbeat."""
    return [start + heartbeat._BEATS_PER_READ * heartbeat._BEAT_SECS * count for count in range(8)]


@pytest.mark.parametrize("start", [0.1, 1.0, 2.5, 3.9])
def test_a_dead_process_is_known_in_time_and_a_late_one_is_not_lost(monkeypatch, start):
    clock = Clock(monkeypatch)
    clock.read(is_still=False)
    begin, known = clock.now, None
    for after in read_times(start):
        clock.now = begin + after
        if clock.read(is_still=after != start) is not None and known is None:
            known = after
    # After its last heartbeat, the next would have come 2 s later: it may be held up for 18 s.
    assert 18 + heartbeat._BEAT_SECS <= known < 28


def test_a_reader_that_was_held_up_counts_no_time_in_which_it_read_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    clock.read(is_still=False)
    for _ in range(2):  # both were stopped together, as where a host is paused
        clock.now += 60
        assert clock.read(is_still=True) is None
    clock.now += 4
    assert clock.read(is_still=False) is None
    for _ in range(4):
        clock.now += 4
        assert clock.read(is_still=True) is None
    clock.now += 4
    assert clock.read(is_still=True) == "process 1 has sent no heartbeat for 20 s: it was stopped or cannot be reached"


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
