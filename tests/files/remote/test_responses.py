"""The time that a store may be silent, and how quick its responses are."""

import pytest

from orbax_t5x import errors
from orbax_t5x.files.remote import responses
from orbax_t5x.files.remote.responses import BeyondEndError, RequestError, RequestKind, ResponseClock, remote_error


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


TYPES = {
    RequestKind.DENIED: (errors.CheckpointIOError, "credentials"),
    RequestKind.MISSING: (errors.CheckpointNotFoundError, "reading: 9 of 5"),
    RequestKind.BEYOND_END: (BeyondEndError, "ends before"),
    RequestKind.IGNORED_RANGE: (errors.UnsupportedCheckpointError, "206"),
    RequestKind.REDIRECT: (errors.CheckpointIOError, "redirects are not followed"),
}


@pytest.mark.parametrize("kind", RequestKind)
def test_a_request_fails_with_the_type_of_its_kind(kind):
    expected, said = TYPES.get(kind, (errors.CheckpointIOError, "9 of 5"))
    error = remote_error(RequestError("9 of 5", kind), "reading", path="https://x/y", leaf="w")
    assert type(error) is expected and said in str(error)
    assert (error.path, error.leaf) == ("https://x/y", "w")


def test_what_means_that_there_is_no_file_and_what_may_pass():
    assert {kind.name for kind in RequestKind if RequestError("", kind).is_no_file} == {"DENIED", "REDIRECT"}
    assert {kind.name for kind in RequestKind if RequestError("", kind).may_pass} == {"BROKEN", "SILENT", "PASSING"}


def test_the_text_decides_nothing():
    error = RequestError("NOT_FOUND: HTTP code 302 was ignored by server")
    assert error.kind is RequestKind.OTHER and not error.is_no_file and not error.may_pass
    assert type(remote_error(error, "reading", path="https://x/y")) is errors.CheckpointIOError
