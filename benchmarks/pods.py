"""`python -m benchmarks.pods [--processes N …] [--mib N] [--rounds N] [--folder DIR]`: restores by several processes.

One checkpoint (safetensors, 16 arrays of random float32) is restored by 1, 2 and 4 processes of two devices each, by
rows (each process has its own), and replicated, there with and without `broadcast=True`, in turn. Of each are told, as
medians over rounds: wall time of the slowest process, processor time of all, bytes read by all together beside those of
the checkpoint, the same for the process with most beside its own shards, and the peak of memory beside the result.
All processes share the cores, the page cache and the loopback of one machine: times say what a broadcast costs there,
and nothing of what it saves at a store.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import processor_seconds, reset_peak, resident_bytes

_MIB = 1 << 20
_ARRAYS = 16
_COLUMNS = 1024
_DEVICES_EACH = 2
_WAYS = {"rows": ("rows", False), "replicated": ("replicated", False), "replicated, broadcast": ("replicated", True)}


def work(index: int, count: int, coordinator: str, path: str, rounds: int) -> None:
    """One process: each way once without measuring it, then in turn; its figures as a line of JSON."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_t5x as ot

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if count > 1:
        jax.distributed.initialize(coordinator, count, index)
    mesh = Mesh(np.asarray(jax.devices()).reshape(count, -1), ("data", "model"))
    specs = {"rows": PartitionSpec(("data", "model")), "replicated": PartitionSpec(None, "model")}
    with ot.open_checkpoint(path) as opened:
        shapes = {name: leaf.shape for name, leaf in opened.leaves.items()}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in _WAYS}
    for number in range(rounds + 1):
        for name, (placing, broadcast) in _WAYS.items():
            sharding = NamedSharding(mesh, specs[placing])
            target = {key: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for key, shape in shapes.items()}
            plan = ot.plan_restore(path, target)
            if count > 1:
                multihost_utils.sync_global_devices("begin")
            reset_peak()
            before, started, processor = resident_bytes(), time.perf_counter(), processor_seconds()
            state = plan.execute(broadcast=broadcast)
            jax.block_until_ready(state)
            seconds, processor = time.perf_counter() - started, processor_seconds() - processor
            result = sum(shard.data.nbytes for array in state.values() for shard in array.addressable_shards)
            beside = resident_bytes("VmHWM") - before - result
            assert plan.report is not None
            if number:
                figures[name].append(
                    {
                        "seconds": seconds,
                        "processor": processor,
                        "read": plan.report.bytes_read + plan.report.gap_bytes,
                        "needed": plan.bytes_to_read,
                        "beside": beside,
                    }
                )
            del state
    print(json.dumps(figures), flush=True)
    if count > 1:
        multihost_utils.sync_global_devices("end")
        jax.distributed.shutdown()


def measure(count: int, path: Path, rounds: int) -> None:
    """Starts the processes and prints what they tell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES_EACH}",
    }
    command = [sys.executable, "-m", "benchmarks.pods", "--rounds", str(rounds), "--work"]
    workers = [
        subprocess.Popen(
            [*command, str(index), str(count), coordinator, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]
    told = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    stored = path.stat().st_size
    print(f"{count} process{'es' if count > 1 else ''}, {stored / _MIB:,.0f} MiB")
    for way in _WAYS:
        by_round = list(zip(*(one[way] for one in told), strict=True))
        median = {
            "s": statistics.median(max(one["seconds"] for one in some) for some in by_round),
            "CPU s": statistics.median(sum(one["processor"] for one in some) for some in by_round),
            "read by all / stored": statistics.median(sum(one["read"] for one in some) / stored for some in by_round),
            "most read / own shards": statistics.median(
                max(one["read"] / one["needed"] for one in some) for some in by_round
            ),
            "peak beside the result, MiB": max(one["beside"] for some in by_round for one in some) / _MIB,
        }
        print(f"  {way:22}", ", ".join(f"{name} {value:.3g}" for name, value in median.items()))
    plain, sent = (
        [max(one["seconds"] for one in some) for some in zip(*(one[way] for one in told), strict=True)]
        for way in ("replicated", "replicated, broadcast")
    )
    ratio = statistics.median(ours / theirs for ours, theirs in zip(sent, plain, strict=True))
    print(f"  broadcast over none: time {ratio:.2f}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        index, count, coordinator, path = given.work
        work(int(index), int(count), coordinator, path, given.rounds)
        return
    import numpy as np
    import safetensors.numpy

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        generator = np.random.default_rng(0)
        rows = given.mib * _MIB // (4 * _COLUMNS * _ARRAYS)
        arrays = {f"w{number}": generator.standard_normal((rows, _COLUMNS), np.float32) for number in range(_ARRAYS)}
        path = Path(folder) / "model.safetensors"
        safetensors.numpy.save_file(arrays, path)
        del arrays
        for count in given.processes:
            measure(count, path, given.rounds)


if __name__ == "__main__":
    main()
