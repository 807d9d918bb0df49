"""Members of a call that fail, disagree, come late, or die."""

import logging
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError, Fix, LeafMismatchError, Problem, RestorePlanError
from orbax_t5x.restoring import executor
from orbax_t5x.restoring.processes import ProcessGroup, error_as_data, error_from_data
from tests.processes.jobs import SCRIPT, random_array, write_safetensors
from tests.support.jax_job import run_script


@pytest.fixture
def path(tmp_path):
    return write_safetensors(
        tmp_path / "w.safetensors", {"w": random_array(np.random.default_rng(0), "float32", (64, 96))}
    )


class OwnError(LookupError):
    """An error of a class that this package does not know."""


ERRORS = [
    CheckpointGoneError("changed", path="/a", leaf="x/y", fix=Fix("wait")),
    CheckpointIOError("refused", path="/a", errno=13),
    LeafMismatchError("other shape"),
    RestorePlanError(
        [
            Problem(
                "shape", "w", "is 3, and 4 is wanted", Fix.any_of(Fix("cut it"), Fix.setting("pass {}", strict=False))
            ),
            Problem("target", None, "is wrong"),
        ],
        path="/a",
    ),
    ValueError("a value"),
    KeyError("name"),
    FileNotFoundError(2, "No such file", "/a"),
    ZeroDivisionError("division"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_travels_with_its_type_and_text(error):
    again = error_from_data(error_as_data(error), 3)
    assert type(again) is type(error) and str(again) == str(error)
    assert "process 3" in again.__notes__[0]
    for name in ("path", "leaf", "errno"):
        if isinstance(error, ot.errors.CheckpointError):
            assert getattr(again, name, None) == getattr(error, name, None)


def test_problems_travel_as_they_are():
    again = error_from_data(error_as_data(ERRORS[3]), 0)
    kinds = [(problem.kind, problem.leaf, problem.message) for problem in again.problems]
    assert kinds == [("shape", "w", "is 3, and 4 is wanted"), ("target", None, "is wrong")]


def test_errors_of_other_classes_become_their_base():
    assert type(error_from_data(error_as_data(OwnError("own")), 0)) is LookupError
    text = error_from_data(error_as_data(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")), 0)
    assert type(text) is UnicodeError and "bad" in str(text)
    interrupted = error_from_data(error_as_data(KeyboardInterrupt()), 0)
    assert type(interrupted) is RuntimeError and "interrupted" in str(interrupted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"primary_host": 1, "active_processes": {0, 1}}, "the last process is number 0"),
        ({"primary_host": 1, "active_processes": {1}}, "this process, 0, is not among them"),
        ({"primary_host": 3, "active_processes": {0}}, "primary_host, 3, is not among them"),
    ],
)
def test_groups_have_this_process_and_its_primary(options, words):
    with pytest.raises(ValueError, match=words):
        ProcessGroup.of(ocp.options.MultiprocessingOptions(**options))


def test_without_a_job_there_is_one_process():
    group = ProcessGroup.of(ocp.options.MultiprocessingOptions(primary_host=None))
    assert (group.size, group.rank, group.of_all(3), group.of_primary("x")) == (1, 0, [3], "x")
    with pytest.raises(TypeError, match="MultiprocessingOptions"):
        ProcessGroup.of(3)
    with pytest.raises(KeyError), group.sharing_errors():
        raise KeyError("mine")


def test_a_read_without_progress_names_leaf_and_file(path, monkeypatch, caplog):
    monkeypatch.setattr(executor, "STALL_SECS", 0.4)
    monkeypatch.setattr(executor, "STALL_AGAIN_SECS", 0.4)
    with ot.open_checkpoint(path) as checkpoint, caplog.at_level(logging.WARNING):
        leaf = type(checkpoint.leaves["w"].leaf)
        read = leaf.read_blocking

        def read_late(*arguments):
            time.sleep(1.6)
            read(*arguments)

        monkeypatch.setattr(leaf, "read_blocking", read_late)
        ot.restore(checkpoint, None)
    waits = [record.getMessage() for record in caplog.records if "to be read" in record.getMessage()]
    assert 2 <= len(waits) <= 4 and all("leaf 'w'" in text and str(path) in text for text in waits)


FAILURES = """
path, damaged = sys.argv[1:]
target = target_of(path)
second = process == 1

def raising(error):
    def transform(state, target):
        if second:
            raise error
        return state
    return transform

def attempts():
    gone = ot.errors.CheckpointGoneError("gone", path="/x", leaf="w")
    for error in (ValueError("a value"), KeyError("a name"), gone):
        yield lambda: ot.restore(path, target, [raising(error)])
    yield lambda: ot.restore(path, {"w": np.zeros(3)} if second else target)
    yield lambda: ot.restore(path + "-none" if second else path, target)
    yield lambda: ot.restore(path, target, verify="some" if second else "touched")
    # Reading: with and without leaves that are sent.
    for broadcast in (True, False):
        yield lambda: ot.restore(path, target, broadcast=broadcast, progress=fails)
        yield lambda: ot.restore(damaged if second else path, target, broadcast=broadcast)
    # What differs.
    yield lambda: ot.restore(path, target_of(path, P("x")) if second else target)
    yield lambda: ot.restore(path, target, [ot.transforms.Affine("w", 2.0, follow=False)] if second else [])
    yield lambda: ot.restore(path, target, broadcast=second)
    yield lambda: ot.plan_restore(path, target).execute(broadcast=second)
    from orbax_t5x.operations.verify import verify as module
    module._BLOCK_BYTES = 1 << 12
    yield lambda: ot.verify(path, progress=fails)

def fails(*update):
    if second:
        raise RuntimeError("no more")

for attempt in attempts():
    tell(error_of(attempt))
# A plan is made by each alone, and the next call is as good as ever.
if second:
    ot.plan_restore(path, target)
restored, report = read(path, target, broadcast=True)
require_equal(path, restored)
tell(report.bytes_read)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_what_one_raises_all_raise(path, tmp_path, count):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(path.read_bytes()[:-400])
    told = run_script(SCRIPT + FAILURES, count, path, damaged)
    kinds = [
        "RestorePlanError",
        "RestorePlanError",
        "CheckpointGoneError",
        "RestorePlanError",
        "CheckpointNotFoundError",
        "ValueError",
    ]
    kinds += ["RuntimeError", "CorruptCheckpointError"] * 2 + ["RestorePlanError"] * 4 + ["RuntimeError"]
    for mine in told:
        assert [error and error[0] for error in mine[:-1]] == kinds
        assert [text for _, text, _ in mine[:-1]] == [text for _, text, _ in told[1][:-1]]
        assert mine[-1] == 64 * 96 * 4 // count
    for mine in (told[0], *told[2:]):
        assert all("process 1" in note for _, _, notes in mine[:10] for note in notes)
        assert all(notes for _, _, notes in mine[:10])


LATE = """
import logging, os, time
processes.STALL_SECS, processes.STALL_AGAIN_SECS = 3.0, 2.0
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
lines = []
logging.getLogger("orbax_t5x").addHandler(Lines())
(path,) = sys.argv[1:]
if process == 1:
    time.sleep(8)
restored, report = read(path, target_of(path), broadcast=True)
require_equal(path, restored)
tell(lines)
"""


@pytest.mark.slow
def test_who_waits_names_those_that_have_not_arrived(path):
    # The second process has a backend, and comes late to the restore.
    first, second, third = run_script(SCRIPT + LATE, 3, path)
    assert second == [[]]
    for (lines,) in (first, third):
        assert 2 <= len(lines) <= 3 and all(line.endswith("for process 1 to arrive") for line in lines)


LATE_BACKEND = """
import logging, time
from orbax_t5x.restoring import processes
import orbax_t5x as ot
processes.STALL_SECS = 2.0
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
lines = []
logging.getLogger("orbax_t5x").addHandler(Lines())
if process == 1:
    time.sleep(6)
ot.restore(sys.argv[1], None)
tell(lines)
"""


@pytest.mark.slow
def test_who_waits_for_a_backend_names_those_that_have_not_arrived(path):
    first, second = run_script(LATE_BACKEND, 2, path)
    assert second == [[]] and [line.endswith("for process 1 to arrive") for line in first[0]] == [True]


DYING = """
import os, signal
path, where = sys.argv[1:]
target = target_of(path)

def die(*arguments):
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(state, target):
    die()
    return state

def call():
    if where == "planning":
        ot.restore(path, target, [dying])
    elif where == "reading":
        two = {**target, "host": np.zeros((64, 96), np.float32)}
        ot.restore(path, two, [ot.transforms.AssignmentMap([("host", "w")])], broadcast=True, progress=die)
    elif where == "verifying":
        from orbax_t5x.operations.verify import verify as module
        module._BLOCK_BYTES = 1 << 12
        ot.verify(path, progress=die)

ot.restore(path, target, broadcast=True)
error = error_of(call)
tell(error)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["planning", "reading", "verifying"])
def test_the_others_end_when_a_process_dies(path, where):
    """They wait for it, until JAX notices that it died and ends them."""
    start = time.monotonic()
    assert run_script(SCRIPT + DYING, 2, path, where, killed=[1], aborted=[0], heartbeat_secs=10)[0] == []
    assert time.monotonic() - start < 100
