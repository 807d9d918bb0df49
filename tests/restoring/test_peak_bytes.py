"""A plan bounds the memory that its execution takes beside the result: measured by the kernel, in a fresh process."""

import json
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint

pytestmark = pytest.mark.slow

MIB = 1 << 20
SHAPE = (48 * 256, 1024)
CHILD = """
import json, sys
import jax, ml_dtypes, numpy as np
import orbax_t5x as ot

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def plan_of(path, rows):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec(*spec))
    target = {"a": jax.ShapeDtypeStruct((rows, 1024), np.dtype(dtype), sharding=sharding)}
    return ot.plan_restore(path, target, allow_lossy_cast=True)

large, small, dtype, spec, rows = json.loads(sys.argv[1])
plan_of(small, 256).execute()
plan = plan_of(large, rows)
promised = plan.peak_bytes
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = memory("VmRSS")
array = plan.execute()["a"]
print(json.dumps([memory("VmHWM") - before - array.nbytes, promised]))
"""


def write(kind, path, array):
    path.mkdir()
    if kind == "safetensors":
        save_file({"a": array}, path / "model.safetensors")
    elif kind == "npz":
        np.savez_compressed(path / "model.npz", a=array)
        return path / "model.npz"
    else:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path / "item", {"a": array})
        return path / "item"
    return path


@pytest.mark.parametrize(
    ("kind", "dtype", "spec", "most"),
    [
        ("safetensors", "float32", ["x"], 16 * MIB),
        ("safetensors", "bfloat16", [None, "x"], 80 * MIB),
        ("npz", "float32", [None, "x"], 24 * MIB),
        ("orbax", "float32", ["x"], 128 * MIB),
    ],
)
def test_a_restore_stays_within_what_its_plan_says(tmp_path, kind, dtype, spec, most):
    array = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int32).reshape(SHAPE).astype(np.float32)
    paths = [str(write(kind, tmp_path / name, part)) for name, part in (("large", array), ("small", array[:256]))]
    found = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([*paths, dtype, spec, SHAPE[0]])],
        capture_output=True,
        check=True,
        text=True,
    )
    measured, promised = json.loads(found.stdout.splitlines()[-1])
    assert measured <= promised <= most


def test_what_is_placed_from_a_function_counts_whole():
    array = np.zeros((1 << 10, 1 << 10), np.float32)
    behind = ot.LazyThreadPoolArray(array.shape, array.dtype, lambda: array)
    plan = ot.plan_restore(checkpoint({}), {"a": array}, lambda state, target: {"a": behind})
    assert plan.peak_bytes >= array.nbytes > ot.plan_restore(checkpoint({"a": array[:1]}), None).peak_bytes - 64 * MIB
