"""Kills conversions at random moments and starts them again.

`python -m tests.robustness.killed_conversions --times 100`.

The parent imports the package, and JAX without a backend, once; each conversion is a process forked from it. What
a killed conversion leaves is looked at after each kill, from outside: stock Orbax, or the format's own library, reads
the destination, which must be the old checkpoint or the new one. The last start of each round is not killed, and must
end with equal bytes and nothing beside them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.operations.convert.work_directory import work_directory_of
from tests.support.bundle_writer import bundle_of
from tests.support.kill_options import run_by_options

# How long a conversion takes, before one has been seen: kills come before, in and after it.
_SOME_SECS = 0.7
_PAUSE_SECS = 0.01
_LIMIT_BYTES = 4 << 20
_PATIENCE_SECS = 700.0
_STARTS_PER_ROUND = 4


def arrays():
    """What the source holds: the first leaf is read in several pieces."""
    rng = np.random.default_rng(0)
    large = {"large": rng.standard_normal((1024, 1024), np.float32)}
    return large | {f"small_{index:02}": rng.standard_normal((64, 512), np.float32) for index in range(16)}


OLD = {"old": np.arange(5, dtype=np.float32)}


def read(directory, format):
    """What stands at a destination, by somebody else's reader."""
    if format == "orbax":
        return ocp.PyTreeCheckpointer().restore(directory)
    return safetensors.numpy.load_file(directory / "model.safetensors")


def write_old(directory, format):
    if format == "orbax":
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(OLD))
    else:
        directory.mkdir()
        safetensors.numpy.save_file(OLD, directory / "model.safetensors")


def forked(function, *arguments):
    """Calls a function in a child; the child's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call(function, *arguments):
    """Calls a function in a child and waits; the parent itself never starts a JAX backend."""
    _, status = os.waitpid(forked(function, *arguments), 0)
    if status:
        raise AssertionError(f"{function.__name__}{arguments} failed")


def convert(source, destination, format):
    ot.convert(
        source,
        destination,
        format=format,
        overwrite=True,
        memory_limit_bytes=_LIMIT_BYTES,
        progress=lambda *_: time.sleep(_PAUSE_SECS),
    )


def check_whole(destination, format, is_new):
    """Fails unless the destination is the old checkpoint or the new one, bit for bit."""
    found = read(destination, format)
    expected = OLD if "old" in found and not is_new else arrays()
    assert found.keys() == expected.keys(), sorted(found)
    for name, array in expected.items():
        assert np.array_equal(np.asarray(found[name]), array), name


class Round:
    """One destination: some starts that are killed, then one that is not."""

    def __init__(self, root, source, format, moments, longest):
        root.mkdir()
        self.kills = 0
        self._destination = root / "c"
        self._source = source
        self._format = format
        self._moments = moments
        self._longest = longest
        call(write_old, self._destination, format)

    def run(self, starts):
        for _ in range(starts):
            self.kills += self._start(kill=True)
            call(check_whole, self._destination, self._format, False)
        self._start(kill=False)
        call(check_whole, self._destination, self._format, True)
        beside = sorted(path.name for path in self._destination.parent.iterdir())
        assert beside == [self._destination.name], beside

    def _start(self, *, kill):
        """Whether the conversion was killed before it ended."""
        child = forked(convert, self._source, self._destination, self._format)
        begun = time.monotonic()
        if kill:
            _wait_for(work_directory_of(self._destination), child)
            time.sleep(self._moments.uniform(0, self._longest.get(self._format, _SOME_SECS)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not kill:
            assert not status, status
            self._longest[self._format] = time.monotonic() - begun
        return bool(status)


def _wait_for(path, child):
    """Until a conversion has begun, or ended."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while not path.exists() and time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)


def run(directory, times, seed, *, formats=("orbax", "safetensors")):
    """Kills conversions `times` times.

    Returns:
      For each round: format and number of kills.
    """
    moments = random.Random(seed)
    (directory / "source").mkdir()
    source = bundle_of(arrays()).write(directory / "source")
    rounds, longest = [], {}
    while sum(kills for _, kills in rounds) < times:
        format = formats[len(rounds) % len(formats)]
        round = Round(directory / f"round_{len(rounds)}", source, format, moments, longest)
        round.run(min(times - sum(kills for _, kills in rounds), _STARTS_PER_ROUND))
        rounds.append((format, round.kills))
        print(json.dumps(rounds[-1]), flush=True)
    return rounds


if __name__ == "__main__":
    run_by_options(run, times=100)
