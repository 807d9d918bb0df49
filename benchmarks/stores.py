"""`python -m benchmarks.stores [--times N]`: reads over HTTP, beside TensorStore alone.

A server in a process of its own serves checkpoints from a local directory. For an Orbax item of 12 arrays of 8 MiB it
prints the time and the requests of a restore, metadata included, and those of TensorStore's own http store, which is
given the names; then the requests that restores of 1,500 small leaves take in each format. Both sides alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LARGE = {f"w{number}": (2048, 1024) for number in range(12)}
SMALL = {f"l{number:04}": (512,) for number in range(1500)}


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Makes incompressible arrays."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path) -> None:
    """Writes the checkpoints."""
    import flax.serialization
    import orbax.checkpoint as ocp
    import safetensors.numpy

    small = values(SMALL)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "large", values(LARGE))
        checkpointer.save(folder / "orbax", small)
    safetensors.numpy.save_file(small, folder / "model.safetensors")
    (folder / "model.msgpack").write_bytes(flax.serialization.msgpack_serialize(small))
    np.savez(folder / "model.npz", **small)


def serve(folder: Path) -> None:
    """Serves a folder, and under `count` the number of requests since it was asked last."""
    from tests.support.http_store import HttpStore

    store = HttpStore(folder)

    def answer(name: str, query: dict[str, list[str]]) -> Any:
        if name != "count":
            return store.contents(name)
        count = len(store.log) - 1
        store.log.clear()
        return 200, str(count).encode(), {}

    store.answer_to = answer
    print(store.url, flush=True)
    sys.stdin.read()
    store.close()


def restore_large(url: str) -> Callable[[], None]:
    """Returns a restore of the large arrays by this package."""
    import orbax_t5x as ot

    target = {name: np.zeros(shape, np.float32) for name, shape in LARGE.items()}
    return lambda: ot.restore(f"{url}/large", target)


def read_large(url: str) -> Callable[[], None]:
    """Returns a read of the same arrays by TensorStore, with the names given."""
    import tensorstore as ts

    def read() -> None:
        context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
        base = {"driver": "http", "base_url": url, "path": "/large/"}
        database = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
        specs = [{"driver": "zarr", "kvstore": {**database, "path": f"{name}/"}} for name in LARGE]
        arrays = [ts.open(spec, open=True, context=context) for spec in specs]
        for read in [array.result().read() for array in arrays]:
            read.result()

    return read


def main() -> None:
    """Prints the table and its JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import orbax_t5x as ot

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        command = [sys.executable, "-m", "benchmarks.stores", "--serve", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()

            def requests() -> int:
                return int(urllib.request.urlopen(f"{url}/count").read())

            calls = {"restore": restore_large(url), "TensorStore": read_large(url)}
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            counts: dict[str, int] = {}
            for _ in range(options.times + 1):
                for name, call in calls.items():
                    requests()
                    start = time.perf_counter()
                    call()
                    seconds[name].append(time.perf_counter() - start)
                    counts[name] = requests()
            medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
            row = {
                "seconds": medians,
                "ratio": medians["restore"] / medians["TensorStore"],
                "requests": counts,
                "small leaves": {},
            }
            for name in ("model.safetensors", "model.msgpack", "model.npz", "orbax"):
                requests()
                ot.restore(f"{url}/{name}", {name: np.zeros(shape, np.float32) for name, shape in SMALL.items()})
                row["small leaves"][name] = requests()
            server.stdin.close()
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
