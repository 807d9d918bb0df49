"""Restores and saves on an accelerator: `python -m benchmarks.accelerator [--mebibytes N] [--rounds N] [--folder DIR]`.

One command answers, on whatever devices JAX has. On CPU the same jobs run, and their numbers mean nothing for an
accelerator.

* restores: a state from an Orbax checkpoint and from safetensors, onto the device, beside `jax.device_put` of the same
  bytes from host memory, alternating; the files are in the page cache.
* host memory: growth of the resident set while restoring with a budget of 256 MiB, beyond the state's bytes where these
  are on the host; minor faults of a first and a second restore: buffers that are reused fault once.
* pinned_host: a target with `memory_kind="pinned_host"` comes back in that memory, with the same values.
* meshes: with two devices or more, a state restored over each mesh of two dimensions has the shards and values of
  `device_put`.
* stalls: the longest training step while a save runs with the time that `save` blocks, in steps without one, for this
  package's handler and for stock Orbax's, alternating.

The last line is a JSON object with all figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import orbax_t5x as ot
from benchmarks.measure import reset_peak, resident_bytes

_MIB = 1 << 20
_BUDGET_BYTES = 256 * _MIB
_LAYERS = 24
# Steps of training around one save.
_STEPS = 30


def host_state(mebibytes: int) -> dict[str, np.ndarray]:
    """Values that do not compress: equal kernels of two dimensions, as a model's layers have."""
    rows = max(8, mebibytes * _MIB // (_LAYERS * 4 * 1024) // 8 * 8)
    generator = np.random.default_rng(0)
    return {f"layers_{layer}": generator.standard_normal((rows, 1024), np.float32) for layer in range(_LAYERS)}


def abstract(state: dict[str, np.ndarray], sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The state as a target, each leaf with one sharding."""
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for name, array in state.items()}


def seconds_of(run: Callable[[], Any]) -> float:
    """Wall time until the result is on the devices; the result is freed before this returns."""
    started = time.perf_counter()
    result = jax.block_until_ready(run())
    seconds = time.perf_counter() - started
    for leaf in jax.tree.leaves(result):
        leaf.delete()
    return seconds


def alternating(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round that is not measured."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, run in ways.items():
            seconds = seconds_of(run)
            if index:
                found[name].append(seconds)
    return found


def restores(paths: dict[str, Path], state: dict[str, np.ndarray], rounds: int) -> dict[str, float]:
    """Restores beside `device_put`, in GB/s and as medians of the ratios of the rounds."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    target = abstract(state, sharding)
    ways: dict[str, Callable[[], Any]] = {"device_put": lambda: jax.device_put(state, sharding)}
    for name, path in paths.items():
        ways[name] = lambda path=path: ot.restore(path, target, memory_limit_bytes=_BUDGET_BYTES)
    found = alternating(ways, rounds)
    size = sum(array.nbytes for array in state.values())
    figures = {f"{name} GB/s": size / statistics.median(times) / 1e9 for name, times in found.items()}
    for name in paths:
        pairs = zip(found[name], found["device_put"], strict=True)
        figures[f"{name} / device_put"] = statistics.median(mine / other for mine, other in pairs)
    return figures


def host_memory(path: Path, state: dict[str, np.ndarray]) -> dict[str, float]:
    """Growth of the resident set and minor faults of two executions of one plan."""
    target = abstract(state, SingleDeviceSharding(jax.devices()[0]))
    is_on_host = jax.default_backend() == "cpu"
    own = sum(array.nbytes for array in state.values()) if is_on_host else 0
    figures = {}
    for turn in ("first", "second"):
        reset_peak()
        before, faults = resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds_of(lambda: ot.restore(path, target, memory_limit_bytes=_BUDGET_BYTES))
        figures[f"{turn} restore, host growth beyond the state MiB"] = (resident_bytes("VmHWM") - before - own) / _MIB
        figures[f"{turn} restore, minor faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    figures["budget MiB"] = _BUDGET_BYTES / _MIB
    return figures


def pinned_host(path: Path, state: dict[str, np.ndarray]) -> dict[str, bool]:
    """Restores into pinned memory of the host, where the device has it."""
    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return {}
    target = abstract(state, SingleDeviceSharding(device, memory_kind="pinned_host"))
    restored = ot.restore(path, target)
    is_there = all(array.sharding.memory_kind == "pinned_host" for array in restored.values())
    return {"pinned_host": is_there and is_equal(restored, state)}


def is_equal(restored: dict[str, jax.Array], state: dict[str, np.ndarray]) -> bool:
    """Whether every value is the same."""
    return all(np.array_equal(np.asarray(restored[name]), array) for name, array in state.items())


def meshes(path: Path, state: dict[str, np.ndarray]) -> dict[str, bool]:
    """Restores over each mesh of two dimensions that the devices make, beside `device_put`."""
    devices = np.asarray(jax.devices())
    found = {}
    for first in (count for count in range(1, len(devices) + 1) if len(devices) % count == 0 and len(devices) > 1):
        mesh = Mesh(devices.reshape(first, -1), ("data", "model"))
        for spec in (PartitionSpec("data", "model"), PartitionSpec(("data", "model")), PartitionSpec(None, "model")):
            sharding = NamedSharding(mesh, spec)
            restored = ot.restore(path, abstract(state, sharding))
            expected = jax.device_put(state, sharding)
            found[f"{mesh.shape['data']} x {mesh.shape['model']}, {spec}"] = all(
                np.array_equal(mine.data, other.data)
                for name in state
                for mine, other in zip(
                    restored[name].addressable_shards, expected[name].addressable_shards, strict=True
                )
            )
    return found


def stalls(folder: Path, state: dict[str, np.ndarray], rounds: int) -> dict[str, float]:
    """How long the slowest step of training takes while an asynchronous save runs, over a step without one."""
    ways = {
        "ours": (ot.TrainStateHandler(), lambda tree: ot.args.TrainStateSave(tree, provenance=())),
        "stock": (ocp.PyTreeCheckpointHandler(), lambda tree: ocp.args.PyTreeSave(tree)),
    }
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.999 + 1e-3, tree))
    trained = jax.block_until_ready(step(jax.device_put(state, SingleDeviceSharding(jax.devices()[0]))))
    found: dict[str, list[float]] = {name: [] for name in ways}
    figures = {}
    for index in range(rounds + 1):
        for name, (handler, arguments) in ways.items():
            with ocp.CheckpointManager(folder / f"{name}-{index}", item_handlers=handler) as manager:
                quiet = [_step_seconds(step, trained) for _ in range(_STEPS)]
                started = time.perf_counter()
                manager.save(index, args=arguments(trained))
                blocking = time.perf_counter() - started
                busy = [_step_seconds(step, trained) for _ in range(_STEPS)]
                manager.wait_until_finished()
            shutil.rmtree(folder / f"{name}-{index}")
            if index:
                found[name].append((blocking + max(busy)) / statistics.median(quiet))
                figures[f"{name}, blocked ms"] = blocking * 1000
    medians = {f"{name}, stall in steps": statistics.median(times) for name, times in found.items()}
    ratio = statistics.median(mine / other for mine, other in zip(found["ours"], found["stock"], strict=True))
    return {**figures, **medians, "stall, ours / stock": ratio}


def _step_seconds(step: Callable[[Any], Any], tree: Any) -> float:
    started = time.perf_counter()
    jax.block_until_ready(step(tree))
    return time.perf_counter() - started


def measure(folder: Path, mebibytes: int, rounds: int) -> dict[str, Any]:
    """Runs everything, and returns the figures by group."""
    state = host_state(mebibytes)
    paths = {"orbax": folder / "orbax", "safetensors": folder / "safetensors"}
    ocp.PyTreeCheckpointer().save(paths["orbax"], state)
    ot.convert(paths["orbax"], paths["safetensors"], format="safetensors")
    device = jax.devices()[0]
    return {
        "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform}), jax {jax.__version__}",
        "MiB": sum(array.nbytes for array in state.values()) / _MIB,
        "restores": restores(paths, state, rounds),
        "host memory": host_memory(paths["orbax"], state),
        "pinned_host": pinned_host(paths["orbax"], state),
        "meshes": meshes(paths["orbax"], state),
        "stalls": stalls(folder, state, rounds),
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures; 1 where values or placings are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description="Restores on an accelerator.")
    parser.add_argument("--mebibytes", type=int, default=4096, help="size of the state (default: 4096)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary directory)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options.mebibytes, options.rounds)
    for name, group in figures.items():
        if isinstance(group, dict):
            print(f"{name}:")
            for label, value in group.items():
                print(f"  {label:<48}{value if isinstance(value, bool) else f'{value:,.2f}'}")
        else:
            print(f"{name}: {group}")
    print(json.dumps(figures))
    return int(not all([*figures["pinned_host"].values(), *figures["meshes"].values()]))


if __name__ == "__main__":
    sys.exit(main())
