"""Leaves on meshes that hold no device of some process, as the stages of a pipeline have them."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from orbax_t5x.trees.flat import unflatten
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

_ROWS, _NEW_ROWS = 8, 4
_STAGES = ("first", "second", "both")
# Each stage has leaves that are sharded, replicated, cast, a key, computed in part and as a whole.
_SCRIPT = """
import orbax_t5x as ot
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax_t5x.trees.flat import flatten, unflatten

expected, sources = dict(np.load(sys.argv[1])), sys.argv[2:]
devices = np.asarray(jax.devices())
stages = {"first": Mesh(devices[:2], ("x",)), "second": Mesh(devices[2:], ("x",)), "both": Mesh(devices, ("x",))}
target, transforms = {}, []
for stage, mesh in stages.items():
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    for name, placing in (("rows", rows), ("whole", whole), ("cast", rows), ("grown", rows), ("new", whole)):
        array = expected[f"{stage}.{name}"]
        target[f"{stage}/{name}"] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placing)
    target[f"{stage}/key"] = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
    grown = (expected[f"{stage}.grown"].shape[0], None)
    transforms += [
        ot.transforms.Cast(f"{stage}/cast", np.float32),
        ot.transforms.Pad(f"{stage}/grown", grown, ot.transforms.FALLBACK),
    ]

def initialize():
    names = [f"{stage}/{name}" for stage in stages for name in ("grown", "new")]
    return unflatten({name: jax.numpy.asarray(expected[name.replace("/", ".")]) for name in names})

for source in sources:
    for broadcast in (False, True):
        plan = ot.plan_restore(source, unflatten(target), transforms, fallback=initialize)
        assert str(plan)
        restored = flatten(plan.execute(broadcast=broadcast))
        assert restored.keys() == target.keys()
        shards = {}
        for name, array in restored.items():
            assert array.sharding == target[name].sharding, name
            assert (array.shape, array.dtype) == (target[name].shape, target[name].dtype), name
            shards[name] = len(array.addressable_shards)
            array = jax.random.key_data(array) if name.endswith("key") else array
            whole = expected[name.replace("/", ".")]
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), name
        tell([broadcast, shards, plan.report.bytes_read, plan.bytes_to_read])
"""


def arrays():
    """Returns stored arrays, and the arrays expected of a restore."""
    generator = np.random.default_rng(0)
    stored, expected = {}, {}
    for stage in _STAGES:
        for name in ("rows", "whole", "cast", "grown"):
            array = generator.standard_normal((_ROWS, 6), np.float32)
            stored[f"{stage}/{name}"] = array.astype(np.float16) if name == "cast" else array
            expected[f"{stage}.{name}"] = stored[f"{stage}/{name}"].astype(np.float32)
        stored[f"{stage}/key"] = expected[f"{stage}.key"] = np.asarray(jax.random.key_data(jax.random.key(3)))
        new_rows = np.full((_NEW_ROWS, 6), 2.5, np.float32)
        expected[f"{stage}.grown"] = np.concatenate([expected[f"{stage}.grown"], new_rows])
        expected[f"{stage}.new"] = np.arange(8, dtype=np.float32)
    return stored, expected


def test_a_leaf_on_devices_of_other_processes_has_no_shards_here(tmp_path):
    stored, expected = arrays()
    np.savez(tmp_path / "expected.npz", **expected)
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", unflatten(stored))
    sources = tmp_path / "model.safetensors", tmp_path / "item"
    told = run_script(_SCRIPT, 2, tmp_path / "expected.npz", *sources)
    total = sum(array.nbytes for array in stored.values())
    for run in zip(*told, strict=True):
        is_broadcast = run[0][0]
        for process, (_, shards, read, planned) in enumerate(run):
            for name, count in shards.items():
                assert count == (2 if name.startswith((_STAGES[process], "both")) else 0), name
            assert is_broadcast or read == planned
        assert not is_broadcast or sum(read for _, _, read, _ in run) == total
