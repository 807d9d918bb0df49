"""What is left of saves that fail or are interrupted, in both ways in which Orbax makes steps appear: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError

MODES = ocp.options.AtomicityMode.ATOMIC_RENAME, ocp.options.AtomicityMode.COMMIT_FILE
SAVE = ot.args.TrainStateSave

# Each case runs in a fork that has computed nothing before, and ends as a program does.
INTERRUPTED = """
import errno, os, resource, signal, sys, threading
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, orbax.checkpoint as ocp, orbax_t5x as ot
from orbax_t5x.handlers.checksums import CopiedArray

folder, save = sys.argv[1], ot.args.TrainStateSave
signals = {"SIGINT": signal.default_int_handler, "SIGTERM": lambda *_: sys.exit(143)}
big = np.random.default_rng(0).integers(0, 255, (8, 1 << 20), np.uint8)


def interrupt(name):
    os.kill(os.getpid(), getattr(signal, name))


def run(name, place, is_async):
    signal.signal(getattr(signal, name), signals[name])
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async)
    root = f"{folder}/{name}-{place}-{is_async}"
    manager = ocp.CheckpointManager(root, options=options, item_handlers=ot.TrainStateHandler())
    manager.save(0, args=save({"a": np.ones(3)}))
    manager.wait_until_finished()
    ended = threading.Event()
    if place == "transforms":
        def transform(state, *_, **__):
            interrupt(name)
            return state
        args = save({"a": big}, transforms=transform)
    elif place == "copies":
        copy = CopiedArray.of
        CopiedArray.of = lambda value: (copy(value), interrupt(name))[0]
        args = save({"a": big})
    else:
        first = iter([name])
        def progress(*_):
            for once in first:
                interrupt(once)
            if is_async:
                ended.wait()
        leaf = ot.open_checkpoint(folder + "/source").leaves["a"]
        args = save({"a": leaf}, memory_limit_bytes=1 << 22, progress=progress)
    try:
        manager.save(1, args=args)
        manager.wait_until_finished()
    finally:
        ended.set()


def forked(work, *arguments):
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    work(*arguments)
    sys.exit(0)


forked(lambda: ocp.PyTreeCheckpointer().save(folder + "/source", {"a": big}))
for name in signals:
    for place in ("transforms", "copies", "stream"):
        for is_async in (True, False):
            status = forked(run, name, place, is_async)
            left = sorted(os.listdir(f"{folder}/{name}-{place}-{is_async}"))
            print(name, place, "async" if is_async else "sync", os.waitstatus_to_exitcode(status), *left, flush=True)
"""


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_interrupted_saves_leave_nothing_once_the_process_is_gone(tmp_path):
    printed = run(INTERRUPTED, tmp_path)
    places = [(place, how) for place in ("transforms", "copies", "stream") for how in ("async", "sync")]
    # Python ends by the signal where nobody handles a KeyboardInterrupt.
    codes = {"SIGINT": -2, "SIGTERM": 143}
    assert printed == [f"{name} {place} {how} {codes[name]} 0" for name in codes for place, how in places]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_failed_save_leaves_nothing_in_either_mode(tmp_path, monkeypatch, mode, is_async):
    handler = ot.TrainStateHandler()
    options = ocp.CheckpointManagerOptions(
        atomicity_options=ocp.options.AtomicityOptions(mode=mode), enable_async_checkpointing=is_async
    )

    def full(directory):
        raise OSError(28, "No space left on device", str(directory))

    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handler) as manager:
        manager.save(0, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        before = files(tmp_path)
        with pytest.raises(UnsupportedCheckpointError, match="is a object"):
            manager.save(1, args=SAVE({"a": object()}))
        assert files(tmp_path) == before
        monkeypatch.setattr(handler._orbax, "finalize", full)
        with pytest.raises(CheckpointIOError, match="No space left"):
            manager.save(1, args=SAVE({"a": np.ones(2)}))
            manager.wait_until_finished()
        assert files(tmp_path) == before
        monkeypatch.undo()
        manager.save(1, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]


@pytest.mark.parametrize("is_direct", [True, False], ids=["checkpointer", "handler"])
def test_a_failed_save_leaves_what_others_finished(tmp_path, is_direct):
    """A finished step, and a directory that Orbax did not make, are never taken away."""
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=SAVE({"a": np.ones(2)}))
    (tmp_path / "root" / "0" / "other").mkdir()
    before = files(tmp_path)
    with pytest.raises(UnsupportedCheckpointError):
        if is_direct:
            ocp.Checkpointer(ot.TrainStateHandler()).save(tmp_path / "root" / "0" / "more", args=SAVE({"a": object()}))
        else:
            ot.TrainStateHandler().save(tmp_path / "root" / "0" / "other", args=SAVE({"a": object()}))
    assert files(tmp_path) == before
