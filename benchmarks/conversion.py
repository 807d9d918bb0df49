"""Conversions of 1 GB beside the floor: reading the bytes and writing them.

`python -m benchmarks.conversion [--folder DIR] [--runs N] [--layers N]`. The two alternate, and each process is fresh.
Processor time over wall time is the number of cores that were busy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Clock, resident_bytes

_LAYERS = 12
_BLOCK_BYTES = 64 << 20
_MIB = 1 << 20


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


def convert(path: str, destination: str, format: str) -> None:
    """A conversion; in a process of its own."""
    import jax

    import orbax_t5x as ot

    ot.TrainStateHandler()
    jax.devices()
    clock = Clock()
    clock.start()
    ot.convert(path, destination, format=format)
    clock.stop(resident=resident_bytes("VmHWM"))


def run_floor(path: Path, folder: Path) -> dict[str, float]:
    """One run of the floor."""
    return _run(["floor", str(path), str(folder / "floor")])


def run_convert(path: Path, folder: Path, format: str) -> dict[str, float]:
    """One conversion."""
    figures = _run(["convert", str(path), str(folder / "out"), format])
    shutil.rmtree(folder / "out")
    return figures


def _run(command: list[str]) -> dict[str, float]:
    """Runs a fresh process: its time, processor time and peak."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.conversion", *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(path: Path, folder: Path, format: str, runs: int) -> None:
    """Alternates the two ways and prints a table; one round before is not measured."""
    measured: dict[str, list[dict[str, float]]] = {"floor": [], "conversion": []}
    load = os.getloadavg()[0]
    for number in range(runs + 1):
        round = {"floor": run_floor(path, folder), "conversion": run_convert(path, folder, format)}
        for way, figures in round.items():
            measured[way] += [figures] if number else []
    size = path.stat().st_size / 1e9
    loads = f"load {load:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"\n## {size:.2f} GB to {format} ({runs} alternating runs; {loads})\n")
    headings = ["way", "s", "of the floor's time", "CPU s", "cores busy", "peak growth MiB", "peak MiB"]
    print(f"| {' | '.join(headings)} |")
    print("|---" * len(headings) + "|")
    for way, figures in measured.items():
        pairs = zip(measured["floor"], figures, strict=True)
        times = statistics.median(run["seconds"] / least["seconds"] for least, run in pairs)
        seconds, processor, growth, peak = (
            statistics.median(run[key] for run in figures)
            for key in ("seconds", "processor_seconds", "peak_growth_bytes", "resident")
        )
        cells = [
            way,
            f"{seconds:.2f}",
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
