"""`python -m benchmarks.remote [--folder DIR] [--latency MS] [FORMAT…]`: restores over HTTP, T5.1.1-small shapes.

A server in a process of its own, and on a core of its own where there are several, serves the checkpoints on the
loopback from memory and waits before each answer. Of each format are told: the time of a whole restore and of opening
alone; the requests and the bytes sent, beside the bytes of the arrays; and the least that a restore could take: the
bytes at the bandwidth that plain ranged reads of the same store reach, the round trips that the format makes one after
the other, and three more. What that leaves out is decoding: it stands beside it as the time that the same files take
from the local disk. On a machine that has other work to do, a latency of 300 ms shows the round trips alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.support.http_store import HttpStore

_LATENCY_MS = 20.0
_EMBED, _HEADS, _MLP, _VOCAB, _LAYERS = 512, 6 * 64, 1024, 32128, 8
_STATISTICS = "statistics"


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of T5.1.1-small by their T5X names, 77 million."""
    yield "target/token_embedder/embedding", (_VOCAB, _EMBED)
    yield "target/decoder/logits_dense/kernel", (_EMBED, _VOCAB)
    for tower, attentions in (("encoder", ["attention"]), ("decoder", ["self_attention", "encoder_decoder_attention"])):
        for layer in range(_LAYERS):
            for attention in attentions:
                for kernel, shape in zip(("query", "key", "value"), [(_EMBED, _HEADS)] * 3, strict=True):
                    yield f"target/{tower}/layers_{layer}/{attention}/{kernel}/kernel", shape
                yield f"target/{tower}/layers_{layer}/{attention}/out/kernel", (_HEADS, _EMBED)
                yield f"target/{tower}/layers_{layer}/pre_{attention}_layer_norm/scale", (_EMBED,)
            yield f"target/{tower}/layers_{layer}/mlp/wi_0/kernel", (_EMBED, _MLP)
            yield f"target/{tower}/layers_{layer}/mlp/wi_1/kernel", (_EMBED, _MLP)
            yield f"target/{tower}/layers_{layer}/mlp/wo/kernel", (_MLP, _EMBED)
            yield f"target/{tower}/layers_{layer}/pre_mlp_layer_norm/scale", (_EMBED,)


def chain(name: str) -> int:
    """Reads of a format that depend on one another: of msgpack, the header of each array stands behind the last one."""
    return {"safetensors": 2, "flax_msgpack": 2 + len(list(shapes())), "orbax": 4, "t5x": 3}[name]


def arrays() -> dict[str, np.ndarray]:
    """Incompressible values."""
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in shapes()}


def _nested(flat: dict[str, np.ndarray]) -> dict:
    from flax import traverse_util

    return traverse_util.unflatten_dict({tuple(name.split("/")): value for name, value in flat.items()})


def write_safetensors(path: Path) -> None:
    """One file."""
    import safetensors.numpy

    path.mkdir()
    safetensors.numpy.save_file(arrays(), path / "model.safetensors")


def write_flax_msgpack(path: Path) -> None:
    """One file."""
    import flax.serialization

    path.mkdir()
    (path / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(_nested(arrays())))


def write_orbax(path: Path) -> None:
    """An item in an OCDBT database, by plain Orbax."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, _nested(arrays()))


def write_t5x(path: Path) -> None:
    """A native step: gzip level 1, chunks of at most 4 MiB along the first dimension."""
    import flax.serialization
    import tensorstore as ts

    path.mkdir()
    specs: dict[str, object] = {}
    for name, value in arrays().items():
        directory = name.replace("/", ".")
        rows = max(1, (4 << 20) // (value.nbytes // value.shape[0]))
        metadata = {
            "shape": list(value.shape),
            "chunks": [min(rows, value.shape[0]), *value.shape[1:]],
            "compressor": {"id": "gzip", "level": 1},
        }
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/{directory}/"}}
        ts.open({**spec, "metadata": {**metadata, "dtype": "<f4"}}, create=True).result().write(value).result()
        kvstore = {"driver": "file", "path": f"{directory}/"}
        specs[name] = {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata}
    tree = {"version": 3, "optimizer": _nested(specs)}  # pyright: ignore[reportArgumentType]
    (path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))


FORMATS: dict[str, Callable[[Path], None]] = {
    "safetensors": write_safetensors,
    "flax_msgpack": write_flax_msgpack,
    "orbax": write_orbax,
    "t5x": write_t5x,
}


class CountingStore(HttpStore):
    """Tells what it was asked for, and forgets it."""

    def answer_to(self, name: str, query: dict[str, list[str]]) -> bytes | tuple[int, bytes, dict[str, str]] | None:
        """See `HttpStore.answer_to`."""
        if name != _STATISTICS:
            return super().answer_to(name, query)
        told = {"requests": len(self.log) - 1, "bytes": self.bytes_sent}
        self.forget()
        return 200, json.dumps(told).encode(), {}


def serve(directory: Path, latency: float) -> None:
    """Serves a directory from memory until standard input ends."""
    store = CountingStore()
    store.files = {
        str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }
    tags = {id(data): f'"{number}"' for number, data in enumerate(store.files.values())}
    store.etag = lambda data: tags.get(id(data))
    store.latency = latency
    print(store.url, flush=True)
    sys.stdin.read()
    store.close()


def statistics(url: str) -> dict[str, int]:
    """Requests and bytes since the last call."""
    with urllib.request.urlopen(f"{url}/{_STATISTICS}") as answer:
        return json.load(answer)


def bandwidth(url: str, files: dict[str, int]) -> float:
    """Bytes per second of plain reads of 2 MiB, as many at once as TensorStore makes, of up to 256 MiB."""
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "http", "base_url": url, "path": "/"}).result()
    piece = 2 << 20
    ranges = [(name, at) for name, size in files.items() for at in range(0, size - piece, piece)][:128]
    if not ranges:
        ranges, piece = [(name, 0) for name in files], 1
    for _ in range(2):
        begun = time.perf_counter()
        reads = [store.read(name, byte_range=slice(at, at + piece)) for name, at in ranges]
        for read in reads:
            read.result()
    return len(ranges) * piece / (time.perf_counter() - begun)


def measure(path: Path, url: str, name: str, latency: float, rate: float) -> str:
    """One row of the table."""
    import orbax_t5x as ot

    wanted = sum(value.nbytes for value in arrays().values())
    best, opening, local, told = float("inf"), float("inf"), float("inf"), {}
    for _ in range(3):
        statistics(url)
        begun = time.perf_counter()
        with ot.open_checkpoint(f"{url}/{name}") as checkpoint:
            opening = min(opening, time.perf_counter() - begun)
            target = {leaf: np.empty(view.shape, view.dtype) for leaf, view in checkpoint.leaves.items()}
        told_opening = statistics(url)
        begun = time.perf_counter()
        ot.restore(path / name, target)
        local = min(local, time.perf_counter() - begun)
        begun = time.perf_counter()
        ot.restore(f"{url}/{name}", target)
        best = min(best, time.perf_counter() - begun)
        told = statistics(url)
    least = told["bytes"] / rate + (chain(name) + 3) * latency
    return (
        f"| {name} | {opening:.2f} s, {told_opening['requests']} requests | {best:.2f} s | {least:.2f} s | "
        f"{best / least:.2f} | {local:.2f} s | {told['requests']} | {told['bytes'] / 1e6:.0f} MB | "
        f"{told['bytes'] / wanted:.2f} |"
    )


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", choices=[*FORMATS, []])
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept between calls (1.3 GB)")
    parser.add_argument("--latency", type=float, default=_LATENCY_MS, help="milliseconds before each answer")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.latency / 1000)
        return
    headings = ("format", "opening", "restore", "least", "ratio", "from disk", "requests", "bytes", "of the arrays'")
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
    *own, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own or {last})
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name in options.formats or FORMATS:
            path = folder / name / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                FORMATS[name](path)
            command = [sys.executable, "-m", "benchmarks.remote", "--serve", str(path.parent)]
            command += ["--latency", str(options.latency)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
                os.sched_setaffinity(server.pid, {last})  # before it has threads, which then have the same
                assert server.stdin is not None and server.stdout is not None
                url = server.stdout.readline().strip()
                sizes = {
                    str(file.relative_to(path.parent)): file.stat().st_size
                    for file in path.rglob("*")
                    if file.is_file()
                }
                rate = bandwidth(url, dict(sorted(sizes.items(), key=lambda item: -item[1])))
                print(measure(path.parent, url, name, options.latency / 1000, rate), flush=True)
                server.stdin.close()


if __name__ == "__main__":
    main()
