"""`.zarray` files that cannot be right, and shapes and chunks that claim too much."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from tests.support.t5x_steps import GOOD, broken, edit, save, spec

METADATA = {
    "object": ({"dtype": "|O"}, UnsupportedCheckpointError),
    "structured": ({"dtype": [["a", "<f4"]]}, UnsupportedCheckpointError),
    "big endian": ({"dtype": ">f4"}, UnsupportedCheckpointError),
    "filters": ({"filters": [{"id": "pickle"}]}, UnsupportedCheckpointError),
    "pickle": ({"compressor": {"id": "pickle"}}, UnsupportedCheckpointError),
    "no level": ({"compressor": {"id": "gzip", "level": "x"}}, UnsupportedCheckpointError),
    "separator": ({"dimension_separator": "../"}, CorruptCheckpointError),
    "order": ({"order": "X"}, CorruptCheckpointError),
    "chunks of none": ({"chunks": [0, 3]}, CorruptCheckpointError),
    "negative shape": ({"shape": [-1, 3]}, CorruptCheckpointError),
    "uncountable": ({"shape": [0, 1 << 62], "chunks": [1, 1]}, CorruptCheckpointError),
    "uncountable chunk": ({"chunks": [1 << 40, 1 << 40]}, CorruptCheckpointError),
    "ranks differ": ({"chunks": [2]}, CorruptCheckpointError),
    "rank 33": ({"shape": [1] * 33, "chunks": [1] * 33}, LimitExceededError),
    "version": ({"zarr_format": 3}, UnsupportedCheckpointError),
    "a field is missing": ({"order": ...}, CorruptCheckpointError),
    "a field is unknown": ({"codecs": []}, UnsupportedCheckpointError),
    "fill value": ({"fill_value": "x"}, UnsupportedCheckpointError),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata(step, case):
    changes, kind = METADATA[case]
    save(step, spec(metadata={}, dtype=...))
    edit(step, **changes)
    broken(step, kind)


def test_metadata_that_is_none(step):
    save(step, spec())
    for data in (b"", b"[]", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"shape": [2], "shape": [3]}'):
        (step / "bad" / ".zarray").write_bytes(data)
        broken(step, CorruptCheckpointError)


def test_a_shape_of_terabytes_opens_and_reads_a_box(step):
    save(step, spec(metadata={}, dtype=...))
    edit(step, shape=[1 << 20, 1 << 20], chunks=[2, 3], fill_value=0.5)
    with ot.open_checkpoint(step) as checkpoint:
        assert checkpoint.leaves["bad"].nbytes == 4 << 40
        np.testing.assert_array_equal(checkpoint.leaves["bad"][:2, :3].get(), GOOD)
        np.testing.assert_array_equal(checkpoint.leaves["bad"][1 << 19, :2].get(), [0.5, 0.5])


def test_a_chunk_larger_than_the_machine(step):
    save(step, spec(metadata={}, dtype=...))
    edit(step, shape=[1 << 50], chunks=[1 << 50])
    with ot.open_checkpoint(step) as checkpoint, pytest.raises(LimitExceededError, match="chunk") as caught:
        checkpoint.leaves["bad"][:2].get()
    assert caught.value.leaf == "bad"
