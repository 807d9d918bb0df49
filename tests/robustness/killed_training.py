"""Training jobs that the kernel kills at random moments.

`python -m tests.robustness.killed_training [--times N] [--seed N] [--folder DIR]`.

A job resumes or begins (`ot.restore_or_initialize`, from a source through a swap that must not be applied twice), then
saves step after step, asynchronously, until SIGKILL. What a job finds must be the newest step, at least the newest
that was acknowledged to the jobs before it, with the bits that this step has. A step is acknowledged when a later
`save`, or `wait_until_finished`, has returned. What a killed save leaves is Orbax's temporary directory, until the
next save of that step; a job that comes to its end finds none.

Jobs are forks of one process that has imported everything and computed nothing, so that each takes half a second.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.xla import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(2)

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten

# The attributes load their modules, once for all forks.
HANDLER, SAVE, RESTORE_OR_INITIALIZE = ot.TrainStateHandler, ot.args.TrainStateSave, ot.restore_or_initialize

_SHAPES = {"params/a": (256, 128), "params/b": (256, 128), "mu/a": (256, 128), "mu/b": (256, 128), "count": ()}
_SWAP = ot.transforms.Rename((("params/a", "params/b"), ("params/b", "params/a")))
_LIMIT_SECS = 800  # of a job that nobody kills
_MEASURED_STEPS = 4
_LAYOUTS = {"ocdbt": {}, "zarr": {"use_ocdbt": False}, "streamed": {}, "marked": {}}
_STREAMED = "mu/a"  # in the layout of this name, a lazy array of the source, and the same in each step
# What a job tells, in order; the moment of a kill is drawn from the time after one of these.
_PHASES = ("begun", "restored", "saving")


def source_values() -> dict[str, np.ndarray]:
    """What a run begins with: whole numbers, to which the number of a step is added without rounding."""
    numbers = np.random.default_rng(0)
    return {name: numbers.integers(-(2**20), 2**20, shape).astype(np.float32) for name, shape in _SHAPES.items()}


def state_of(step: int, values: dict[str, np.ndarray], frozen: str | None) -> dict[str, np.ndarray]:
    """The leaves of a step, by name; the frozen one stays as it is."""
    return {name: values[_swapped(name)] + np.float32(0 if name == frozen else step) for name in values}


def _swapped(name: str) -> str:
    """The name in the source of what has this name in the run: the moments follow their parameters."""
    return name[:-1] + {"a": "b", "b": "a"}[name[-1]] if name[-2:] in ("/a", "/b") else name


# -- a job: it runs in a fork, and tells what it does through a pipe


class Job:
    """One start of the job."""

    def __init__(self, folder: Path, layout: str, pipe: int):
        self._folder, self._layout, self._pipe = folder, layout, pipe
        self._frozen = _STREAMED if layout == "streamed" else None
        self._values = source_values()

    def tell(self, *words: object) -> None:
        """One line to the parent, at once."""
        os.write(self._pipe, (" ".join(map(str, words)) + "\n").encode())

    def run(self, steps: int | None) -> None:
        """Resumes and saves: `steps` of them, or until it is killed."""
        self.tell("begun")
        root = self._folder / self._layout
        # A step appears by its new name, or, written in place, by a file that marks it as finished.
        mode = ocp.options.AtomicityMode.COMMIT_FILE if self._layout == "marked" else ocp.options.AtomicityMode.AUTO
        options = ocp.CheckpointManagerOptions(max_to_keep=2, atomicity_options=ocp.options.AtomicityOptions(mode=mode))
        handler = HANDLER(**_LAYOUTS[self._layout])
        with (
            ot.open_checkpoint(self._folder / "source") as source,
            ocp.CheckpointManager(root, options=options, item_handlers=handler) as manager,
        ):
            step = self._resume(manager)
            last = None if steps is None else step + steps
            while step != last:
                step += 1
                state = self._state(step, source)
                self.tell("saving", step)
                manager.save(step, args=SAVE(state))
                self.tell("acknowledged", step - 1)
            manager.wait_until_finished()
            self.tell("acknowledged", step)
            left = [path.name for path in root.rglob("*") if ".orbax-checkpoint-tmp" in path.name]
            assert not left, f"left behind: {left}"

    def _resume(self, manager: ocp.CheckpointManager) -> int:
        everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("x",)), PartitionSpec())
        target = unflatten(
            {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=everywhere) for name, shape in _SHAPES.items()}
        )
        latest = manager.latest_step() or 0
        state, step, _ = RESTORE_OR_INITIALIZE(manager, target, init_from=self._folder / "source", transforms=_SWAP)
        flat = ot.state_utils.flatten_state_dict(state)
        for name, expected in state_of(step, self._values, self._frozen).items():
            assert np.asarray(flat[name]).tobytes() == expected.tobytes(), f"{name} of step {step} has other bits"
        assert step == latest, f"step {step} was restored, and the newest is {latest}"
        self.tell("restored", step)
        return step

    def _state(self, step: int, source: ot.Checkpoint):
        rows = NamedSharding(Mesh(np.asarray(jax.devices()), ("x",)), PartitionSpec("x"))
        flat = state_of(step, self._values, self._frozen)
        placed = {name: jax.device_put(value, rows) if value.shape else value for name, value in flat.items()}
        if self._frozen is not None:
            placed[self._frozen] = source.leaves[_swapped(self._frozen)]
        return unflatten(placed)


# -- the parent: it forks, listens and kills


def write_source(folder: Path) -> None:
    """Writes what runs begin with."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "source", unflatten(source_values()))


def fork(folder: Path, work: Callable[[int], None]) -> tuple[int, int]:
    """Runs something in a fork that tells through a pipe; its process, and the pipe's other end."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    os.close(reading)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        work(writing)
        os._exit(0)
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        os.write(writing, ("failed " + " ".join(text.split())[-2000:] + "\n").encode())
        os._exit(1)


class Moment(NamedTuple):
    """When a job is killed: so many seconds after it has told of a phase for the n-th time."""

    phase: str
    times: int
    seconds: float


def follow(process: int, pipe: int, kill: Moment | None) -> list[tuple[float, list[str]]]:
    """What a job tells until it ends, each line with its moment; kills it at one."""
    told: list[tuple[float, list[str]]] = []
    deadline, buffered = time.monotonic() + _LIMIT_SECS, b""
    killed_for = "hung"
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(process, signal.SIGKILL)
            told.append((time.monotonic(), [killed_for]))
            deadline = time.monotonic() + _LIMIT_SECS
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            told.append((time.monotonic(), line.decode().split()))
            if kill is not None and [words[0] for _, words in told].count(kill.phase) == kill.times:
                deadline, killed_for, kill = time.monotonic() + kill.seconds, "killed", None
    os.close(pipe)
    os.waitpid(process, 0)
    return told


class Kills:
    """Kills jobs of every layout in turn, and keeps account."""

    def __init__(self, folder: Path, seed: int):
        self._folder = folder
        self._moments = random.Random(seed)
        self._acknowledged = dict.fromkeys(_LAYOUTS, 0)
        self._windows = dict.fromkeys(_PHASES, 0.0)
        self.killed: collections.Counter[str] = collections.Counter()
        self.verified = 0
        self.problems: list[str] = []
        process, pipe = fork(folder, lambda _: write_source(folder))
        assert not follow(process, pipe, None), (folder / "log").read_text()[-4000:]

    def run(self, times: int) -> None:
        """So many kills; then each run is found whole once more."""
        for layout in _LAYOUTS:
            self._measure(layout)
        layouts = itertools.cycle(_LAYOUTS)
        while self.killed.total() < times and not self.problems:
            phase = self._moments.choice((*_PHASES, "saving"))
            seconds = self._moments.uniform(0, self._windows[phase])
            count = self._moments.randint(1, 3) if phase == "saving" else 1
            self._one(next(layouts), Moment(phase, count, seconds))
        for layout in _LAYOUTS:
            self._one(layout, None)

    def _measure(self, layout: str) -> None:
        """How long the phases last in a run that nobody kills."""
        told = self._one(layout, None)
        at = {words[0]: moment for moment, words in reversed(told)}
        saves = [moment for moment, words in told if words[0] == "saving"]
        lengths = {"begun": at["restored"] - at["begun"], "restored": saves[0] - at["restored"]}
        # Longer than a save: some are killed in the one after it.
        lengths["saving"] = 1.5 * (told[-1][0] - saves[0]) / len(saves)
        self._windows = {phase: max(self._windows[phase], lengths[phase]) for phase in _PHASES}

    def _one(self, layout: str, kill: Moment | None) -> list[tuple[float, list[str]]]:
        steps = _MEASURED_STEPS if kill is None else None
        process, pipe = fork(self._folder, lambda writing: Job(self._folder, layout, writing).run(steps))
        told = follow(process, pipe, kill)
        for _, (what, *words) in told:
            if what == "restored":
                self.verified += 1
                if int(words[0]) < self._acknowledged[layout]:
                    self.problems.append(f"{layout}: step {self._acknowledged[layout]} was lost, {words[0]} is left")
            elif what == "acknowledged":
                self._acknowledged[layout] = max(self._acknowledged[layout], int(words[0]))
            elif what in ("failed", "hung"):
                self.problems.append(f"{layout}: {what} {' '.join(words)}")
            elif what == "killed" and kill is not None:
                self.killed[kill.phase] += 1
        return told


def main() -> int:
    """Kills, and tells what was found; 1 where something was lost."""
    program = "python -m tests.robustness.killed_training"
    parser = argparse.ArgumentParser(prog=program, description="Kills training jobs.")
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=options.folder))
    kills = Kills(folder, options.seed)
    started = time.monotonic()
    kills.run(options.times)
    phases = ", ".join(f"{count} after {phase!r}" for phase, count in sorted(kills.killed.items()))
    print(f"{kills.killed.total()} kills ({phases}), {kills.verified} times whole, {time.monotonic() - started:.0f} s")
    for problem in kills.problems:
        print(problem)
    if kills.problems:
        print(f"see {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
