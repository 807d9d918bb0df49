"""Faults of the operating system: no descriptors left, stats that fail, a NUL in a path; and callbacks that raise."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError
from tests.support.bundle_writer import bundle_of

TREE = {"a": np.arange(5, dtype=np.float32), "b": np.ones((300, 30), np.float32)}


def bundle(directory: Path) -> Path:
    return bundle_of(TREE).write(directory)


def zarr(directory: Path) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave(TREE))
    return directory / "item"


SCARCE = """
import os, resource, sys
import orbax_t5x as ot
ot.restore(sys.argv[1], None)  # what is made once is there
last = os.open(os.devnull, os.O_RDONLY)
held = [last]
while held[-1] < last + 40:
    held.append(os.open(os.devnull, os.O_RDONLY))
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for spare in range(20):
    try:
        print(sorted(ot.restore(sys.argv[1], None)))
    except ot.errors.CheckpointIOError as error:
        print(error.errno)
    os.close(held.pop(0))
"""


@pytest.mark.parametrize("write", [bundle, zarr])
def test_with_any_number_of_descriptors_left_a_restore_works_or_says_so_and_leaks_none(write, tmp_path):
    arguments = [sys.executable, "-c", SCARCE, str(write(tmp_path))]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    failed = lines.count(str(errno.EMFILE))
    assert lines == [str(errno.EMFILE)] * failed + ["['a', 'b']"] * (20 - failed) and 1 <= failed < 15


FULL = """
import errno, resource, signal, sys
import orbax_t5x as ot
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with ot.open_checkpoint(sys.argv[1]) as checkpoint:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    try:
        ot.convert(checkpoint, sys.argv[2])
    except ot.errors.CheckpointIOError as error:
        print(errno.errorcode[error.errno])
"""


def test_several_writes_that_fail_together_are_one_error_and_no_complaints(tmp_path):
    """A limit on the size of files stands for a full disk; the writes that are cancelled fail, too."""
    noise = np.random.default_rng(0)
    source = bundle_of({f"a{i}": noise.random(1 << 17) for i in range(6)}).write(tmp_path)
    arguments = [sys.executable, "-c", FULL, str(source), str(tmp_path / "out")]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert (run.returncode, run.stdout) == (0, "EFBIG\n"), run.stderr[-2000:]
    assert "never retrieved" not in run.stderr and not (tmp_path / "out").exists()


# A process that may read everything gives that up: files without permissions are what the system refuses to open.
REFUSED = """
import ctypes, struct, sys
from pathlib import Path
assert ctypes.CDLL(None).capset(struct.pack("<II", 0x20080522, 0), bytes(24)) == 0
import orbax_t5x as ot

def errors(path):
    found = {}
    try:
        with ot.open_checkpoint(path) as checkpoint:
            for name, leaf in checkpoint.leaves.items():
                try:
                    leaf.get()
                except ot.errors.CheckpointIOError as error:
                    found[error.leaf] = error.errno
    except ot.errors.CheckpointIOError as error:
        found[None] = error.errno
    return found

path = Path(sys.argv[1])
for file in sorted(file for file in path.rglob("*") if file.is_file()):
    file.chmod(0)
    print(file.relative_to(path), errors(path))
    file.chmod(0o600)
"""


def zarr3(directory: Path) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave(TREE))
    return directory / "item"


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (zarr, {"a/.zarray": "a", "a/0": "a", "b/.zarray": "b", "b/0.0": "b", "_METADATA": None}),
        (zarr3, {"a/zarr.json": "a", "a/c/0": "a", "b/zarr.json": "b", "b/c/0/0": "b", "_METADATA": None}),
    ],
)
def test_a_file_that_may_not_be_opened_costs_its_leaf_and_says_why(write, expected, tmp_path):
    arguments = [sys.executable, "-c", REFUSED, str(write(tmp_path))]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    for file, leaf in expected.items():
        assert f"{file} { ({leaf: errno.EACCES}) }" in lines


@pytest.mark.parametrize("what", ["directory", "prefix", "index"])
def test_an_index_that_cannot_be_looked_at_is_no_missing_one(what, tmp_path, monkeypatch):
    prefix = bundle(tmp_path)
    lstat = os.lstat

    def broken(path, *arguments, **keywords):
        if str(path).endswith(".index"):
            raise OSError(errno.EIO, "Input/output error")
        return lstat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "lstat", broken)
    paths = {"directory": tmp_path, "prefix": prefix, "index": f"{prefix}.index"}
    with pytest.raises(CheckpointIOError) as caught:
        ot.open_checkpoint(paths[what], format="tf_bundle")
    assert caught.value.errno == errno.EIO and ".index" in (caught.value.path or "")


@pytest.mark.parametrize("format", [None, "tf_bundle", "orbax", "t5x", "safetensors", "flax_msgpack"])
def test_a_path_with_a_nul_is_not_found(format):
    with pytest.raises(CheckpointNotFoundError, match="holds a NUL"):
        ot.open_checkpoint("a\0b", format=format)


def test_a_destination_with_a_nul_is_not_written(tmp_path):
    with pytest.raises(CheckpointIOError, match="contains a NUL byte") as caught:
        ot.convert(bundle(tmp_path), f"{tmp_path}/a\0b")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("write", [bundle, zarr])
@pytest.mark.parametrize("kind", [RuntimeError, KeyError, ValueError, OSError])
def test_what_progress_raises_leaves_as_it_is(write, kind, tmp_path, capfd):
    path = write(tmp_path)
    mine = kind("mine")

    def progress(done, total, leaf):
        raise mine

    for call in (
        lambda: ot.restore(path, None, progress=progress),
        lambda: ot.convert(path, tmp_path / "out", progress=progress),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value is mine
    assert not (tmp_path / "out").exists()
    assert "never retrieved" not in capfd.readouterr().err
