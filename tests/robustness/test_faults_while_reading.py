"""Faults while a checkpoint is read: a shard that fails, short reads, a checkpoint that is removed, little memory."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointIOError
from orbax_t5x.files import local_file
from tests.support.bundle_writer import Bundle
from tests.support.checkpoint_writers import WRITERS

_RNG = np.random.default_rng(0)
ARRAYS = {"a": _RNG.random((40, 8), np.float32), "b": _RNG.random((30, 8), np.float32)}


def bundle(directory: Path) -> dict[str, Path]:
    """Two shards, one for each leaf, as the file of each leaf."""
    written = Bundle(2)
    for shard, (name, array) in enumerate(ARRAYS.items()):
        written.add(name, array, shard)
    prefix = written.write(directory)
    return {name: Path(f"{prefix}.data-{shard:05d}-of-00002") for shard, name in enumerate(ARRAYS)}


def shards(directory: Path) -> dict[str, Path]:
    """Safetensors with an index, as the Hugging Face hub has them."""
    paths = {name: directory / f"model-{name}.safetensors" for name in ARRAYS}
    for name, path in paths.items():
        safetensors.numpy.save_file({name: ARRAYS[name]}, path)
    index = {"weight_map": {name: path.name for name, path in paths.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def one_file(directory: Path) -> dict[str, Path]:
    (directory / "msgpack").write_bytes(flax.serialization.msgpack_serialize(ARRAYS))
    return dict.fromkeys(ARRAYS, directory / "msgpack")


class FaultyOs:
    """The module `os` as files are read with it; reads of some file fail, or are short."""

    def __init__(self, failing: Path | None = None, most_bytes: int | None = None):
        self._failing = None if failing is None else os.stat(failing).st_ino
        self._most_bytes = most_bytes
        self.faults = 0

    def __getattr__(self, name: str):
        return getattr(os, name)

    def preadv(self, fd, buffers, offset):
        if os.fstat(fd).st_ino == self._failing:
            self.faults += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._most_bytes is not None:
            self.faults += 1
            buffers = [buffers[0].reshape(-1).view(np.uint8)[: self._most_bytes]]
        return os.preadv(fd, buffers, offset)


@pytest.mark.parametrize("write", [bundle, shards])
@pytest.mark.parametrize("bad", list(ARRAYS))
def test_a_shard_that_fails_costs_its_leaves_alone(write, bad, tmp_path, monkeypatch):
    paths = write(tmp_path)
    (good,) = ARRAYS.keys() - {bad}
    with ot.open_checkpoint(tmp_path) as checkpoint:
        monkeypatch.setattr(local_file, "os", FaultyOs(failing=paths[bad]))
        with pytest.raises(CheckpointIOError) as caught:
            ot.restore(checkpoint, None)
        assert (caught.value.errno, caught.value.leaf, caught.value.path) == (errno.EIO, bad, str(paths[bad]))
        target = {good: jax.ShapeDtypeStruct(ARRAYS[good].shape, np.float32)}
        np.testing.assert_array_equal(ot.restore(checkpoint, target, strict=False)[good], ARRAYS[good])
        monkeypatch.undo()
        np.testing.assert_array_equal(ot.restore(checkpoint, None)[bad], ARRAYS[bad])


@pytest.mark.parametrize("write", [bundle, shards, one_file])
@pytest.mark.parametrize("most_bytes", [1, 7, 1000])
def test_short_reads_fill_everything(write, most_bytes, tmp_path, monkeypatch):
    faulty = FaultyOs(most_bytes=most_bytes)
    write(tmp_path)
    path = tmp_path / "msgpack" if write is one_file else tmp_path
    monkeypatch.setattr(local_file, "os", faulty)
    state = ot.restore(path, None)
    assert faulty.faults > sum(array.nbytes for array in ARRAYS.values()) // most_bytes
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(state[name], array)


class Remover(threading.Thread):
    """Removes a directory as soon as it is told to, beside whatever goes on."""

    def __init__(self, directory: Path):
        super().__init__()
        self.now = threading.Event()
        self._directory = directory

    def run(self) -> None:
        self.now.wait(60)
        shutil.rmtree(self._directory)


def restored(path: Path, moment: str, remover: Remover):
    """Restores while, from some moment on, the checkpoint is removed; None where it is gone."""
    if moment == "opening":
        remover.now.set()
    try:
        with ot.open_checkpoint(path) as checkpoint:
            if moment == "planning":
                remover.now.set()
            plan = ot.plan_restore(checkpoint, None)
            if moment == "reading":
                remover.now.set()
            return plan.execute(progress=lambda *_: remover.now.set())
    except CheckpointGoneError:
        return None
    except CheckpointError:
        # What is half removed before it was opened is no checkpoint, and nothing tells since when.
        assert moment == "opening"
        return None


@pytest.mark.parametrize("moment", ["opening", "planning", "reading", "first leaf"])
@pytest.mark.parametrize("format", sorted(WRITERS))
def test_a_checkpoint_that_is_removed_meanwhile(format, moment, tmp_path):
    """Right values, or gone; never zeros, never another error."""
    arrays = {f"{name}{i}": array + i for i in range(4) for name, array in ARRAYS.items()}
    (tmp_path / "written").mkdir()
    written = WRITERS[format](tmp_path / "written", arrays)
    for number in range(4):
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "written", place)
        remover = Remover(place)
        remover.start()
        try:
            state = restored(place / written.relative_to(tmp_path / "written"), moment, remover)
        finally:
            remover.now.set()
            remover.join()
        if state is not None:
            assert state.keys() == arrays.keys()
            for name, array in arrays.items():
                np.testing.assert_array_equal(state[name], array)


SCARCE = """
import json, resource, sys
import numpy as np
import orbax_t5x as ot
large, target = sys.argv[1], {"small": np.zeros(6, np.float32)}
print(ot.restore(large, target, strict=False)["small"].tolist())  # what is made once is there
before = ot.open_checkpoint(large)
with open("/proc/self/status") as file:
    used = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
for read in (
    lambda: ot.restore(large, None),
    lambda: ot.open_checkpoint(large).leaves["large"].get(),
    lambda: before.leaves["large"][:int(sys.argv[2])].get(),
    lambda: ot.open_checkpoint(large).leaves["large"][:int(sys.argv[2])].get(),
):
    try:
        read()
    except ot.errors.LimitExceededError as error:
        print(error.leaf)
print(ot.restore(large, target, strict=False)["small"].tolist())
"""


@pytest.mark.parametrize("format", ["safetensors", "zarr"])
def test_an_array_for_which_no_address_space_is_left_is_a_limit_and_others_are_read(format, tmp_path):
    """What is left is less than the array, the limit alone is more."""
    small = np.arange(6, dtype=np.float32)
    if format == "safetensors":
        path = tmp_path / "model.safetensors"
        shape = 1 << 30
        header = json.dumps(
            {
                "small": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]},
                "large": {"dtype": "U8", "shape": [shape], "data_offsets": [24, 24 + shape]},
            }
        ).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + small.tobytes())
        os.truncate(path, 8 + len(header) + 24 + shape)
    else:
        path = WRITERS["zarr"](tmp_path, {"small": small, "large": np.zeros(7, np.uint8)})
        said = json.loads((path / "large" / ".zarray").read_text())
        (path / "large" / ".zarray").write_text(json.dumps(said | {"shape": [1 << 30], "chunks": [1 << 30]}))
        os.truncate(path / "large" / "0", 1 << 30)
    # One element of a chunk takes the whole chunk; of a file, nothing but itself.
    part = 1 << 30 if format == "safetensors" else 1
    arguments = [sys.executable, "-c", SCARCE, str(path), str(part)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    values = str(small.tolist())
    assert run.stdout.splitlines() == [values, *["large"] * 4, values]
