"""Files that change between opening, planning and reading: right values or CheckpointGoneError, never other bytes."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointGoneError
from orbax_t5x.files.interface import Snapshot
from tests.support.checkpoint_writers import WRITERS, orbax_writer

ARRAYS = {name: np.random.default_rng(seed).random((16, 8), np.float32) for seed, name in enumerate("ab")}
OTHERS = {name: -array for name, array in ARRAYS.items()}
NOT_READ_AGAIN = (".index", "_METADATA", "_sharding", "checkpoint", "_CHECKPOINT_METADATA")


def data_files(directory: Path) -> list[Path]:
    """The files whose bytes a read of arrays may need."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and "array_metadatas" not in path.parts]
    return [path for path in files if not path.name.endswith(NOT_READ_AGAIN)]


def overwritten(path: Path) -> None:
    """In place, with other bytes of the same number."""
    data = bytes(byte ^ 0x55 for byte in path.read_bytes())
    with open(path, "r+b") as file:
        file.write(data)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """By rename, with a file of the same size and modification time."""
    found = path.stat()
    other = path.with_name(f"{path.name}.other")
    other.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


CHANGES = [overwritten, truncated, grown, replaced, removed]
KEEPS_OPEN_FILES = (replaced, removed)


@pytest.fixture(params=sorted(WRITERS))
def written(request, tmp_path) -> Path:
    """A checkpoint of each format, written a while ago: a file system's clock may stand still for some milliseconds."""
    path = WRITERS[request.param](tmp_path, ARRAYS)
    for file in tmp_path.rglob("*"):
        os.utime(file, ns=(1_700_000_000 * 10**9, 1_700_000_000 * 10**9))
    return path


def restored(plan) -> dict[str, np.ndarray] | None:
    """What a plan restores; None where the checkpoint is gone."""
    try:
        state = plan.execute()
    except CheckpointGoneError as error:
        assert error.path
        return None
    return {name: np.asarray(value) for name, value in state.items()}


def is_unharmed(state) -> bool:
    return all(np.array_equal(state[name], array) for name, array in ARRAYS.items())


TARGET = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in ARRAYS.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_between_plan_and_execute(written, tmp_path, change):
    """Every data file changes, none of which has been read: gone, except where the file is held open."""
    with ot.open_checkpoint(written) as checkpoint:
        plan = ot.plan_restore(checkpoint, TARGET)
        for path in data_files(tmp_path):
            change(path)
        state = restored(plan)
        if checkpoint.format == "safetensors" and change in KEEPS_OPEN_FILES:
            assert state is not None and is_unharmed(state), "its header was read from the file that is held open"
        else:
            assert state is None


@pytest.mark.parametrize("change", CHANGES)
def test_between_two_executions(written, tmp_path, change):
    """The same after everything was read once."""
    with ot.open_checkpoint(written) as checkpoint:
        plan = ot.plan_restore(checkpoint, TARGET)
        state = restored(plan)
        assert state is not None and is_unharmed(state)
        for path in data_files(tmp_path):
            change(path)
        state = restored(plan)
        if checkpoint.format != "orbax" and change in KEEPS_OPEN_FILES:
            assert state is not None and is_unharmed(state), "its files are held open"
        else:
            assert state is None


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_one_file_at_a_time(tmp_path, change):
    """Whichever file of whichever format changes: unharmed values, or gone."""
    for name, write in WRITERS.items():
        directory = tmp_path / name
        directory.mkdir()
        write(directory, ARRAYS)
        count = len(data_files(directory))
        assert count
        for number in range(count):
            place = tmp_path / f"{name}-{number}"
            place.mkdir()
            path = write(place, ARRAYS)
            files = data_files(place)
            for file in files:
                os.utime(file, ns=(10**18, 10**18))
            with ot.open_checkpoint(path) as checkpoint:
                plan = ot.plan_restore(checkpoint, TARGET)
                changed = files[min(number, len(files) - 1)]  # a database has not always as many
                change(changed)
                state = restored(plan)
                assert state is None or is_unharmed(state), (name, changed)


def test_a_checkpoint_copied_over_in_place(written, tmp_path):
    """What `cp -r other/. here/` leaves: files of the same names and sizes with other tensors."""
    other = tmp_path / "other"
    other.mkdir()
    with ot.open_checkpoint(written) as checkpoint:
        plan = ot.plan_restore(checkpoint, TARGET)
        write = WRITERS["tf_bundle" if checkpoint.format == "tf_bundle" else "safetensors"]
        if checkpoint.format == "orbax":
            for path in data_files(written):
                path.write_bytes(path.read_bytes())  # the very same bytes: even these are not looked at
        else:
            write(other, OTHERS)
            for path in data_files(other):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        assert restored(plan) is None


def test_a_view_read_by_itself(written, tmp_path):
    with ot.open_checkpoint(written) as checkpoint:
        view = checkpoint.leaves["a"]
        np.testing.assert_array_equal(view.get(), ARRAYS["a"])
        for path in data_files(tmp_path):
            overwritten(path)
        with pytest.raises(CheckpointGoneError) as caught:
            view.get()
        assert caught.value.leaf == "a" and caught.value.path


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_a_fifo_put_in_the_place_of_a_file(tmp_path, ocdbt, zarr3):
    """TensorStore would wait for a writer for ever."""
    path = orbax_writer(ocdbt=ocdbt, zarr3=zarr3)(tmp_path, ARRAYS)
    with ot.open_checkpoint(path) as checkpoint:
        for file in data_files(path):
            file.unlink()
            os.mkfifo(file)
        with pytest.raises(CheckpointError, match=r"regular file|FIFO"):
            checkpoint.leaves["a"].get()


@pytest.mark.parametrize("size", [6, 1 << 20])
@pytest.mark.parametrize("removed", ["0", "."])
def test_what_is_removed_after_the_look_before_reading_is_gone(tmp_path, monkeypatch, size, removed):
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": np.arange(size, dtype=np.float32)})
    look = Snapshot.check_unchanged

    def look_and_remove(self, *, leaf=None):
        look(self, leaf=leaf)
        path = tmp_path / "item" / "w" / removed
        shutil.rmtree(path.resolve(), ignore_errors=True) if removed == "." else path.unlink(missing_ok=True)

    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        monkeypatch.setattr(Snapshot, "check_unchanged", look_and_remove)
        with pytest.raises(CheckpointGoneError) as caught:
            checkpoint.leaves["w"].get()
    assert caught.value.leaf == "w"
