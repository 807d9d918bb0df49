"""Jobs of several processes of which the kernel kills one at a random moment.

`python -m tests.robustness.killed_pods [--times N] [--seed N]`.

The processes plan, restore, verify, compare and save, in a random order, until one of them gets SIGKILL. The
others end with a `CheckpointError`, or are ended by JAX; in a save, whose barriers are Orbax's, with any error. The
newest step is at least the newest that was acknowledged to all, and whole.

Processes are forks of one that has imported everything and computed nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from tests.support.jax_job import _free_port as free_port
from tests.support.xla import xla_flags

# Of the forks only, before their backends begin; a bucket, so that restores send.
_ENVIRONMENT = {"XLA_FLAGS": xla_flags(2), "ORBAX_T5X_STORE": "bucket"}

# Modules are loaded once for all forks.
_LOADED = (ot.restore, ot.plan_restore, ot.verify, ot.diff, ot.TrainStateHandler, ot.args.TrainStateSave)
_SHAPES = {f"w{number}": (64, 32 + number) for number in range(6)} | {"large": (512, 512)}
PHASES = ("begun", "plan", "rows", "replicated", "verify", "diff", "resume", "save")
# After which JAX ends those that wait for a dead process, and how long it may take on a busy machine.
_HEARTBEAT_SECS = 20
_LIMIT_SECS = 90.0
_HANG_SECS = 240.0


class Kill(NamedTuple):
    """Which process of how many is killed so many seconds after it has begun a phase."""

    count: int
    victim: int
    phase: str
    seconds: float


class Outcome(NamedTuple):
    """How a survivor ended, after how many seconds, and in which phase of its own."""

    kind: str
    seconds: float
    text: str
    phase: str = ""


def values() -> dict[str, np.ndarray]:
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in _SHAPES.items()}


def target(spec: PartitionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.asarray(jax.devices()), ("x",))

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, spec if shape[0] % len(jax.devices()) == 0 else PartitionSpec())

    return {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding(shape)) for name, shape in _SHAPES.items()}


def work(process: int, kill: Kill, port: int, folder: Path, seed: int, tell: Callable[[str], None]) -> None:
    """Does everything over and over, in an order that the processes share."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    times = {"initialization_timeout": 300, "heartbeat_timeout_seconds": _HEARTBEAT_SECS}
    jax.distributed.initialize(f"127.0.0.1:{port}", kill.count, process, **times)
    source, order = folder / "model.safetensors", random.Random(seed)
    rows = target(PartitionSpec("x"))  # makes JAX's backend, for which JAX itself waits
    tell("begun")
    state = ot.restore(source, rows)
    with ocp.CheckpointManager(folder / "run", item_handlers=ot.TrainStateHandler()) as manager:

        def save() -> None:
            step = (manager.latest_step() or 0) + 1
            manager.save(step, args=ot.args.TrainStateSave(state))
            manager.wait_until_finished()
            tell(f"acknowledged {step}")

        phases: dict[str, Callable[[], object]] = {
            "plan": lambda: ot.plan_restore(source, rows),
            "rows": lambda: ot.restore(source, rows),
            "replicated": lambda: ot.restore(source, target(PartitionSpec()), broadcast=True),
            "verify": lambda: ot.verify(source),
            "diff": lambda: ot.diff(source, source),
            "resume": lambda: ot.restore_or_initialize(manager, rows, init_from=source),
            "save": save,
        }
        while True:
            name = order.choice(list(phases))
            tell(name)
            phases[name]()


def check(folder: Path, acknowledged: int, tell: Callable[[str], None]) -> None:
    """Restores the newest step."""
    with ocp.CheckpointManager(folder / "run", item_handlers=ot.TrainStateHandler()) as manager:
        newest = manager.latest_step() or 0
        assert newest >= acknowledged, f"step {acknowledged} is lost: {newest}"
        if newest:
            found = manager.restore(newest, args=ot.args.TrainStateRestore(target(PartitionSpec())))
            for name, array in values().items():
                np.testing.assert_array_equal(found[name], array)
    tell("whole")


def forked(function: Callable[[Callable[[str], None]], None], *, is_kept: bool = False) -> tuple[int, int]:
    """Forks a process that tells lines; returns its number and the end of its pipe.

    With `is_kept` it stays after an error until it is killed: with process 0 JAX's service ends, and all others do.
    """
    read, write = os.pipe()
    if process := os.fork():
        os.close(write)
        return process, read
    os.close(read)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ.update(_ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")

    def tell(line: str) -> None:
        os.write(write, (line.replace("\n", " ") + "\n").encode())

    try:
        function(tell)
        os._exit(0)
    except BaseException as error:
        kind = "typed" if isinstance(error, ot.errors.CheckpointError) else type(error).__name__
        tell(f"error {kind} {str(error)[:300]}")
        if is_kept:
            signal.pause()
    finally:
        os._exit(3)


def lines(pipes: dict[int, int], seconds: float) -> Iterator[tuple[int, str | None]]:
    """Yields what processes tell within a time, and None when one ends."""
    deadline = time.monotonic() + seconds
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(pipes.values()), [], [], left)[0]:
            process = next(number for number, one in pipes.items() if one == pipe)
            data = os.read(pipe, 1 << 16).decode()
            yield from ((process, line) for line in data.splitlines())
            if not data:
                del pipes[process]
                os.close(pipe)
                yield process, None


def run(kill: Kill, folder: Path, seed: int) -> dict[int, Outcome]:
    """Runs a job until all have ended, and returns the outcomes of the survivors."""
    port = free_port()
    began = [
        forked(lambda tell, process=process: work(process, kill, port, folder, seed, tell), is_kept=True)
        for process in range(kill.count)
    ]
    pipes = {process: pipe for process, (_, pipe) in enumerate(began)}
    acknowledged = {process: 0 for process in pipes}
    phase, killed = dict.fromkeys(pipes, ""), 0.0
    outcomes: dict[int, Outcome] = {}
    try:
        for process, line in lines(pipes, 300.0):
            if line is not None and line.startswith("acknowledged"):
                acknowledged[process] = int(line.split()[1])
            elif line is not None and not line.startswith("error"):
                phase[process] = line
            if line is None or line.startswith("error"):
                raise AssertionError(f"process {process} ended before the kill: {line}")
            if process == kill.victim and line == kill.phase:
                time.sleep(kill.seconds)
                os.kill(began[process][0], signal.SIGKILL)
                killed = time.monotonic()
                break
        assert killed, f"{kill.phase} was not reached"
        for process, line in lines(pipes, _HANG_SECS):
            if line is not None and line.startswith("acknowledged"):
                acknowledged[process] = int(line.split()[1])
            elif line is not None and not line.startswith("error"):
                phase[process] = line
            elif process != kill.victim and process not in outcomes:
                if line is None:
                    ended = f"signal {os.WTERMSIG(os.waitpid(began[process][0], 0)[1])}"
                else:
                    ended = line.removeprefix("error ")
                outcomes[process] = Outcome(ended.split()[0], time.monotonic() - killed, ended, phase[process])
            if len(outcomes) == kill.count - 1:
                break
        for process in pipes.keys() - outcomes.keys() - {kill.victim}:
            outcomes[process] = Outcome("hang", _HANG_SECS, "", phase[process])
    finally:
        for number, pipe in began:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)
            with contextlib.suppress(OSError):
                os.close(pipe)
    number, pipe = forked(lambda tell: check(folder, min(acknowledged.values()), tell))
    told = [line for _, line in lines({0: pipe}, 120.0) if line]
    os.waitpid(number, 0)
    assert told == ["whole"], told
    return outcomes


def is_foreseen(kill: Kill, outcome: Outcome) -> bool:
    """Reports whether a survivor may end so."""
    if outcome.kind in ("typed", "signal") and outcome.seconds < _LIMIT_SECS:
        return True
    if kill.victim == 0:
        return outcome.kind == "JaxRuntimeError"  # JAX's service has gone with it
    # Orbax's barriers, and those of its managers; no process waits for others in a plan, and goes on to a save.
    return bool({kill.phase, outcome.phase} & {"save", "begun"}) and outcome.kind != "hang"


def random_kill(draw: random.Random, phases: Sequence[str]) -> Kill:
    count, phase = draw.choice([2, 2, 3]), draw.choice(phases)
    # The first call loads modules, and is slower.
    seconds = draw.choice([0.0, 0.02, 0.1, 0.3]) * (10 if phase == "begun" else 1)
    return Kill(count, draw.randrange(count), phase, seconds * draw.random())


def run_all(times: int, seed: int, folder: Path, phases: Sequence[str]) -> list[str]:
    """Returns the problems of so many kills."""
    draw = random.Random(seed)
    safetensors.numpy.save_file(values(), folder / "model.safetensors")
    problems: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    slowest: dict[str, float] = {}
    for number in range(times):
        kill = random_kill(draw, phases)
        try:
            outcomes = run(kill, folder, draw.randrange(1 << 30))
        except AssertionError as error:
            problems.append(f"{kill}: {error}")
            print(number, problems[-1], flush=True)
            continue
        for outcome in outcomes.values():
            kind = f"{'process 0' if kill.victim == 0 else 'another'} in {kill.phase}: {outcome.kind}"
            counts[kind] += 1
            slowest[kind] = max(slowest.get(kind, 0.0), outcome.seconds)
            if not is_foreseen(kill, outcome):
                problems.append(f"{kill}: {outcome}")
        print(number, kill, list(outcomes.values()), flush=True)
    for kind, found in sorted(counts.items()):
        print(f"{found:4} {kind}, {slowest[kind]:.1f} s at most")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phase", choices=PHASES, help="the only one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = run_all(given.times, given.seed, Path(temporary), [given.phase] if given.phase else PHASES)
    print("\n".join(found) or "no problems")
    raise SystemExit(bool(found))
