"""Kills conversions at random moments and starts them again.

`python -m tests.robustness.killed_conversions --times 100`.

The parent imports the package, and JAX without a backend, once; each conversion runs in processes forked from it. What
a killed conversion leaves is looked at after each kill, from outside: stock Orbax, or the format's own library, reads
the destination, which must be the old checkpoint or the new one. The last start of each round is not killed, and must
end with equal bytes and nothing beside them. Over all starts, no more is read twice than was on its way when they were
killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.operations.convert.work_directory import work_directory_of
from tests.support.bundle_writer import bundle_of
from tests.support.kill_options import run_by_options

# How long a conversion takes, before one has been seen: kills come before, in and after it.
_SOME_SECS = 0.7
_PAUSE_SECS = 0.01
_LIMIT_BYTES = 4 << 20
# What is on its way in a process under that limit: a quarter of it, and what is read beyond a piece's own bytes.
_IN_FLIGHT_BYTES = 1 << 20
_PATIENCE_SECS = 700.0
_STARTS_PER_ROUND = 4


def arrays():
    """What the source holds: the first leaf is larger than a process's share, and read in several pieces."""
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


def convert(source, destination, format, told, index, count, port):
    """One process of a conversion; notes what it reads, and what it kept."""
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, index, initialization_timeout=900)
    counted = ReadStats.count
    reads = os.open(told / "reads", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def count_reads(self, bytes_read, *others, **more):
        if self.execution is self:  # parts count for the whole again
            os.write(reads, b"%d\n" % bytes_read)
        counted(self, bytes_read, *others, **more)

    ReadStats.count = count_reads
    report = ot.convert(
        source,
        destination,
        format=format,
        overwrite=True,
        memory_limit_bytes=_LIMIT_BYTES,
        progress=lambda *_: time.sleep(_PAUSE_SECS),
    )
    if index == 0:
        (told / "report").write_text(json.dumps([report.kept_bytes, report.bytes]))
    if count > 1:
        jax.distributed.shutdown()  # the end of the first process ends the others


def check_whole(destination, format, is_new):
    """Fails unless the destination is the old checkpoint or the new one, bit for bit."""
    found = read(destination, format)
    expected = OLD if "old" in found and not is_new else arrays()
    assert found.keys() == expected.keys(), sorted(found)
    for name, array in expected.items():
        assert np.array_equal(np.asarray(found[name]), array), name


class Round:
    """One destination: some starts that are killed, then one that is not."""

    def __init__(self, root, source, format, count, moments, longest):
        self.told = root / "told"
        self.told.mkdir(parents=True)
        self.kills = self.completed = 0
        self._destination = root / "out" / "c"
        self._source = source
        self._format = format
        self._count = count
        self._moments = moments
        self._longest = longest
        self._destination.parent.mkdir()
        call(write_old, self._destination, format)

    def run(self, starts):
        for _ in range(starts):
            self.kills += self._start(kill=True)
            call(check_whole, self._destination, self._format, False)
        self._start(kill=False)
        call(check_whole, self._destination, self._format, True)
        beside = sorted(path.name for path in self._destination.parent.iterdir())
        assert beside == [self._destination.name], beside
        return self._check_reads()

    def _start(self, *, kill):
        """Whether the conversion was killed before it ended."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        shared = (self._source, self._destination, self._format, self.told)
        before = _identity(self._destination)
        children = [forked(convert, *shared, index, self._count, port) for index in range(self._count)]
        # Several processes take some seconds to find each other.
        _wait_for(work_directory_of(self._destination), children)
        if not kill:
            begun = time.monotonic()
            statuses = [os.waitpid(child, 0)[1] for child in children]
            assert not any(statuses), statuses
            self.completed += 1
            self._longest[self._format, self._count] = time.monotonic() - begun
            return False
        time.sleep(self._moments.uniform(0, self._longest.get((self._format, self._count), _SOME_SECS)))
        victims = children if self._moments.random() < 0.5 else [self._moments.choice(children)]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        # Who is left alone is ended by an error, or by JAX; not waited for in every round.
        statuses = []
        for child in children:
            if child not in victims:
                _kill_after(child, 1.0)
            statuses.append(os.waitpid(child, 0)[1])
        self.completed += _identity(self._destination) != before
        return any(statuses)

    def _check_reads(self):
        """Compares what all starts have read; what the last one told of what it kept."""
        read_bytes = sum(map(int, (self.told / "reads").read_text().split()))
        kept, total = json.loads((self.told / "report").read_text())
        redone = read_bytes - self.completed * total
        assert redone <= self.kills * self._count * _IN_FLIGHT_BYTES, (redone, self.kills, self.completed)
        return kept, redone


def _identity(directory):
    found = directory.stat()
    return found.st_ino, found.st_mtime_ns  # a number alone may be given anew


def _wait_for(path, children):
    """Until a conversion has begun, or ended."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while not path.exists() and time.monotonic() < deadline:
        if all(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            return
        time.sleep(0.005)


def _kill_after(child, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)


def run(directory, times, seed, *, formats=("orbax", "safetensors"), counts=(1, 2)):
    """Kills conversions `times` times.

    Returns:
      For each round: format, number of processes, kills, bytes that the last start kept, bytes that were redone.
    """
    moments = random.Random(seed)
    (directory / "source").mkdir()
    source = bundle_of(arrays()).write(directory / "source")
    told, longest = [], {}
    while sum(one[2] for one in told) < times:
        format, count = formats[len(told) % len(formats)], counts[len(told) // len(formats) % len(counts)]
        round = Round(directory / f"round_{len(told)}", source, format, count, moments, longest)
        left = times - sum(one[2] for one in told)
        kept_and_redone = round.run(min(left, _STARTS_PER_ROUND))
        told.append((format, count, round.kills, *kept_and_redone))
        print(json.dumps(told[-1]), flush=True)
    return told


if __name__ == "__main__":
    run_by_options(run, times=100)
