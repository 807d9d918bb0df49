"""Several processes restore alike or fail alike, whatever one of them was given or lacks."""

import json
import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import jax, numpy as np
process, port, root, count = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=120)
import orbax.checkpoint as ocp
import orbax_t5x as ot
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


with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
    manager.save(0, args=ot.args.TrainStateSave(state))
    manager.wait_until_finished()
    attempt(0, target, swap)
    attempt(0, target, swap if process else (), is_resuming=False)
    attempt(0, {**target, "lacking": target["x"]} if process else target)
    restored = attempt(0, target, swap, is_resuming=True)
    manager.save(1, args=ot.args.TrainStateSave(restored))
    manager.wait_until_finished()
    attempt(1, target, swap)
print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_processes_restore_alike_or_fail_alike(tmp_path, count):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(index), port, str(tmp_path / "root"), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]
    try:
        done = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, done, strict=True):
        assert process.returncode == 0, error[-3000:]
    told = [json.loads(output.splitlines()[-1]) for output, _ in done]
    # Nothing is known: all ask. Other rules on one process: all fail. One lacks a leaf: the others fail with it. The
    # answer, and what it leaves in the next step, are the same for all.
    refused, differing = "RestorePlanError", "RestorePlanError"
    for index, mine in enumerate(told):
        assert mine == [refused, differing, "RestorePlanError" if index else "CheckpointIOError", 1.0, 1.0]
