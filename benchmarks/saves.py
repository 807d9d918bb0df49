"""Asynchronous saves beside those of plain Orbax: `python -m benchmarks.saves [--saves N] [--devices N …] …`.

One process (or a job of several) holds one state and one `CheckpointManager` for each way to save it, and saves with
each in turn, in an order that rotates: what the machine does meanwhile meets all ways alike. The first rounds are not
measured, so imports, first calls and cold caches are left out. For each save:

* blocking: until `manager.save` returns, and the processor time of the calling thread until then;
* total: until the step is finished on disk (`wait_until_finished`), the deletion of the step before last included;
* CPU: processor time of all threads meanwhile, of all processes together.

Ratios are medians of the ratios of the rounds. "plain again" is the same as the plain way, in another directory: how
far its ratios are from 1 is what this machine cannot tell apart.
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
import time
from collections.abc import Sequence
from pathlib import Path

_COORDINATOR_TIMEOUT_SECS = 120
WARM_UP_ROUNDS = 2
FIGURES = ("blocking", "blocking_cpu", "total", "cpu")
# Each pair is compared: the first over the second.
_PAIRS = (
    ("ours", "plain PyTreeSave"),
    ("ours, checksums=False", "plain PyTreeSave"),
    ("ours", "plain StandardSave"),
    ("ours", "ours, checksums=False"),
    ("plain again", "plain PyTreeSave"),
)


def state_shapes(mebibytes: int) -> dict[str, tuple[int, ...]]:
    """T5-like parameters with the two slots of Adam each: 152 arrays, two of them scalars."""
    width = round(768 * mebibytes / 264 / 16) * 16
    shapes: dict[str, tuple[int, ...]] = {"step": (), "count": ()}
    for slot in ("params", "mu", "nu"):
        shapes[f"{slot}/token_embedder/embedding"] = (8192 * width // 768 // 16 * 16, 512)
        shapes[f"{slot}/final_norm/scale"] = (512,)
        for layer in range(12):
            for kernel in ("query", "value", "wi", "wo"):
                shapes[f"{slot}/layers_{layer}/{kernel}/kernel"] = (512, width)
    return shapes


def make_state(mebibytes):
    """The state, its rows split over all devices of all processes; values that do not compress."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from orbax_t5x.trees.flat import unflatten

    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    random = np.random.default_rng(0)

    def make(shape):
        value = random.standard_normal(shape, np.float32)
        split = PartitionSpec("x") if shape and shape[0] % len(jax.devices()) == 0 else PartitionSpec()
        return jax.make_array_from_callback(shape, NamedSharding(mesh, split), lambda index: value[index])

    return unflatten({name: make(shape) for name, shape in state_shapes(mebibytes).items()})


def _ways():
    """Name -> (handler of the manager, the arguments of a save)."""
    import orbax.checkpoint as ocp

    import orbax_t5x as ot

    return {
        "plain PyTreeSave": (ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave),
        "ours": (ot.TrainStateHandler(), ot.args.TrainStateSave),
        "plain StandardSave": (ocp.StandardCheckpointHandler(), ocp.args.StandardSave),
        "ours, checksums=False": (ot.TrainStateHandler(checksums=False), ot.args.TrainStateSave),
        "plain again": (ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave),
    }


def save_in_turn(
    folder: Path, saves: int, mebibytes: int, chosen: Sequence[str] = ()
) -> dict[str, dict[str, list[float]]]:
    """Way -> figure -> seconds of each measured save of this process; `chosen`: ways, all where there are none."""
    import jax
    import orbax.checkpoint as ocp

    state, ways = make_state(mebibytes), {way: what for way, what in _ways().items() if not chosen or way in chosen}
    train = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    managers = {
        way: ocp.CheckpointManager(folder / str(index), options=options, item_handlers=handler)
        for index, (way, (handler, _)) in enumerate(ways.items())
    }
    measured = {way: {figure: [] for figure in FIGURES} for way in ways}
    names = list(ways)
    for step in range(WARM_UP_ROUNDS + saves):
        turn = step % len(names)
        for way in names[turn:] + names[:turn]:
            state = jax.block_until_ready(train(state))  # as in a run: no array is saved twice
            figures = one_save(managers[way], step, ways[way][1](state))
            if step >= WARM_UP_ROUNDS:
                for figure, seconds in figures.items():
                    measured[way][figure].append(seconds)
    for manager in managers.values():
        manager.close()
    return measured


def one_save(manager, step, arguments) -> dict[str, float]:
    """The figures of one save by a manager."""
    cpu, thread_cpu, started = time.process_time(), time.thread_time(), time.perf_counter()
    manager.save(step, args=arguments)
    returned, thread_cpu = time.perf_counter(), time.thread_time() - thread_cpu
    manager.wait_until_finished()
    finished = time.perf_counter()
    return {
        "blocking": returned - started,
        "blocking_cpu": thread_cpu,
        "total": finished - started,
        "cpu": time.process_time() - cpu,
    }


def _worker(
    folder: str, saves: str, mebibytes: str, ways: str, coordinator: str, count: str, index: str, result: str
) -> None:
    """One process of a job; its result goes into a file, since collectives print."""
    import jax

    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator, int(count), int(index), initialization_timeout=_COORDINATOR_TIMEOUT_SECS
        )
    Path(result).write_text(json.dumps(save_in_turn(Path(folder), int(saves), int(mebibytes), json.loads(ways))))


def run(
    folder: Path, saves: int, mebibytes: int, devices: int, processes: int, ways: Sequence[str] = ()
) -> dict[str, dict[str, list[float]]]:
    """The figures of one job: wall times of its slowest process, processor time of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    place = Path(tempfile.mkdtemp(prefix="saves-", dir=folder))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    results = [place / f"{index}.json" for index in range(processes)]
    command = [sys.executable, "-m", "benchmarks.saves", "--worker", str(place), str(saves), str(mebibytes)]
    command += [json.dumps(ways), coordinator, str(processes)]
    workers = [
        subprocess.Popen([*command, str(index), str(result)], env=environment, stdout=subprocess.DEVNULL)
        for index, result in enumerate(results)
    ]
    try:
        if any([worker.wait() for worker in workers]):
            raise RuntimeError("a process of the benchmark failed; see above")
        each = [json.loads(result.read_text()) for result in results]
    finally:
        for worker in workers:
            worker.kill()
        shutil.rmtree(place, ignore_errors=True)
    return {
        way: {
            figure: [
                (sum if figure == "cpu" else max)(of) for of in zip(*(one[way][figure] for one in each), strict=True)
            ]
            for figure in FIGURES
        }
        for way in each[0]
    }


def show(measured: dict[str, dict[str, list[float]]], pairs: Sequence[tuple[str, str]] = _PAIRS) -> None:
    """Prints medians of the ways, and medians of the ratios of pairs with their quartiles."""
    print(f"\n| way | {' | '.join(f'{figure} s' for figure in FIGURES)} |\n" + "|---" * (1 + len(FIGURES)) + "|")
    for way, figures in measured.items():
        print(f"| {way} | {' | '.join(f'{statistics.median(figures[figure]):.3f}' for figure in FIGURES)} |")
    print(f"\n| ratio (quartiles) | {' | '.join(FIGURES)} |\n" + "|---" * (1 + len(FIGURES)) + "|")
    for one, other in [pair for pair in pairs if measured.keys() >= {*pair}]:
        cells = []
        for figure in FIGURES:
            ratios = [a / b for a, b in zip(measured[one][figure], measured[other][figure], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.3f} ({low:.2f} to {high:.2f})")
        print(f"| {one} / {other} | {' | '.join(cells)} |")
    sys.stdout.flush()


def main() -> None:
    """Runs every combination of devices and processes that divides evenly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves", description="Compares asynchronous saves.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--saves", type=int, default=30, help="measured saves of each way (at least 2)")
    parser.add_argument("--mib", type=int, default=264)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="of all processes together")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    ways = sorted({way for pair in _PAIRS for way in pair})
    parser.add_argument("--ways", nargs="+", default=[], choices=ways, metavar="WAY", help="only these: %(choices)s")
    options = parser.parse_args()
    for processes in options.processes:
        for devices in options.devices:
            if devices % processes:
                continue
            load = os.getloadavg()[0]
            measured = run(options.folder, options.saves, options.mib, devices, processes, options.ways)
            print(
                f"\n## {options.mib} MiB in {len(state_shapes(options.mib))} arrays, {devices} devices, {processes} "
                f"processes, {options.saves} saves of each way (load {load:.1f} to {os.getloadavg()[0]:.1f})"
            )
            show(measured)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(*sys.argv[2:])
    else:
        main()
