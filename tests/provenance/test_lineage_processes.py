"""Several processes restore alike or fail alike, whatever one of them was given or lacks."""

import pytest

from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import orbax.checkpoint as ocp
import orbax_t5x as ot
from orbax_t5x.provenance.digests import digest_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
state = {
    name: jax.make_array_from_callback((8,), rows, lambda index, value=value: np.full(8, value, np.float32)[index])
    for name, value in (("x", 1), ("y", 2))
}
target = {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=rows) for name in state}
swap = ot.transforms.Rename([("x", "y"), ("y", "x")])
told = []


def attempt(step, *arguments, **keywords):
    try:
        restored = manager.restore(step, args=ot.args.TrainStateRestore(*arguments, **keywords))
        told.append(float(restored["x"].addressable_shards[0].data[0]))
        return restored
    except ot.errors.CheckpointError as error:
        told.append(type(error).__name__)


with ocp.CheckpointManager(sys.argv[1], item_handlers=ot.TrainStateHandler()) as manager:
    manager.save(0, args=ot.args.TrainStateSave(state, provenance=[{"unrecorded": True}]))
    manager.wait_until_finished()
    attempt(0, target, swap)
    attempt(0, target, swap if process else (), is_resuming=False)
    attempt(0, {**target, "lacking": target["x"]} if process else target)
    restored = attempt(0, target, swap, is_resuming=True)
    manager.save(1, args=ot.args.TrainStateSave(restored))
    manager.wait_until_finished()
    attempt(1, target, swap)
# No process holds all of it.
assert digest_of(ot.transforms.Merge(state)) is None
tell(told)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_processes_restore_alike_or_fail_alike(tmp_path, count):
    told = run_script(SCRIPT, count, tmp_path / "root")
    # Nothing is known: all ask. Other rules on one process: all fail. One lacks a leaf: the others fail with it. The
    # answer, and what it leaves in the next step, are the same for all.
    refused, differing = "RestorePlanError", "RestorePlanError"
    for (mine,) in told:
        assert mine == [refused, differing, "RestorePlanError", 1.0, 1.0]
