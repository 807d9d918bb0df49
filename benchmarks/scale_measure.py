"""`python -m benchmarks.scale_measure [--folder DIR]`: measures what `benchmarks.scale` assumes, and cases to compare.

Writes `scale_measured.json` beside this module. Every figure is the least of several runs in processes of their own:
what a busy machine adds is not the package's. Each case restores 8 devices' worth of one checkpoint in 1, 2 and 4
processes that share them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import processor_seconds, reset_peak, resident_bytes

MEASURED = Path(__file__).with_name("scale_measured.json")
_DEVICES = 8
# The checkpoints of the cases: 24 layers of 40 MB.
_LAYERS = 24
_FORMATS = ("bundle", "orbax", "t5x")
_SMALL = 3000


# -- one process of a job


def _start(count: int, index: int, port: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES // count}"
    if count > 1:
        import jax

        jax.distributed.initialize(f"localhost:{port}", count, index)


def _target(path: str, layout: str):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_t5x as ot

    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    specs = {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x"), "replicated": PartitionSpec()}
    chosen, whole = NamedSharding(mesh, specs[layout]), NamedSharding(mesh, PartitionSpec())
    with ot.open_checkpoint(path) as checkpoint:
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chosen if leaf.shape else whole)
            for name, leaf in checkpoint.leaves.items()
        }


def restore_job(path: str, layout: str, first: str) -> dict[str, float]:
    """A whole restore: seconds of its parts, bytes and memory, after one of a single small leaf (`start`)."""
    import jax
    from jax.experimental import multihost_utils

    import orbax_t5x as ot

    target, one = _target(path, layout), _target(first, "replicated")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("begin")
    begun = time.perf_counter()
    ot.restore(first, one)
    start = time.perf_counter() - begun
    reset_peak()
    before, cpu = resident_bytes(), processor_seconds()
    begun = time.perf_counter()
    checkpoint = ot.open_checkpoint(path)
    opened = time.perf_counter()
    plan = ot.plan_restore(checkpoint, target)
    planned = time.perf_counter()
    jax.block_until_ready(plan.execute())
    done = time.perf_counter()
    assert plan.report is not None
    return {
        "start": start,
        "seconds": done - begun,
        "opening": opened - begun,
        "planning": planned - opened,
        "reading": done - planned,
        "processor": processor_seconds() - cpu,
        "bytes": plan.report.bytes_read + plan.report.gap_bytes,
        "leaves": len(checkpoint.leaves),
        "peak": resident_bytes("VmHWM") - before,
    }


def exchange_job() -> dict[str, float]:
    """The exchange of checksums of 1,500 leaves, without any reading."""
    from orbax_t5x.multihost.collectives import gather

    mine = np.zeros((1500, 8), np.uint32)
    gather(mine, None)
    begun = time.perf_counter()
    for _ in range(5):
        gather(mine, None)
    return {"seconds": (time.perf_counter() - begun) / 5}


def strided_job(path: str) -> dict[str, float]:
    """The first columns of wide arrays: one read of the file for each row."""
    import orbax_t5x as ot

    with ot.open_checkpoint(path) as checkpoint:
        wide = [leaf for leaf in checkpoint.leaves.values() if leaf.shape[-1] > 2048]
        wide[0].get()
        cpu = processor_seconds()
        begun = time.perf_counter()
        for leaf in wide:
            leaf[:, :16].get()
        return {
            "seconds": time.perf_counter() - begun,
            "processor": processor_seconds() - cpu,
            "requests": sum(leaf.shape[0] for leaf in wide),
        }


def floor_job(path: str) -> dict[str, float]:
    """Reading all files of a checkpoint into fresh memory, one thread."""
    begun = time.perf_counter()
    size = 0
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            size += len(file.read_bytes())
    return {"seconds": time.perf_counter() - begun, "bytes": size}


JOBS = {"restore": restore_job, "strided": strided_job, "exchange": exchange_job, "floor": floor_job}


# -- all processes of a job


def run(job: str, *arguments: str, count: int = 1) -> dict[str, float]:
    """The slowest process's figures, of `bytes` the sum."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.scale_measure", "--job", job]
    processes = [
        subprocess.Popen(
            [*command, "--place", f"{count},{index},{port}", *arguments], stdout=subprocess.PIPE, text=True
        )
        for index in range(count)
    ]
    answers = []
    for process in processes:
        output, _ = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"{job} {arguments} failed")
        answers.append(json.loads(output.strip().splitlines()[-1]))
    together = {key: max(answer[key] for answer in answers) for key in answers[0]}
    for key in ("bytes", "processor"):
        if key in together:
            together[key] = sum(answer[key] for answer in answers)
    return together


def least(runs: int, job: str, *arguments: str, count: int = 1) -> dict[str, float]:
    """The run that took least of several; the first warms the page cache, too."""
    return min((run(job, *arguments, count=count) for _ in range(runs)), key=lambda figures: figures["seconds"])


# -- checkpoints


def _arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.random(shape, np.float32) for name, shape in shapes.items()}


def make(folder: Path) -> dict[str, str]:
    """Name -> path of the checkpoints that are measured."""
    import orbax_t5x as ot
    from benchmarks.data import layer_shapes
    from benchmarks.format_jobs import write_t5x
    from tests.support.bundle_writer import bundle_of

    large = layer_shapes(_LAYERS)
    small = {f"layer_{number:04d}/scale": (64,) for number in range(_SMALL)}
    paths = {}
    for name, shapes in (("large", large), ("small", small), ("first", {"scale": (64,)})):
        place = folder / f"scale_{name}"
        if not place.exists():
            place.mkdir(parents=True)
            bundle_of(_arrays(shapes)).write(place)
        (index,) = place.glob("*.index")
        paths[f"bundle_{name}"] = str(index)
    if not (folder / "scale_orbax").exists():
        ot.convert(paths["bundle_large"], folder / "scale_orbax")
    paths["orbax_large"] = str(folder / "scale_orbax")
    if not (folder / "scale_t5x").exists():
        arrays = {f"target/{name}": value for name, value in _arrays(large).items()}
        write_t5x(str(folder / "scale_t5x"), arrays, "gzip")
    paths["t5x_large"] = str(folder / "scale_t5x")
    return paths


def measure(folder: Path, runs: int) -> dict[str, object]:
    """Everything, as it is written to the file."""
    paths = make(folder)
    cases = {
        f"{name} {layout} {count}": least(
            runs, "restore", paths[f"{name}_large"], layout, paths["bundle_first"], count=count
        )
        for name in _FORMATS
        for layout in ("rows", "columns")
        for count in (1, 2, 4)
    }
    small = {
        layout: least(runs, "restore", paths["bundle_small"], layout, paths["bundle_first"])
        for layout in ("rows", "replicated")
    }
    floor = least(runs, "floor", str(Path(paths["bundle_large"]).parent))
    strided = least(runs, "strided", paths["bundle_large"])
    leaves = small["rows"]["leaves"]
    whole = {name: cases[f"{name} rows 1"] for name in _FORMATS}
    per_shard = max(0.0, small["rows"]["processor"] - small["replicated"]["processor"]) / leaves / (_DEVICES - 1)
    costs = {
        "open_leaf": {
            "bundle": small["rows"]["opening"] / leaves,
            **{name: whole[name]["opening"] / whole[name]["leaves"] for name in ("orbax", "t5x")},
        },
        "plan_leaf": small["rows"]["planning"] / leaves,
        "place_leaf": small["replicated"]["reading"] / leaves,
        "place_shard": per_shard,
        "request": strided["processor"] / strided["requests"],
        "start": small["rows"]["start"],
        "byte": {name: figures["processor"] / figures["bytes"] for name, figures in whole.items()},
        "exchange": {str(count): least(runs, "exchange", count=count)["seconds"] for count in (2, 4)},
        "leaf_bytes": small["replicated"]["peak"] / leaves,
    }
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "floor_bytes_per_second": floor["bytes"] / floor["seconds"],
        "costs": costs,
        "cases": cases,
    }


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept between calls (2 GB)")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        _start(*(int(part) for part in options.place.split(",")))
        print(json.dumps(JOBS[options.job](*options.arguments)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        MEASURED.write_text(json.dumps(measure(folder, options.runs), indent=1) + "\n")
    print(MEASURED.read_text())


if __name__ == "__main__":
    main()
