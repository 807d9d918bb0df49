"""The time that a store may be silent, and how quick its responses are."""

from orbax_t5x.files.remote import responses
from orbax_t5x.files.remote.responses import ResponseClock


def test_a_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(responses.time, "monotonic", lambda: now[0])
    clock = ResponseClock(5)
    assert clock.seconds_left(98) == 3 and not clock.is_near
    clock.note(99.0)
    assert clock.seconds_left(90) == 5 and not clock.is_near
    now[0] = 101
    clock.note()
    assert clock.seconds_left(90) == 5 and not clock.is_near
    # One quick response shows it, whatever others had to wait for.
    clock.note(100.999)
    clock.note(90)
    assert clock.is_near
