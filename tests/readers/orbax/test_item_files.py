"""Files of an Orbax item: special files and links."""

import os
import shutil

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from tests.support.orbax_items import outcome, right_or

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize("kind", ["fifo", "directory", "link out", "dangling", "circle", "device"])
@pytest.mark.parametrize("victim", ["a/.zarray", "a/0.0", "a/zarr.json", "a/c/0/0", "a", "manifest.ocdbt", "_METADATA"])
def test_what_is_no_plain_file(item, tmp_path, kind, victim):
    zarr3 = victim in ("a/zarr.json", "a/c/0/0")
    path = item(ocdbt=victim == "manifest.ocdbt", zarr3=zarr3)
    place = path / victim
    outside = tmp_path / "outside"
    shutil.move(place, outside)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(
            {"link out": outside, "dangling": "nowhere", "circle": place.name, "device": "/dev/zero"}[kind]
        )
    result = outcome(path)
    wrong = right_or((UnsafeCheckpointError, CorruptCheckpointError, CheckpointNotFoundError), result)
    if victim in ("_METADATA", "manifest.ocdbt"):
        assert wrong == {None}
    else:
        assert wrong == {"a"}, "the other leaves can be read"
    if kind == "link out":
        assert isinstance(result[wrong.pop()], UnsafeCheckpointError)


def test_links_inside_are_followed(item):
    path = item(ocdbt=False)
    shutil.move(path / "a", path / "elsewhere")
    (path / "a").symlink_to("elsewhere")
    shutil.move(path / "b.c" / "0.0", path / "chunk")
    (path / "b.c" / "0.0").symlink_to(path / "chunk")
    assert not right_or((), outcome(path))


def test_a_data_file_linked_from_outside(item, tmp_path):
    path = item()
    (node,) = os.listdir(path / "d")
    shutil.move(path / "d" / node, tmp_path / "outside")
    (path / "d" / node).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(path)
