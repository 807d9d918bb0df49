"""Kills conversions to a bucket at random moments and starts them again.

`python -m tests.robustness.killed_uploads --times 50`.

The server is moto in this process; each conversion is a process forked from one that has imported the package, and is
killed by SIGKILL. After each kill a reader of this package and plain copies of the bucket for other readers show what
is at the destination: the old checkpoint, the new one, or nothing that opens. The last start of each round is not
killed, and must end with equal bytes and no other object in the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

import orbax_t5x as ot
from tests.support.amazon_store import amazon_store
from tests.support.bundle_writer import bundle_of
from tests.support.kill_options import run_by_options

URL = "s3://bucket/models/c"
MARK = "models/.c.orbax-t5x-convert"
# Enough for several files of each format.
_LIMIT_BYTES = 1 << 20
_SOME_SECS = 1.0
_STARTS_PER_ROUND = 4
_SENDING_SECS = 0.4
OLD = {"old": np.arange(5, dtype=np.float32), "other": np.ones((300, 1024), np.float32)}


def arrays():
    rng = np.random.default_rng(0)
    return {f"leaf_{index:02}": rng.standard_normal((64, 512), np.float32) for index in range(12)}


# Imports once, then forks a conversion for each line; the child says when it begins.
_SERVER = """
import os, sys
import orbax_t5x as ot
import orbax_t5x.operations.convert.convert
print("ready", flush=True)
for line in sys.stdin:
    source, url, format, limit = line.split()
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        code = 1
        try:
            ot.convert(source, url, format=format, overwrite=True, memory_limit_bytes=int(limit))
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


def _is_running(child):
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return False
    return True


def is_sending(bucket):
    """Whether a conversion has named what it puts into the bucket, and has not ended."""
    try:
        return bool(json.loads(bucket.read(MARK))["names"])
    except bucket.client.exceptions.NoSuchKey:
        return False


def found_at(bucket, format):
    """What is at the destination: "old", "new" or None; anything else fails."""
    states = []
    try:
        states.append(_which(ot.restore(URL, None)))
    except ot.errors.CheckpointError:
        states.append(None)
    with tempfile.TemporaryDirectory() as copied:
        directory = bucket.download("models/c", Path(copied) / "c")
        try:
            if format == "orbax":
                states.append(_which(ocp.PyTreeCheckpointer().restore(directory)))
            else:
                states.append(_which(_by_index(directory)))
        except (OSError, ValueError, KeyError):
            states.append(None)
    return states


def _by_index(directory):
    """As Transformers reads: the one file, or those that the index names."""
    if (directory / "model.safetensors").exists():
        return safetensors.numpy.load_file(directory / "model.safetensors")
    files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: safetensors.numpy.load_file(directory / file)[name] for name, file in files.items()}
    for file in set(files.values()):
        assert safetensors.numpy.load_file(directory / file).keys() == {
            name for name, one in files.items() if one == file
        }
    return found


def _which(found):
    which, expected = ("old", OLD) if "old" in found else ("new", arrays())
    assert found.keys() == expected.keys(), sorted(found)
    for name, array in expected.items():
        assert np.array_equal(np.asarray(found[name]), array), name
    return which


class Conversions:
    """The process that forks conversions."""

    def __init__(self, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env={**os.environ, **environment, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self):
        return self._process.stdout.readline().strip()

    def run(self, source, format, kill_after=None, is_begun=lambda: True):
        """Converts; returns True if the kill came before the end, and how long it took.

        The time of the kill counts from when `is_begun` is true.
        """
        print(source, URL, format, _LIMIT_BYTES, file=self._process.stdin, flush=True)
        child, begun = int(self._line()), time.monotonic()
        if kill_after is not None:
            while not is_begun() and _is_running(child):
                time.sleep(0.002)
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)
        code = int(self._line().split()[1])
        assert code == (0 if kill_after is None else -signal.SIGKILL) or (kill_after is not None and code == 0), code
        return code != 0, time.monotonic() - begun

    def close(self):
        self._process.stdin.close()
        assert self._process.wait() == 0
        self._process.stdout.close()


def run(directory, times, seed):
    """Kills conversions `times` times.

    Returns:
      For each round: format, what was there first, kills, what was found after each.
    """
    moments = random.Random(seed)
    for name, values in {"source": arrays(), "old": OLD}.items():
        (directory / name).mkdir()
        bundle_of(values).write(directory / name)
    source, old = (directory / name / "model.ckpt-1" for name in ("source", "old"))
    (directory / "staging").mkdir()
    rounds, longest = [], {}
    with amazon_store() as bucket:
        environment = {**bucket.environment, "TMPDIR": str(directory / "staging")}
        os.environ.update(environment)
        conversions = Conversions(environment)
        try:
            while sum(one[2] for one in rounds) < times:
                format = ("orbax", "safetensors")[len(rounds) % 2]
                has_old = len(rounds) // 2 % 2 == 0
                bucket.remove(*bucket.names())
                if has_old:
                    _, longest[format] = conversions.run(old, format)
                kills, found = 0, []
                left = times - sum(one[2] for one in rounds)
                for _ in range(min(left, _STARTS_PER_ROUND)):
                    most = longest.get(format, _SOME_SECS)
                    # Half of them while the files are sent, which takes a part of the time.
                    if moments.random() < 0.5:
                        was_killed, _ = conversions.run(source, format, moments.uniform(0, 1.1 * most))
                    else:
                        moment = moments.uniform(0, _SENDING_SECS)
                        was_killed, _ = conversions.run(source, format, moment, lambda: is_sending(bucket))
                    kills += was_killed
                    states = found_at(bucket, format)
                    assert has_old or "old" not in states
                    found.append(states)
                _, longest[format] = conversions.run(source, format)
                assert found_at(bucket, format) == ["new", "new"]
                assert all(name.startswith("models/c/") for name in bucket.names())
                assert not list((directory / "staging").iterdir())
                rounds.append((format, has_old, kills, found))
                print(json.dumps(rounds[-1]), flush=True)
        finally:
            conversions.close()
    return rounds


if __name__ == "__main__":
    run_by_options(run, times=50)
