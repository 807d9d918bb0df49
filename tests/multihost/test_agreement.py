"""Agreement on one call: what is exchanged, and what each process raises. Here the exchange is played; jobs of several
processes are in `test_restore_processes.py`."""

import json

import pytest

from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, RestorePlanError
from orbax_t5x.multihost import agreement
from orbax_t5x.multihost.agreement import Agreement
from orbax_t5x.multihost.collectives import error_as_bytes
from orbax_t5x.multihost.groups import ProcessGroup

RECORDS = {"": ({"rules": ["a"]},), "x": None}


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(agreement, "_exchange", None)
    alone = Agreement(None, "/memory")
    with alone.planning():
        assert alone.records(RECORDS) is RECORDS and alone.of_all([1]) == [[1]] and alone.of_primary("x") == "x"
        alone.plan(["/a"], ())
    with pytest.raises(KeyError), alone.planning():
        raise KeyError("x")


class Job:
    """This process, number 0, beside another; `sent` is what this one sends."""

    def __init__(self, monkeypatch):
        self.sent = []
        self.replies = []
        monkeypatch.setattr(ProcessGroup, "of", lambda primary=None: ProcessGroup((0, 1), primary or 0, "", 0))
        monkeypatch.setattr(agreement, "_exchange", self._exchange)

    def _exchange(self, mine, failed, group, path):
        self.sent.append((mine, failed))
        theirs, their_failed = self.replies.pop(0)
        if isinstance(theirs, BaseException):
            raise theirs
        failures = [process for process, bad in enumerate((failed, their_failed)) if bad]
        return [mine, mine if theirs is None else theirs], failures


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def test_the_record_of_the_primary_process_counts(job):
    theirs = {"": [{"rules": ["b"]}], "x": None}
    job.replies = [(json.dumps(theirs).encode(), False)]
    assert Agreement(1, "/memory").records(RECORDS) == {"": ({"rules": ["b"]},), "x": None}
    assert job.sent == [(b"null", False)]
    job.replies = [(b"null", False)]
    assert Agreement(None, "/memory").records(RECORDS) == RECORDS


def test_processes_with_other_sources_raise_and_tell_nobody_again(job):
    job.replies = [(b"another digest", False)]
    together = Agreement(None, "/memory", "restore")
    with pytest.raises(RestorePlanError, match="given different steps"), together.planning():
        together.plan(["/a"], [{"rules": []}])
    assert len(job.sent) == 1
    job.replies = [(None, False)]
    Agreement(None, "/memory").plan(["/a"], [{"rules": []}])


def test_a_failure_is_sent_to_the_others_and_raised_here(job):
    job.replies = [(b"", False)]
    with pytest.raises(CorruptCheckpointError), Agreement(None, "/memory").planning():
        raise CorruptCheckpointError("bad", path="/a")
    ((payload, failed),) = job.sent
    assert failed and json.loads(payload)[:3] == ["CorruptCheckpointError", "bad", "/a"]


@pytest.mark.parametrize(("sends_errors", "kind"), [(True, CorruptCheckpointError), (False, CheckpointIOError)])
def test_a_failure_of_another_process_is_raised_once(job, sends_errors, kind):
    job.replies = [(error_as_bytes(CorruptCheckpointError("bad", path="/a")), True)]
    together = Agreement(None, "/memory", "conversion", sends_errors=sends_errors)
    with pytest.raises(kind, match="process 1"), together.planning():
        together.of_all(None)
    assert len(job.sent) == 1


def test_after_a_lost_process_nothing_more_is_sent(job):
    job.replies = [(CheckpointIOError("gone"), False)]
    together = Agreement(None, "/memory")
    with pytest.raises(CheckpointIOError, match="gone"), together.planning():
        together.of_all(None)
    assert len(job.sent) == 1
