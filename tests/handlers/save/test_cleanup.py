"""Failed and interrupted saves leave no data behind, in both ways in which Orbax makes steps appear."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.handlers.save import cleanup
from orbax_t5x.handlers.type_handlers.checksums import SaveSums
from tests.support.saving import data_files, files

pytestmark = pytest.mark.slow

MODES = ocp.options.AtomicityMode.ATOMIC_RENAME, ocp.options.AtomicityMode.COMMIT_FILE
SAVE = ot.args.TrainStateSave

# Each case runs in a fork that has computed nothing before, and ends as a program does.
INTERRUPTED = """
import errno, os, resource, signal, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, orbax.checkpoint as ocp, orbax_t5x as ot
from etils import epath
from orbax_t5x.handlers.type_handlers.checksums import CopiedArray

folder, save = sys.argv[1], ot.args.TrainStateSave
signals = {"SIGINT": signal.default_int_handler, "SIGTERM": lambda *_: sys.exit(143)}
big = np.random.default_rng(0).integers(0, 255, (8, 1 << 20), np.uint8)


def interrupt(name):
    os.kill(os.getpid(), getattr(signal, name))


def run(name, place, is_async):
    signal.signal(getattr(signal, name), signals[name])
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async)
    root = f"{folder}/{name}-{place}-{is_async}"
    handler = ot.TrainStateHandler(checksums=place != "stock")
    manager = ocp.CheckpointManager(root, options=options, item_handlers=handler)
    manager.save(0, args=save({"a": np.ones(3)}))
    manager.wait_until_finished()
    ended = threading.Event()
    if place == "transforms":
        def transform(state, *_, **__):
            interrupt(name)
            return state
        args = save({"a": big}, transforms=transform)
    elif place in ("copies", "stock"):
        # Before Orbax has made the directories, which other threads of its wait for.
        copy, make = CopiedArray.of, type(epath.Path()).mkdir
        type(epath.Path()).mkdir = lambda *args, **kwargs: (time.sleep(0.5), make(*args, **kwargs))[1]
        if place == "copies":
            CopiedArray.of = lambda value: (copy(value), interrupt(name))[0]
        else:
            async def serialize(*_):
                interrupt(name)
            ocp.type_handlers.NumpyHandler.serialize = serialize
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
    for place in ("transforms", "copies", "stock", "stream"):
        for is_async in (True, False):
            status = forked(run, name, place, is_async)
            left = sorted(os.listdir(f"{folder}/{name}-{place}-{is_async}"))
            print(name, place, "async" if is_async else "sync", os.waitstatus_to_exitcode(status), *left, flush=True)
"""


def run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_interrupted_saves_leave_nothing_once_the_process_is_gone(tmp_path):
    printed = run(INTERRUPTED, tmp_path)
    places = [(place, how) for place in ("transforms", "copies", "stock", "stream") for how in ("async", "sync")]
    # Python ends by the signal where nobody handles a KeyboardInterrupt.
    codes = {"SIGINT": -2, "SIGTERM": 143}
    assert printed == [f"{name} {place} {how} {codes[name]} 0" for name in codes for place, how in places]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_failed_save_leaves_no_data_in_either_mode(tmp_path, monkeypatch, mode, is_async):
    handler = ot.TrainStateHandler()
    options = ocp.CheckpointManagerOptions(
        atomicity_options=ocp.options.AtomicityOptions(mode=mode), enable_async_checkpointing=is_async
    )

    def full(directory):
        raise OSError(28, "No space left on device", str(directory))

    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handler) as manager:
        manager.save(0, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        before = data_files(tmp_path)
        with pytest.raises(UnsupportedCheckpointError, match="is of type object"):
            manager.save(1, args=SAVE({"a": object()}))
        assert data_files(tmp_path) == before and [entry.name for entry in tmp_path.iterdir()] == ["0"]
        monkeypatch.setattr(handler._orbax, "finalize", full)
        with pytest.raises(CheckpointIOError, match="No space left"):
            manager.save(1, args=SAVE({"a": np.ones(2)}))
            manager.wait_until_finished()
        assert data_files(tmp_path) == before
        with ocp.CheckpointManager(tmp_path, options=options, item_handlers=ot.TrainStateHandler()) as another:
            assert another.all_steps() == [0]
        monkeypatch.undo()
        manager.save(1, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]


def test_a_failed_save_waits_for_the_metadata_that_mark_it(tmp_path, monkeypatch):
    """Orbax writes them in the background, and a save may fail before."""
    step = tmp_path / "1"
    (step / "default" / "d").mkdir(parents=True)
    (step / "default" / "d" / "data").write_bytes(b"data")
    looked = []

    def lacks_commit_time(folder):
        looked.append(folder)
        if len(looked) == 5:
            (step / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}')
        return read(folder)

    read = cleanup._lacks_commit_time
    monkeypatch.setattr(cleanup, "_lacks_commit_time", lacks_commit_time)
    monkeypatch.setattr(cleanup, "_unfinished", {})
    cleanup.note_begun(step / "default", in_background=True)
    cleanup.remove_failed(step / "default")
    assert data_files(tmp_path) == [] and len(looked) > 5


@pytest.mark.parametrize(("stage", "writes"), [("refused", 1), ("write", 1), ("finalize", 2)])
def test_a_failed_save_leaves_the_directory_that_orbax_still_describes(tmp_path, monkeypatch, stage, writes):
    """Orbax writes a step's metadata in a thread of its own, however late: the next save must not meet its error."""
    handler = ot.TrainStateHandler()
    place = type(epath.Path(tmp_path))
    write_text, late = place.write_text, []

    def write_late(path, *args, **kwargs):
        if threading.current_thread().name.startswith("metadata_store"):
            late.append(path.name)
            time.sleep(0.3)
        return write_text(path, *args, **kwargs)

    def full(directory, *args, **kwargs):
        raise OSError(28, "No space left on device", str(directory))

    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        before = data_files(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(place, "write_text", write_late)
            patched.setattr(*((handler._orbax, "finalize") if stage == "finalize" else (SaveSums, "encode")), full)
            leaf = object() if stage == "refused" else np.ones(2)
            with pytest.raises((CheckpointIOError, UnsupportedCheckpointError), match=r"No space left|type object"):
                manager.save(1, args=SAVE({"a": leaf}))
                manager.wait_until_finished()
            # A write that waits for the one before it may begin after the save has failed.
            guard = time.monotonic() + 300
            while len(late) < writes and time.monotonic() < guard:
                time.sleep(0.01)
        assert data_files(tmp_path) == before
        assert stage != "refused" or [entry.name for entry in tmp_path.iterdir()] == ["0"]
        manager.save(1, args=SAVE({"a": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        assert late == ["_CHECKPOINT_METADATA"] * writes


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


@pytest.mark.parametrize("name", ["run[0]", "[v2] run"])
def test_a_path_below_which_orbax_does_not_find_its_own_files_is_refused(tmp_path, name):
    """Stock Orbax ends such a save without an error, and nobody can read it."""
    root, tree = tmp_path / name, {"w": np.arange(4.0)}
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        with pytest.raises(UnsupportedCheckpointError, match="choose another path, or pass use_ocdbt=False"):
            manager.save(1, args=ot.args.TrainStateSave(tree))
            manager.wait_until_finished()
        assert manager.all_steps() == []
    handler = ot.TrainStateHandler(use_ocdbt=False)
    with ocp.CheckpointManager(root / "other", item_handlers=handler) as manager:
        manager.save(1, args=ot.args.TrainStateSave(tree))
        manager.wait_until_finished()
    np.testing.assert_array_equal(ot.restore(root / "other", tree)["w"], tree["w"])
    assert ot.verify(root / "other" / "1").status == "ok"
    with pytest.raises(UnsupportedCheckpointError, match="choose another path"):
        ot.convert(root / "other", root / "converted")
    assert not (root / "converted").exists() and ot.convert(root / "other", tmp_path / "converted").leaves == 1


def test_a_removal_that_never_begins_is_closed(monkeypatch, tmp_path):
    """Orbax begins it once the directories are made; where none come, it must not complain when it is collected."""
    begun = []

    class Never:
        def __init__(self, coroutine, name):
            begun.append(coroutine)

        def result(self, timeout):
            raise TimeoutError

    monkeypatch.setattr(cleanup, "CommitFuture", Never)
    cleanup.remove_failed_once_made(tmp_path / "step")
    with pytest.raises(RuntimeError, match="cannot reuse"):
        begun[0].send(None)
