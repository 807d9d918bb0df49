"""Whatever a file holds, a public call raises only errors of this package, each foreseen where it is met.

The files are the saved inputs of all fuzz targets. In a run of the tests each goes through some of the calls;
`EVERY_CALL=1 pytest tests/robustness/test_public_calls.py` takes each through all.
"""

import itertools
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_t5x as ot
from tests.fuzz import corpus, targets
from tests.fuzz.targets import TARGETS, Contents

# The errors of a reader's parts, which no public call is given.
_PARTS = {"sstable", "snappy", "proto", "byte_runs"}


def opened(call):
    def run(path, format, scratch):
        with ot.open_checkpoint(path, format=format, limits=targets._LIMITS) as checkpoint:
            for view in checkpoint.leaves.values():
                try:
                    call(view)
                except ot.errors.CheckpointError as error:
                    foreseen(error)

    return run


def small(view):
    return view if view.nbytes < 1 << 20 else view.reshape(-1)[:10]


def restored(**keywords):
    return lambda path, format, scratch: ot.restore(
        ot.Source(path, format=format), None, limits=targets._LIMITS, **keywords
    )


def converted(**keywords):
    return lambda path, format, scratch: ot.convert(
        ot.Source(path, format=format), scratch / "converted", limits=targets._LIMITS, overwrite=True, **keywords
    )


def by_handler(path, format, scratch):
    target = {"target": {"w": np.zeros(8, np.float32)}}
    args = ot.args.TrainStateRestore(
        target, source=ot.Source(path, format=format), strict=False, limits=targets._LIMITS
    )
    ot.TrainStateHandler().restore(epath.Path(scratch), args)


def as_own_step(path, format, scratch):
    ot.TrainStateHandler().restore(epath.Path(path), ot.args.TrainStateRestore(None, limits=targets._LIMITS))


def started(path, format, scratch):
    with ocp.CheckpointManager(scratch / "root") as manager:
        ot.restore_or_initialize(manager, None, init_from=ot.Source(path, format=format), limits=targets._LIMITS)


def with_auto(path, format, scratch):
    target = {"params": {"w": np.zeros((2, 4), np.float32)}}
    ot.plan_restore(ot.Source(path, format=format), target, "auto", limits=targets._LIMITS)


CALLS = [
    opened(lambda view: small(view).get()),
    opened(lambda view: np.asarray(small(view[..., None]))),
    opened(lambda view: small(view[:1].T).get() if view.shape else view.reshape(1).get()),
    opened(lambda view: None if 0 in view.shape else view.reshape(-1)[0].get()),
    restored(),
    restored(verify="full", memory_limit_bytes=100),
    lambda path, format, scratch: ot.restore(path, {"w": np.zeros(3)}, fallback={"w": np.ones(3)}),
    lambda path, format, scratch: ot.plan_restore(ot.Source(path, format=format), None).execute(verify="off"),
    with_auto,
    converted(),
    converted(format="safetensors", on_unsupported="skip"),
    lambda path, format, scratch: ot.verify(path, limits=targets._LIMITS),
    lambda path, format, scratch: ot.diff(path, ot.Source(path, format=format), limits=targets._LIMITS),
    lambda path, format, scratch: ot.latest_step(path, validated=True),
    lambda path, format, scratch: ot.latest_step(path.parent),
    by_handler,
    as_own_step,
    started,
    lambda path, format, scratch: ot.v1.load_and_transform(ot.Source(path, format=format), None),
]


def foreseen(error):
    """Asserts that an error was made where it was met: the guard of the public calls is for what nobody thought of."""
    assert "not foreseen" not in str(error), repr(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in _PARTS])
@pytest.mark.filterwarnings("ignore")
def test_only_our_errors_leave(tmp_path, monkeypatch, name):
    every = bool(os.environ.get("EVERY_CALL"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    turns = itertools.cycle(CALLS)
    inspected = targets.contents

    def contents(path, format=None) -> Contents:
        for call in CALLS if every else [next(turns), next(turns)]:
            try:
                call(path, format, scratch)
            except ot.errors.CheckpointError as error:
                foreseen(error)
        return inspected(path, format)

    monkeypatch.setattr(targets, "contents", contents)
    made = tmp_path / "made"
    made.mkdir()
    check = TARGETS[name].make(made)
    for data in corpus.inputs(name):
        check(data)
        shutil.rmtree(scratch)
        scratch.mkdir()
