"""Planning reads the run's older steps only where the answer is used, in few reads at the same time."""

import importlib
import os
import shutil
import sys
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.provenance.records import UNRECORDED
from orbax_t5x.restoring import run_steps
from tests.support.google_store import GoogleStore

SWAP = ot.transforms.Rename([("x", "y"), ("y", "x")])
STATE = {name: np.full(2, value, np.float32) for name, value in (("x", 1), ("y", 2))}
# Of an older step only these are looked at.
METADATA = ("_CHECKPOINT_METADATA", "commit_success.txt", "default/_METADATA")


class Events:
    """Counter of what Python opens and lists, by Python's own audit events."""

    def __init__(self):
        self.names = None
        self._lock = threading.Lock()
        sys.addaudithook(self)  # for the life of the process: hooks cannot be taken out

    def __call__(self, event, arguments):
        names = self.names
        if names is not None and event in ("open", "os.scandir", "os.listdir"):
            with self._lock:
                names.append(event)

    def of(self, call):
        """Returns how many opens and lists a call makes."""
        self.names = names = []
        try:
            call()
        finally:
            self.names = None
        return len(names) - names.count("os.scandir") - names.count("os.listdir"), len(names) - names.count("open")


@pytest.fixture(scope="module")
def events():
    # What decides and explains is loaded when a restore first needs it; that is no read of a checkpoint.
    for module in ("restoring.diagnose.explain", "restoring.run_steps", "text.problem_lines"):
        importlib.import_module(f"orbax_t5x.{module}")
    return Events()


def make_run(root, steps, *, recorded=()):
    """A run whose newest step is whole; of the older ones only the metadata exist. `recorded`: steps with a record."""
    with ocp.CheckpointManager(root / "stock") as manager:
        manager.save(0, args=ocp.args.StandardSave(STATE))
    with ocp.CheckpointManager(root / "ours", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(STATE, provenance=()))
    run = root / "run"
    for step in range(steps):
        source = root / ("ours" if step in recorded else "stock") / "0"
        if step == steps - 1:
            shutil.copytree(source, run / str(step))
            continue
        (run / str(step) / "default").mkdir(parents=True)
        for name in METADATA:
            shutil.copyfile(source / name, run / str(step) / name)
    return run


def planned(run, step, transforms=()):
    """Opens a step and returns a function that plans its restore."""
    checkpoint = ot.open_checkpoint(run / str(step) / "default")

    def plan():
        try:
            return ot.plan_restore(checkpoint, STATE, transforms)
        except ot.RestorePlanError as error:
            (problem,) = error.problems
            assert problem.kind == "provenance"
            return None

    return plan


@pytest.mark.slow
def test_without_transforms_nothing_is_read(tmp_path, events):
    run = make_run(tmp_path, 100, recorded=[3])
    assert events.of(planned(run, 99)) == (0, 0)


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_step_with_a_record_reads_no_other(tmp_path, events, steps):
    run = make_run(tmp_path, steps, recorded=range(steps))
    assert events.of(planned(run, steps - 1, SWAP)) == (0, 0)


@pytest.mark.parametrize("steps", [100, 400])
def test_the_newest_record_ends_the_search(tmp_path, events, steps):
    run = make_run(tmp_path, steps, recorded=range(steps - 1))
    plan = planned(run, steps - 1, SWAP)
    opens, lists = events.of(plan)
    print(f"{steps} steps, all older ones with a record: {opens} opens")
    assert plan() is None  # unrecorded: it asks
    assert (opens, lists) == (16, 1)


@pytest.mark.parametrize("steps", [100, 400])
def test_without_any_record_each_step_is_read_once(tmp_path, events, steps):
    run = make_run(tmp_path, steps)
    plan = planned(run, steps - 1, SWAP)
    opens, lists = events.of(plan)
    print(f"{steps} steps, none with a record: {opens} opens")
    assert plan() is not None
    assert (opens, lists) == (steps - 1, 2)  # the root, and the item itself


def test_the_provenance_of_a_plan_without_transforms_counts_older_steps(tmp_path, events):
    run = make_run(tmp_path, 20, recorded=[3])
    plan = planned(run, 19)()
    assert plan.provenance == (UNRECORDED,)
    assert events.of(lambda: plan.provenance) == (0, 0)
    alone = make_run(tmp_path / "alone", 20)
    assert planned(alone, 19)().provenance == ()


def test_a_damaged_record_counts_as_one(tmp_path):
    run = make_run(tmp_path, 3, recorded=[1])
    assert run_steps.lacks_record(run / "2" / "default")
    (run / "1" / "default" / "_METADATA").write_text('{"custom_metadata": ')
    assert run_steps.lacks_record(run / "2" / "default")
    (run / "1" / "default" / "_METADATA").unlink()
    assert not run_steps.lacks_record(run / "2" / "default")


@pytest.fixture
def google(monkeypatch):
    server = GoogleStore()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def uploaded(google, run):
    for path in run.rglob("*"):
        if path.is_file():
            google.files[f"run/{os.path.relpath(path, run)}"] = path.read_bytes()
    newest = max(int(path.name) for path in run.iterdir())
    return ot.open_checkpoint(f"gs://bucket/run/{newest}/default")


def test_requests_to_a_bucket(tmp_path, google):
    run = make_run(tmp_path, 40, recorded=range(39))
    checkpoint = uploaded(google, run)
    google.forget()
    batch = threading.Barrier(16)

    def wait_for_batch(request):
        if request.range is not None:
            batch.wait(60)  # ends once as many requests are under way at the same time

    google.fault = wait_for_batch
    ot.plan_restore(checkpoint, STATE)
    assert not google.log
    with pytest.raises(ot.RestorePlanError, match="nothing records"):
        ot.plan_restore(checkpoint, STATE, SWAP)
    read = {request.name for request in google.log}
    print(f"{len(google.log)} requests of {len(read)} objects", sorted(request.name for request in google.log))
    steps = {name.split("/run/")[1].split("/")[0] for name in read if "/run/" in name}
    assert steps == set(map(str, range(23, 39)))
    assert len(google.log) <= 2 + 16  # lists; and each file, of which its first request brings the end


@pytest.mark.parametrize("steps", [3, 30])
def test_requests_to_a_bucket_with_a_record(tmp_path, google, steps):
    run = make_run(tmp_path, steps, recorded=range(steps))
    checkpoint = uploaded(google, run)
    google.forget()
    ot.plan_restore(checkpoint, STATE, SWAP)
    assert not google.log
