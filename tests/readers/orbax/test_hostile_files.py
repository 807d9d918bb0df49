"""Files of zarr arrays that are missing, replaced, linked, cut or no files at all."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError, CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from tests.support.orbax_items import files_of, outcome, right_or

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.slow
def test_what_the_operating_system_refuses(item):
    """Out of descriptors is no damage: a typed OSError with its number, naming the leaf."""
    path = item(ocdbt=False)
    code = (
        "import resource, orbax_t5x as ot\n"
        f"with ot.open_checkpoint({str(path)!r}) as checkpoint:\n"
        "    checkpoint.leaves['b/c'].get()\n"
        "    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))\n"
        "    try:\n"
        "        checkpoint.leaves['a'].get()\n"
        "    except ot.errors.CheckpointIOError as error:\n"
        "        print(error.errno, error.leaf, error.path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert done.stdout.split() == [str(errno.EMFILE), "a", str(path / "a")], done.stderr


def test_a_directory_that_vanishes(item):
    path = item(ocdbt=False)
    with ot.open_checkpoint(path) as checkpoint:
        shutil.rmtree(path)
        with pytest.raises(CheckpointGoneError) as caught:
            checkpoint.leaves["a"].get()
        assert (caught.value.leaf, caught.value.path) == ("a", str(path / "a"))


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, False), (False, False), (False, True)])
def test_deleted_while_it_is_opened(item, ocdbt, zarr3):
    """Deletion by whoever keeps only the newest steps, at any moment: right values, or an error that says so."""
    for done in range(0, 12):
        path = item(ocdbt=ocdbt, zarr3=zarr3)
        for file in files_of(path)[:done]:
            os.remove(file)
        kinds = (CheckpointGoneError, CorruptCheckpointError, CheckpointNotFoundError)
        right_or(kinds, outcome(path))


def test_a_step_linked_from_outside(item, tmp_path):
    """A root is what the caller named; its newest step is not."""
    outside = item(to="elsewhere/state").parent
    root = tmp_path / "root"
    root.mkdir()
    (root / "3").symlink_to(outside)
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(root)
    assert not right_or((), outcome(root / "3")), "by its own path it is what the caller named"
    shutil.move(outside, root / "kept")
    (root / "3").unlink()
    (root / "3").symlink_to("kept")
    assert not right_or((), outcome(root)), "a link that stays inside"
