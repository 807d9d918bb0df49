"""Conversions of 1 GB by one, two and four processes, beside the floor: reading the bytes and writing them.

`python -m benchmarks.conversion [--folder DIR] [--runs N] [--layers N]`. Ways alternate, each process is fresh, and the
clock runs from the moment when all processes have found each other until the last has returned. Processor time is that
of all processes together: over wall time it is the number of cores that were busy. A way that has them all busy with
one process gains nothing from a second one on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Clock, resident_bytes

_LAYERS = 12
_BLOCK_BYTES = 64 << 20
_MIB = 1 << 20
_COUNTS = (1, 2, 4)


def source(folder: Path, layers: int) -> Path:
    """T5.1.1-base shapes as a safetensors file of incompressible values, made once: 0.99 GB with 12 layers."""
    path = folder / f"conversion_{layers}" / "model.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = [sys.executable, "-m", "benchmarks.conversion", "write", str(path), str(layers)]
        subprocess.run(arguments, check=True)
    return path


def write(path: str, layers: str) -> None:
    """Writes the source; in a process of its own."""
    import numpy as np
    import safetensors.numpy

    from benchmarks.data import mesh_tf_shapes

    random = np.random.default_rng(0)
    shapes = mesh_tf_shapes(int(layers))
    arrays = {name.replace("/", "."): random.standard_normal(shape, np.float32) for name, shape in shapes}
    safetensors.numpy.save_file(arrays, path)


def floor(path: str, destination: str) -> None:
    """Reads the bytes into fresh memory and writes them, block by block; they are on disk at the end."""
    clock = Clock()
    clock.start()
    with open(path, "rb") as read, open(destination, "wb") as written:
        while block := read.read(_BLOCK_BYTES):
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
    clock.stop(resident=resident_bytes("VmHWM"))


def convert(path: str, destination: str, format: str, index: str, count: str, port: str) -> None:
    """One process of a conversion."""
    import jax

    import orbax_t5x as ot

    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    from jax.experimental import multihost_utils

    ot.TrainStateHandler()
    jax.devices()
    clock = Clock()
    if int(count) > 1:
        multihost_utils.sync_global_devices("begin")
    clock.start()
    ot.convert(path, destination, format=format)
    clock.stop(resident=resident_bytes("VmHWM"))


def run_floor(path: Path, folder: Path) -> dict[str, float]:
    """One run of the floor."""
    return _together([["floor", str(path), str(folder / "floor")]])


def run_convert(path: Path, folder: Path, format: str, count: int) -> dict[str, float]:
    """One conversion by `count` processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = ["convert", str(path), str(folder / "out"), format]
    figures = _together([[*shared, str(index), str(count), str(port)] for index in range(count)])
    shutil.rmtree(folder / "out")
    return figures


def _together(commands: list[list[str]]) -> dict[str, float]:
    """Runs processes at the same time: the longest time, all processor time, the highest peak."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.conversion", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate() for process in started]
    for process, (_, error) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(error[-4000:])
    told = [json.loads(output.strip().splitlines()[-1]) for output, _ in outputs]
    return {
        "seconds": max(one["seconds"] for one in told),
        "processor_seconds": sum(one["processor_seconds"] for one in told),
        "peak_growth": max(one["peak_growth_bytes"] for one in told),
        "resident": max(one["resident"] for one in told),
    }


def compare(path: Path, folder: Path, format: str, runs: int) -> None:
    """Alternates the ways and prints a table; one round before is not measured."""
    measured: dict[str, list[dict[str, float]]] = {"floor": []} | {f"{count} processes": [] for count in _COUNTS}
    load = os.getloadavg()[0]
    for number in range(runs + 1):
        round = {"floor": run_floor(path, folder)}
        round |= {f"{count} processes": run_convert(path, folder, format, count) for count in _COUNTS}
        for way, figures in round.items():
            measured[way] += [figures] if number else []
    size = path.stat().st_size / 1e9
    loads = f"load {load:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"\n## {size:.2f} GB to {format} ({runs} alternating runs; {loads})\n")
    headings = ["way", "s", "times as fast as one process", "of the floor's time", "CPU s", "cores busy"]
    headings += ["peak growth MiB", "peak MiB"]
    print(f"| {' | '.join(headings)} |")
    print("|---" * 8 + "|")
    alone, least = measured["1 processes"], measured["floor"]
    for way, figures in measured.items():
        speed = statistics.median(one["seconds"] / its["seconds"] for one, its in zip(alone, figures, strict=True))
        times = statistics.median(its["seconds"] / one["seconds"] for one, its in zip(least, figures, strict=True))
        seconds, processor, growth, peak = (
            statistics.median(one[key] for one in figures)
            for key in ("seconds", "processor_seconds", "peak_growth", "resident")
        )
        cells = [
            way.replace("1 processes", "1 process"),
            f"{seconds:.2f}",
            f"{speed:.2f}",
            f"{times:.2f}",
            f"{processor:.2f}",
            f"{processor / seconds:.2f}",
            f"{growth / _MIB:,.0f}",
            f"{peak / _MIB:,.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=_LAYERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        path = source(folder, options.layers)
        for format in ("orbax", "safetensors"):
            compare(path, folder, format, options.runs)


if __name__ == "__main__":
    jobs = {function.__name__: function for function in (write, floor, convert)}
    if len(sys.argv) > 1 and sys.argv[1] in jobs:
        jobs[sys.argv[1]](*sys.argv[2:])
    else:
        main()
