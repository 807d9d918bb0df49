"""Transcripts of openings: what was recorded is answered and raised again, from bytes that are checked."""

import json

import pytest

from orbax_t5x import errors
from orbax_t5x.errors import CheckpointError, CheckpointIOError, CheckpointNotFoundError
from orbax_t5x.files import transcript
from orbax_t5x.files.transcript import Transcript, Viewpoint, error_as_data, error_from_data

HERE = Viewpoint(3, 0)


def missing():
    raise CheckpointNotFoundError("no such file", path="/a", leaf="w")


def refused():
    raise CheckpointError("an error that stays on its process")


def unasked():
    raise AssertionError("the store was asked")


def test_answers_are_given_again_without_the_store():
    recorded = Transcript()
    assert recorded.answer(["value", "a"], lambda: 7) == 7
    assert recorded.answer(["bytes", "a"], lambda: b"\0x") == b"\0x"
    with pytest.raises(CheckpointNotFoundError):
        recorded.answer(["error"], missing)
    with pytest.raises(CheckpointError, match="stays on its process"):
        recorded.answer(["refused"], refused)
    received = Transcript.decode(recorded.encode(), HERE)
    recorded.close()
    assert recorded.answer(["value", "a"], lambda: 8) == 8, "after the opening the store is asked"
    assert received.answer(["value", "a"], unasked) == 7 and received.answer(["bytes", "a"], unasked) == b"\0x"
    with pytest.raises(CheckpointNotFoundError, match="/a: leaf 'w': no such file"):
        received.answer(["error"], unasked)
    assert received.answer(["other"], lambda: 9) == 9 and received.answer(["refused"], lambda: 10) == 10
    received.close()
    assert received.is_closed and received.find(("value", "a")) is None


def test_too_much_is_not_shared(monkeypatch):
    monkeypatch.setattr(transcript, "MOST_TRANSCRIPT_BYTES", 10)
    large = Transcript()
    large.answer(["a"], lambda: bytes(11))
    assert large.encode() is None


def test_damaged_bytes_are_an_error():
    whole = Transcript().encode()
    assert Transcript.decode(whole, HERE).is_received
    for damaged in (whole[:-1], b"", whole[:8] + b"{}", (9).to_bytes(8, "little") + b'[["a",1,9]]', whole[:8] + b"[1]"):
        with pytest.raises(CheckpointIOError, match="process 0 sent"):
            Transcript.decode(damaged, HERE)


def test_errors_come_back_as_they_were():
    fix = errors.Fix.any_of(errors.Fix.setting("pass {}", strict=False), errors.Fix("read the log"))
    for kind in (errors.CorruptCheckpointError, errors.CheckpointGoneError, errors.LimitExceededError):
        error = kind("bad", path="/a", leaf="w", fix=fix)
        again = error_from_data(json.loads(json.dumps(error_as_data(error))))
        assert type(again) is kind and str(again) == str(error) and (again.path, again.leaf) == ("/a", "w")
    refused = error_from_data(error_as_data(errors.CheckpointIOError("refused", errno=5)), " (on process 1)")
    assert refused.errno == 5 and refused.message == "refused (on process 1)"
    assert error_as_data(KeyError("x")) is None and error_as_data(errors.RestorePlanError([])) is None
