"""Two processes save and restore one step together; a missing peer kills a process, so they are real ones."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
    import orbax.checkpoint as ocp
    import orbax_t5x as ot
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    root, source = sys.argv[1:]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.make_array_from_callback(w.shape, rows, lambda index: w[index])
    written = []
    with ot.open_checkpoint(source) as opened:
        state = {"params": {"w": array}, "lazy": opened.leaves["a"], "small": opened.leaves["b"]}
        with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
            progress = lambda *told: written.append(told)
            args = ot.args.TrainStateSave(state, memory_limit_bytes=1 << 16, progress=progress)
            manager.save(0, args=args)
            manager.wait_until_finished()
            try:
                manager.save(1, args=ot.args.TrainStateSave({"bad": np.zeros(0), "w": array}))
            except ot.errors.UnsupportedCheckpointError:
                tell("refused")
            target = {
                "params": {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=rows)},
                "lazy": jax.ShapeDtypeStruct((512, 16384), np.uint8, sharding=columns),
                "small": np.zeros((3,), np.uint8),
            }
            restored = manager.restore(0, args=ot.args.TrainStateRestore(target))
            for leaf, whole in ((restored["params"]["w"], w), (restored["lazy"], opened.leaves["a"].get())):
                for shard in leaf.addressable_shards:
                    np.testing.assert_array_equal(shard.data, whole[shard.index])
            target["lazy"] = jax.ShapeDtypeStruct((512, 16384), np.uint8, sharding=rows)
            plan = ot.plan_restore(root, target)
            plan.execute()
    tell([len(written), manager.all_steps(), plan.report.verified])
"""


def test_two_processes_save_and_restore_together(tmp_path):
    a = np.random.default_rng(0).integers(0, 255, (512, 16384), np.uint8)  # eight chunks of the least size
    b = np.arange(3, dtype=np.uint8)
    header = (
        b'{"a":{"dtype":"U8","shape":[512,16384],"data_offsets":[0,8388608]},'
        b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8388608,8388611]}}'
    )
    source = tmp_path / "source.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + a.tobytes() + b.tobytes())
    told = run_script(SCRIPT, 2, tmp_path / "root", source)
    # Both wrote pieces of the large leaf, and neither wrote all of them.
    assert [refused for refused, _ in told] == ["refused", "refused"]
    pieces = [written for _, (written, _, _) in told]
    assert min(pieces) >= 3 and sum(pieces) == 8 + 1
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["0"]
    # One file of checksums holds the boxes of both; each compares what it reads as a whole.
    assert [verified for _, (_, _, verified) in told] == [["small"]] * 2
    report = ot.verify(tmp_path / "root")
    assert {leaf.name: leaf.status for leaf in report.leaves} == dict.fromkeys(["lazy", "params/w", "small"], "ok")
    assert not list((tmp_path / "root").rglob("_CHECKSUMS.process_*"))

    item = tmp_path / "root" / "0" / "default"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(item).item_metadata.tree
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        stock = checkpointer.restore(item, restore_args=as_numpy)
    for restored in (stock, ot.restore(tmp_path / "root", None)):
        np.testing.assert_array_equal(restored["lazy"], a)
        np.testing.assert_array_equal(restored["small"], b)
        np.testing.assert_array_equal(restored["params"]["w"], np.arange(64).reshape(8, 8))
