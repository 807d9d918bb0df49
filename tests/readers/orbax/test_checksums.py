"""The file of checksums beside an item: damaged, hostile, of another tree."""

import json
import shutil

import google_crc32c
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.readers.orbax.checksums import encode_checksums, parse_checksums
from orbax_t5x.readers.orbax.metadata import CHECKSUMS_FILE
from tests.support.saving import save


def restored(path, verify="touched", target=None, **keywords):
    plan = ot.plan_restore(path, target, **keywords)
    return plan.execute(verify=verify), plan.report


def test_checksums_of_another_tree_are_an_error_that_names_both(tmp_path):
    path = save(tmp_path / "item", {"mine": np.ones(3), "both": np.ones(3)})
    other = save(tmp_path / "other", {"theirs": np.ones(3), "both": np.ones(3)})
    shutil.copy(other / CHECKSUMS_FILE, path)
    with pytest.raises(
        CorruptCheckpointError, match=r"another tree: they name 'theirs'.*; the item has 'mine'"
    ) as caught:
        restored(path)
    assert caught.value.path == str(path / CHECKSUMS_FILE)
    np.testing.assert_array_equal(restored(path, "off")[0]["mine"], 1)


def test_checksums_of_another_shape_or_dtype_are_an_error_that_names_both(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones((2, 3), np.float32)})
    other = save(tmp_path / "other", {"a": np.ones((3, 2), np.int32)})
    shutil.copy(other / CHECKSUMS_FILE, path)
    with pytest.raises(CorruptCheckpointError, match=r"int32\[3, 2\].*float32\[2, 3\]"):
        restored(path)


def test_a_leaf_that_was_added_later_has_no_checksum(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(3), "b": np.ones(3)})
    sums = parse_checksums((path / CHECKSUMS_FILE).read_bytes(), "", Limits())
    (path / CHECKSUMS_FILE).write_bytes(encode_checksums({"a": sums["a"]}))
    _, report = restored(path)
    assert (report.verified, report.without_checksum) == (("a",), ("b",))


def sealed(**leaf):
    """A file with one leaf, changed, whose own checksum holds."""
    entry = {"shape": [4], "dtype": "float32", "boxes": [[0, 2], [2, 4]], "crc32c": [1, 2], **leaf}
    return sealed_file({"a": entry})


def sealed_file(leaves, **change):
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return json.dumps({"version": 1, "leaves": leaves, "crc32c": google_crc32c.value(text.encode()), **change}).encode()


HOSTILE = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "a key twice": b'{"version":1,"version":1,"leaves":{},"crc32c":0}',
    "deep": b"[" * 100_000,
    "no leaves": b'{"version":1,"crc32c":0}',
    "leaves are a list": sealed_file([]),
    "its own checksum": sealed_file({}, crc32c=5),
    "its own checksum is text": sealed_file({}, crc32c="5"),
    "version 0": sealed_file({}, version=0),
    "version true": sealed_file({}, version=True),
    "another key": sealed_file({}, more=1),
    "an entry is a list": sealed_file({"a": []}),
    "negative shape": sealed(shape=[-4]),
    "shape of floats": sealed(shape=[4.0]),
    "shape of booleans": sealed(shape=[True]),
    "endless rank": sealed(shape=[1] * 40, boxes=[[0, 1] * 40], crc32c=[1]),
    "dtype is a list": sealed(dtype=["f4"]),
    "no dtype": sealed(dtype="floaty"),
    "no boxes": sealed(boxes=[], crc32c=[]),
    "a hole": sealed(boxes=[[0, 2], [3, 4]]),
    "an overlap": sealed(boxes=[[0, 3], [2, 4]]),
    "a box outside": sealed(boxes=[[0, 2], [2, 5]]),
    "a box backwards": sealed(boxes=[[2, 0], [2, 4]]),
    "half a side": sealed(boxes=[[0, 2], [2]]),
    "too few checksums": sealed(crc32c=[1]),
    "a checksum of text": sealed(crc32c=[1, "2"]),
    "a grid too fine": sealed(
        shape=[1 << 40, 1 << 40],
        boxes=[[at, at + 1, at, at + 1] for at in range(5000)],
        crc32c=[0] * 5000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_of_checksums_is_a_typed_error_and_never_ok(tmp_path, data):
    path = save(tmp_path / "item", {"a": np.ones(4, np.float32)})
    (path / CHECKSUMS_FILE).write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        restored(path)
    assert caught.value.path == str(path / CHECKSUMS_FILE)
    np.testing.assert_array_equal(restored(path, "off")[0]["a"], 1)


def test_a_later_version_is_unsupported():
    with pytest.raises(UnsupportedCheckpointError, match="version is 2"):
        parse_checksums(sealed_file({}, version=2), "file", Limits())


def test_data_without_a_checksum_is_said_to_have_none(tmp_path):
    """Nothing tells a flipped bit in what stock Orbax wrote; a restore says that it verified nothing."""
    value = np.arange(64, dtype=np.float32)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"a": value}))
    plan = ot.plan_restore(tmp_path / "item", None)
    assert np.array_equal(plan.execute()["a"], value)
    report = plan.report
    assert report is not None and report.without_checksum == ("a",) and report.verified == ()
