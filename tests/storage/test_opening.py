"""An opening shares its connections, closes them when it fails, and knows the recorder of its processes."""

import pytest

from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.opening import answered, current_opening, current_recorder, opening, recording
from orbax_t5x.storage.transcript import Transcript


class Connection:
    def __init__(self):
        self.calls = []

    def close_idle(self):
        self.calls.append("close_idle")

    def forget(self):
        self.calls.append("forget")


def test_an_opening_inside_another_is_the_same():
    with opening(Limits(io_timeout_secs=3)) as outer:
        assert outer.timeout == 3 and current_opening() is outer
        with opening(Limits(io_timeout_secs=4)) as inner:
            assert inner is outer
        outer.connections["x"] = connection = Connection()
    assert connection.calls == ["forget"] and current_opening() is not outer


def test_a_failed_opening_closes_its_connections():
    connection = Connection()
    with pytest.raises(KeyError), opening() as made:
        made.connections["x"] = connection
        raise KeyError
    assert connection.calls == ["close_idle", "forget"]


def test_a_question_without_files_is_asked_once_for_all():
    class Recorder:
        transcript = Transcript()

    assert answered(["commit"], lambda: "alone") == "alone"
    with recording(Recorder()):
        assert answered(["commit"], lambda: "first") == "first" and current_recorder().transcript.encode()
    assert current_recorder() is None
