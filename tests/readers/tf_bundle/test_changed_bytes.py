"""Every single-byte change of a small bundle, in each of its files: what was stored, or a typed error, never another
value, another name, or one less.
"""

import numpy as np
import pytest

from orbax_t5x.errors import CheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.readers.tf_bundle.sstable import read_varint
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, same_bits
from tests.support.bundle_writer import block, bundle_of, sealed

pytestmark = pytest.mark.slow

ARRAYS = {
    "a/b": np.arange(4, dtype=np.float32),
    "empty": np.empty((0, 2), np.int16),
    "n": np.array(7, np.int64),
    "t": np.array([b"one", b""], object),
}
SLICED = np.arange(6, dtype=np.int16).reshape(3, 2)
WANTED = {**ARRAYS, "w": SLICED}
# What each byte is turned into, by exclusive or; all 255 were tried once, and these are in every run.
CHANGES = (0x01, 0x80, 0xFF)


def write(directory, snappy):
    bundle = bundle_of(ARRAYS, 2)
    bundle.add_sliced("w", SLICED, [[Extent(0, 1), Extent(0, -1)], [Extent(1, 2), Extent(0, -1)]])
    bundle.write(directory, snappy=snappy)
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')


def require_right_or_error(directory):
    """Returns how many values were read."""
    try:
        checkpoint = open_tf_bundle(directory)
    except CheckpointError as error:
        assert error.path is not None
        return 0
    right = 0
    with checkpoint:
        assert checkpoint.leaves.keys() == WANTED.keys()
        for name, value in WANTED.items():
            try:
                read = read_boxes(leaf_of(checkpoint, name)).arrays[0]
            except CheckpointError as error:
                assert error.leaf == name
            else:
                assert same_bits(read, value), name
                right += 1
    return right


@pytest.mark.parametrize("snappy", [False, True])
def test_single_bytes(tmp_path, snappy, changes=CHANGES):
    write(tmp_path, snappy)
    assert require_right_or_error(tmp_path) == len(WANTED)
    harmless = {}
    for path in sorted(tmp_path.iterdir()):
        stored = path.read_bytes()
        for at, byte in enumerate(stored):
            for change in changes:
                path.write_bytes(stored[:at] + bytes([byte ^ change]) + stored[at + 1 :])
                if require_right_or_error(tmp_path) == len(WANTED):
                    harmless.setdefault(path.name.partition(".data")[1] or path.name, set()).add(at - len(stored))
        path.write_bytes(stored)
    # The padding of the footer (48 bytes) and a block without entries, which nobody reads; all else has a checksum.
    assert harmless.keys() == {"checkpoint", "model.ckpt-1.index"}
    index = (tmp_path / "model.ckpt-1.index").read_bytes()
    empty, _ = read_varint(index, len(index) - 48, len(index))
    places = {len(index) + at for at in harmless["model.ckpt-1.index"]}
    assert places <= {*range(empty, empty + len(sealed(block([])))), *range(len(index) - 48, len(index))}


@pytest.mark.parametrize("snappy", [False, True])
def test_bytes_missing_and_inserted(tmp_path, snappy):
    write(tmp_path, snappy)
    for path in sorted(tmp_path.iterdir()):
        stored = path.read_bytes()
        for at in range(len(stored)):
            for change in (b"", stored[at : at + 1] * 2):
                path.write_bytes(stored[:at] + change + stored[at + 1 :])
                require_right_or_error(tmp_path)
        path.write_bytes(stored)
