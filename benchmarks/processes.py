"""Bytes read of a replicated leaf by several processes: `python -m benchmarks.processes [--mib N] [--processes N …]`.

Each process restores the leaf from byte ranges (safetensors) and from an Orbax item of as many chunks of rows as there
are processes, with `broadcast=True` and `False`. Printed are the bytes that all read together, of the leaf's size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_COLUMNS = 8192
_PORT = 51_977


def _work(process: int, count: int, folder: str) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_t5x as ot

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{_PORT + count}", count, process)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    for path in ("leaf.safetensors", f"rows_{count}"):
        with ot.open_checkpoint(f"{folder}/{path}") as checkpoint:
            shape = checkpoint.leaves["w"].shape
            whole = checkpoint.leaves["w"].get()
        replicated = NamedSharding(mesh, PartitionSpec())
        target = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated)}
        for broadcast in (True, False):
            plan = ot.plan_restore(f"{folder}/{path}", target)
            start = time.perf_counter()
            restored = plan.execute(broadcast=broadcast)
            seconds = time.perf_counter() - start
            same = np.array_equal(np.asarray(restored["w"].addressable_data(0)), whole)
            row = {"path": path, "broadcast": broadcast, "read": plan.report.bytes_read, "seconds": seconds}
            print(json.dumps({**row, "same": same}), flush=True)
            del restored


def main() -> None:
    """Writes the checkpoints, starts the processes, and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--worker", nargs=3)
    arguments = parser.parse_args()
    if arguments.worker:
        process, count, folder = arguments.worker
        _work(int(process), int(count), folder)
        return
    import jax
    import orbax.checkpoint as ocp
    import safetensors.numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_t5x as ot

    array = np.random.default_rng(0).standard_normal((arguments.mib * 32, _COLUMNS), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        safetensors.numpy.save_file({"w": array}, Path(folder) / "leaf.safetensors")
        for count in arguments.processes:
            rows = NamedSharding(Mesh(np.asarray(jax.devices())[:count], ("x",)), PartitionSpec("x"))
            with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
                state = {"w": jax.device_put(array, rows)}
                checkpointer.save(Path(folder) / f"rows_{count}", args=ot.args.TrainStateSave(state))
        print("| processes | checkpoint | `broadcast` | read, of the leaf's size | slowest |\n|---|---|---|---|---|")
        for count in arguments.processes:
            for row in _job(count, folder):
                ratio = sum(mine["read"] for mine in row) / array.nbytes
                assert all(mine["same"] for mine in row)
                name = row[0]["path"].partition("_")[0]
                slowest = max(mine["seconds"] for mine in row)
                print(f"| {count} | {name} | {row[0]['broadcast']} | {ratio:.3f} | {slowest:.2f} s |", flush=True)


def _job(count: int, folder: str) -> list[tuple[dict[str, object], ...]]:
    """Returns the rows of all processes."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers: list[subprocess.Popen[str]] = []
    for process in range(count):
        command = [sys.executable, "-m", "benchmarks.processes", "--worker", str(process), str(count), folder]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    rows = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    return list(zip(*rows, strict=True))


if __name__ == "__main__":
    main()
