"""Two processes save and load through Orbax v1 together; a missing peer kills a process, so they are real ones."""

import json

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
    import orbax.checkpoint.experimental.v1 as ocp
    import orbax_t5x as ot
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    (root,) = sys.argv[1:]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
    w = np.random.default_rng(0).integers(0, 255, (256, 4096), np.uint8)
    state = {
        "w": jax.make_array_from_callback(w.shape, rows, lambda index: w[index]),
        "replicated": jax.make_array_from_callback((8,), NamedSharding(mesh, P()), lambda index: np.arange(8)[index]),
        "host": np.arange(5),
        "step": 3,
    }
    target = {
        "renamed": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=columns),
        "replicated": jax.ShapeDtypeStruct((8,), np.int32, sharding=rows),
        "host": np.zeros(5, np.int64),
        "step": 0,
    }
    rules = [ot.transforms.Rename([("w", "renamed")])]

    def check(loaded):
        for shard in loaded["renamed"].addressable_shards:
            np.testing.assert_array_equal(shard.data, w[shard.index])
        for shard in loaded["replicated"].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.arange(8)[shard.index])
        np.testing.assert_array_equal(loaded["host"], np.arange(5))
        assert loaded["step"] == 3

    with ot.v1.context(provenance=()):
        ocp.save(root + "/0", state)
        with ocp.training.Checkpointer(root) as checkpointer:
            checkpointer.save_async(1, state, force=True).result()
            check(checkpointer.load(1, ot.v1.AbstractTrainState(target, rules)))
        abstract = ot.v1.AbstractTrainState(target, rules)
        check(ocp.load(root + "/0", abstract))
        check(ocp.load_checkpointables(root + "/0", {"state": abstract})["state"])
        check(ot.v1.load_and_transform(root + "/0", target, rules))
        check(ocp.load(root + "/0", ot.v1.AbstractTrainState(target, rules, broadcast=True)))
        check(ocp.load(root + "/0", ot.v1.AbstractTrainState(target, rules, source=root + "/1")))
        told = []
        # Of one process alone: all are told, and none waits for it.
        try:
            ocp.load(root + "/0", ot.v1.AbstractTrainState({"missing": np.zeros(2)} if process else target, rules))
        except ot.errors.CheckpointError as error:
            told.append(type(error).__name__)
        try:
            ocp.save(root + "/2", {"w": state["w"], "empty": np.zeros((0, 3))})
        except ot.errors.UnsupportedCheckpointError:
            told.append("refused")
    plan = ot.plan_restore(root + "/0", {**target, "w": target["renamed"], "renamed": ...}, strict=False)
    plan.execute()
    tell([told, plan.report.bytes_read, plan.report.verified])
"""


def test_two_processes_save_load_and_reshard(tmp_path):
    told = [lines[-1] for lines in run_script(SCRIPT, 2, tmp_path / "root")]
    assert [errors for errors, _, _ in told] == [["RestorePlanError", "refused"]] * 2
    assert [verified for _, _, verified in told] == [["host", "step"]] * 2
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["0", "1"]
    w = np.random.default_rng(0).integers(0, 255, (256, 4096), np.uint8)
    for step in ("0", "1"):
        path = tmp_path / "root" / step
        report = ot.verify(path)
        assert {leaf.name: leaf.status for leaf in report.leaves} == dict.fromkeys(
            ["host", "replicated", "step", "w"], "ok"
        )
        assert not list(path.rglob("_CHECKSUMS.process_*"))
        metadata = json.loads((path / "state" / "_METADATA").read_text())
        assert metadata["custom_metadata"]["orbax_t5x"]["provenance"] == []
        # One process, another mesh, stock Orbax.
        stock = ocp.load(path, {"w": np.zeros(w.shape, w.dtype), "replicated": ..., "host": ..., "step": ...})
        np.testing.assert_array_equal(stock["w"], w)
