"""Several processes start from the same step, or fail together."""

import json

import pytest

from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import orbax.checkpoint as ocp
import orbax_t5x as ot
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax_t5x.restoring import api

(root,) = sys.argv[1:]
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
target = {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=rows) for name in ("x", "y")}
swap = ot.transforms.Rename([("x", "y"), ("y", "x")])
told = []


def init():
    return {"x": jax.numpy.full(8, 1.0), "y": jax.numpy.full(8, 2.0)}


def start(manager, target=target, **keywords):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            state, step, how = ot.restore_or_initialize(manager, target, **keywords)
            value = float(state["x"].addressable_shards[0].data[0])
            told.append([value, step, how, [str(one.message)[:15] for one in warned if "skipped" in str(one.message)]])
            return state
        except ot.errors.CheckpointError as error:
            told.append(type(error).__name__)


def failing(error, where):
    real = api.open_sources

    def open_sources(source, *arguments):
        if where in str(source):
            raise error
        return real(source, *arguments)

    api.open_sources = open_sources
    return lambda: setattr(api, "open_sources", real)


def manager(name):
    return ocp.CheckpointManager(f"{root}/{name}", item_handlers=ot.TrainStateHandler())


with manager("first") as first:
    state = start(first, init_fn=init)
    for step in (1, 2, 3):
        first.save(step, args=ot.args.TrainStateSave(jax.tree.map(lambda leaf: leaf + step, state)))
    first.wait_until_finished()
    start(first)
    # One process alone cannot read the newest step.
    undo = failing(ot.errors.CorruptCheckpointError("damaged"), "/3/default") if process else lambda: None
    start(first)
    undo()
    # The processes list different steps: those of the primary count.
    steps = first.all_steps()
    first.all_steps = lambda: steps[: 3 - process]
    start(first)
    del first.all_steps
    # What does not fit the target of one process is nobody's damage.
    start(first, {**target, "more": target["x"]} if process else target)
with manager("second") as second:
    undo = failing(ot.errors.CorruptCheckpointError("damaged"), "/first") if process else lambda: None
    start(second, init_from=f"{root}/first", transforms=swap)
    undo()
    state = start(second, init_from=f"{root}/first", transforms=swap)
    second.save(1, args=ot.args.TrainStateSave(state))
    second.wait_until_finished()
    start(second, init_from=f"{root}/first", transforms=swap)
with manager("third") as third:
    listed = ["auto", swap]
    state = start(third, init_from=f"{root}/first", transforms=listed)
    third.save(1, args=ot.args.TrainStateSave(state))
    third.wait_until_finished()
    start(third, init_from=f"{root}/first", transforms=listed)
    grown = {**target, "more": target["x"]}
    start(third, grown, init_from=f"{root}/first", transforms=listed)
    start(third, grown, transforms=listed, init_fn=lambda: {**init(), "more": init()["x"]}, fallback_for=["more"])
tell(told)
"""


def test_two_processes_start_alike(tmp_path):
    told = run_script(SCRIPT, 2, tmp_path)
    for (mine,) in told:
        assert mine == [
            [1.0, 0, "scratch", []],
            [4.0, 3, "resumed", []],
            [3.0, 2, "resumed", ["step 3 is skipp"]],
            [4.0, 3, "resumed", []],
            "RestorePlanError",
            "CorruptCheckpointError",
            [5.0, 0, "initialized", []],
            [5.0, 1, "resumed", []],
            [5.0, 0, "initialized", []],
            [5.0, 1, "resumed", []],
            "RestorePlanError",
            [5.0, 1, "resumed", []],
        ]
    item = tmp_path / "second" / "1" / "default"
    record = json.loads((item / "_METADATA").read_text())["custom_metadata"]["orbax_t5x"]["provenance"]
    assert [entry["text"] for entry in record] == ["Rename((('x', 'y'), ('y', 'x')))"]
