"""Calls of several processes together: managers, verification, checksums."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.conftest import GOLDENS
from tests.processes.jobs import SCRIPT, random_array
from tests.support.bundle_writer import bundle_of
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

MANAGERS = """
root, stock_root, bundle = sys.argv[1:]
rng = np.random.default_rng(0)
whole = {"w": rng.standard_normal((16, 24)).astype(np.float32), "b": rng.standard_normal(24).astype(np.float32)}
placed = {"w": NamedSharding(line, P("x")), "b": NamedSharding(line, P())}
state = {
    name: jax.make_array_from_callback(array.shape, placed[name], lambda index, array=array: array[index])
    for name, array in whole.items()
}
turned = {"w": NamedSharding(line, P(None, "x")), "b": NamedSharding(line, P("x"))}
target = {
    name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=turned[name]) for name, array in whole.items()
}

def same(restored):
    return all(bits(shard.data) == bits(whole[name][shard.index])
               for name, array in restored.items() for shard in array.addressable_shards)

with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
    for step in (0, 1):
        manager.save(step, args=ot.args.TrainStateSave(state))
    manager.wait_until_finished()
    for broadcast in (True, False):
        restored = manager.restore(1, args=ot.args.TrainStateRestore(target, broadcast=broadcast))
        tell(same(restored))
# Each reads what the other has written.
restore_args = ocp.checkpoint_utils.construct_restore_args(target)
with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as stock:
    tell(same(stock.restore(0, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args))))
with ocp.CheckpointManager(stock_root, item_handlers=ocp.PyTreeCheckpointHandler()) as stock:
    stock.save(0, args=ocp.args.PyTreeSave(state))
    stock.wait_until_finished()
tell(same(ot.restore(stock_root, target, broadcast=True)))
# A bundle into a sharded train state, and back through a manager.
with ot.open_checkpoint(bundle) as checkpoint:
    translated = ot.transforms.Translate()(checkpoint.tree(), {})
sharded = lambda leaf: NamedSharding(line, P("x") if leaf.shape and leaf.shape[0] % devices.size == 0 else P())
abstract = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.int32 if leaf.dtype == np.int64 else leaf.dtype,
                                      sharding=sharded(leaf)),
    translated, is_leaf=lambda leaf: hasattr(leaf, "shape"))
first, second = [ot.restore(bundle, abstract, [ot.transforms.Translate()], broadcast=flag) for flag in (True, False)]
same_bits = lambda a, b: bits(a.addressable_data(0)) == bits(b.addressable_data(0))
tell(jax.tree.all(jax.tree.map(same_bits, first, second)))
state, step, how = ot.restore_or_initialize(ocp.CheckpointManager(root), target)
tell([same(state), step, how])
# A file system that shows the newest step late to one process.
import shutil
from jax.experimental import multihost_utils
if process == 0:
    shutil.copytree(f"{root}/0", f"{root}-late/0")
multihost_utils.sync_global_devices("copied")
tell(error_of(lambda: ot.restore(root if process else f"{root}-late", target))[0])
tell(same(ot.restore(f"{root}/0" if process else f"{root}-late/0", target)))
"""


@pytest.mark.parametrize("count", [2, 4])
def test_managers_restore_beside_stock_orbax(tmp_path, count):
    bundle = GOLDENS / "tf_bundle" / "t5_1_1_f32"
    told = run_script(SCRIPT + MANAGERS, count, tmp_path / "root", tmp_path / "stock", bundle, devices=1)
    assert told == [[True] * 5 + [[True, 1, "resumed"], "RestorePlanError", True]] * count
    report = ot.verify(tmp_path / "root")
    assert {leaf.status for leaf in report.leaves} == {"ok"}, "the sums of all processes are in one file"


CHECKSUMS = """
whole, damaged = sys.argv[1:]
rows = {f"m{number}": jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(line, P("x")))
        for number in range(4)}
for verify in ("touched", "full", "off"):
    restored, report = read(whole, rows, verify=verify)
    require_equal(whole, restored)
    tell([report.bytes_read, list(report.verified), list(report.unverified)])
replicated = {name: jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(line, P())) for name in rows}
for broadcast in (False, True):
    tell(list(read(whole, replicated, broadcast=broadcast)[1].verified))
for verify in ("touched", "full"):
    tell(error_of(lambda: read(damaged, rows, verify=verify)))
tell(error_of(lambda: read(damaged, replicated)))
tell({leaf.name: leaf.status for leaf in ot.verify(damaged).leaves})
report = ot.diff(whole, damaged)
tell([[leaf.name, leaf.status] for leaf in report.leaves])
"""


def test_checksums_are_compared_by_each_and_read_for_by_all(tmp_path):
    rng = np.random.default_rng(4)
    arrays = {f"m{number}": random_array(rng, "float32", (64, 32)) for number in range(4)}
    (tmp_path / "whole").mkdir()
    (tmp_path / "damaged").mkdir()
    whole = bundle_of(arrays).write(tmp_path / "whole", "model.ckpt-1")
    damaged = bundle_of(arrays).write(tmp_path / "damaged", "model.ckpt-1")
    (file,) = (tmp_path / "damaged").glob("*.data-*")
    data = bytearray(file.read_bytes())
    data[len(data) - 64 * 16 * 4] ^= 1  # in the second half of the last matrix
    file.write_bytes(data)
    told = run_script(SCRIPT + CHECKSUMS, 2, whole, damaged)
    names, half = sorted(arrays), 4 * 64 * 32 * 4 // 2
    assert [mine[0] for mine in told] == [[half, [], names]] * 2
    assert [mine[1][1:] for mine in told] == [[names, []]] * 2
    # Half of each matrix is read again, by one of them.
    assert sum(mine[1][0] for mine in told) == 3 * half and all(mine[1][0] < 2 * half for mine in told)
    assert [mine[2] for mine in told] == [[half, [], []]] * 2
    assert [mine[3:5] for mine in told] == [[names, []]] * 2
    for mine in told:
        assert mine[5] is None and mine[6][0] == mine[7][0] == "CorruptCheckpointError"
        assert "'m3'" in mine[6][1] and "'m3'" in mine[7][1]
        assert mine[8] == {**dict.fromkeys(names, "ok"), "m3": "damaged"}
    assert told[0][9] == told[1][9]
