"""Hostile and damaged GGUF files: each kind is a typed error that names the file, and other leaves stay readable.

The numbers are those of the list of hostile inputs.
"""

import struct

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.testing.leaf_reads import assert_same
from tests.support.gguf_files import F32, Q8_0, gguf_bytes, header, pair, tensor, text

GOOD = np.arange(8, dtype=np.float32)
U64 = struct.Struct("<Q")


def of_type(code, data=b""):
    """A pair whose value has this type."""
    return text("key") + struct.pack("<I", code) + data


# 1.6.6: what the whole file is refused for.
REFUSED = {
    "a count of 2^60 tensors": header([], counts=(1 << 60, 0)),
    "a count of 2^60 pairs": header([], counts=(0, 1 << 60)),
    "a count of all tensors that fit": header([bytes(48)], counts=(2, 0)),
    "a key of 2^62 bytes": header([], [U64.pack(1 << 62)]),
    "a text of 2^62 bytes": header([], [of_type(8, U64.pack(1 << 62))]),
    "an array of 2^60 numbers": header([], [of_type(9, struct.pack("<IQ", 6, 1 << 60))]),
    "an array of 2^60 texts": header([], [of_type(9, struct.pack("<IQ", 8, 1 << 60))]),
    "an array of 2^60 arrays": header([], [of_type(9, struct.pack("<IQ", 9, 1 << 60))]),
    "arrays in arrays": header([], [of_type(9, struct.pack("<IQ", 9, 1) * 5000)]),
    "a value of an unknown type": header([], [of_type(13)]),
    "an array of an unknown type": header([], [of_type(9, struct.pack("<IQ", 13, 1))]),
    "a bool of 2": header([], [of_type(7, b"\x02")]),
    "a key twice": header([], [pair("a", 1), pair("a", 2)]),
    "a key that is no text": header([], [text(b"\xff") + struct.pack("<IB", 0, 1)]),
    "an alignment of 0": header([], [pair("general.alignment", 0)]),
    "an alignment that is a text": header([], [pair("general.alignment", "32")]),
    "an alignment of 2^40": header([], [pair("general.alignment", 1 << 40)]),
    "rank 10": header([tensor("w", (1,) * 10, F32, 0)]),
    "rank 2^32 - 1": header([text("w") + b"\xff\xff\xff\xff" + bytes(40)]),
    "a name twice": header([tensor("w", (1,), F32, 0), tensor("w", (1,), F32, 32)]) + bytes(64),
    "a name that is no text": header([tensor(b"\xff", (1,), F32, 0)]) + bytes(32),
    "a name that is too deep": header([tensor("/".join("n" * 300), (1,), F32, 0)]) + bytes(32),
    "an offset that is not aligned": header([tensor("w", (1,), F32, 4)]) + bytes(64),
    "nothing": b"",
    "the magic alone": b"GGUF",
    "another magic": b"GGML" + bytes(40),
}
# What only the leaf is refused for: shape, type, offset.
BROKEN = {
    "an offset beyond the file": ((8,), F32, 1 << 40),
    "an offset of almost 2^64": ((8,), F32, (1 << 64) - 32),
    "an array beyond the file": ((1 << 20,), F32, 32),
    "a size of 2^63": ((1 << 63,), F32, 32),
    "sizes whose product is 2^64": ((1 << 32, 1 << 32), F32, 32),
    "no bytes, and sizes that NumPy cannot have": ((0, 1 << 62, 1 << 62), F32, 32),
    "bytes of another tensor": ((8,), F32, 0),
    "an unknown type": ((8,), 99, 32),
    "blocks that are not whole": ((2, 33), Q8_0, 32),
    "blocks without a dimension": ((), Q8_0, 32),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_files_that_are_refused(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises((CorruptCheckpointError, LimitExceededError)) as caught:
        ot.open_checkpoint(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(("shape", "type", "offset"), BROKEN.values(), ids=BROKEN)
def test_leaves_that_are_refused(tmp_path, shape, type, offset):
    path = tmp_path / "model.gguf"
    path.write_bytes(header([tensor("good", (8,), F32, 0), tensor("w", shape, type, offset)]) + GOOD.tobytes())
    with ot.open_checkpoint(path) as checkpoint:
        with pytest.raises(CorruptCheckpointError) as caught:
            checkpoint.leaves["w"].get()
        assert (caught.value.path, caught.value.leaf) == (str(path), "w")
        assert_same(checkpoint.leaves["good"].get(), GOOD)


@pytest.mark.parametrize(
    ("version", "said"), [(1, "version 1 of GGUF"), (4, "version 4"), (3 << 24, "big-endian"), (0, "version 0")]
)
def test_other_versions_are_named(tmp_path, version, said):
    (tmp_path / "model.gguf").write_bytes(header([], version=version))
    with pytest.raises(UnsupportedCheckpointError, match=said):
        ot.open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.slow
def test_every_cut_is_refused_or_breaks_a_leaf(tmp_path):
    data = gguf_bytes({"a": GOOD, "b": GOOD}, {"k": ["x", "y"], "n": [1, 2]})
    path = tmp_path / "model.gguf"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as caught, ot.open_checkpoint(path) as checkpoint:
            checkpoint.leaves["b"].get()
        assert caught.value.path == str(path)


def test_limits_hold(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"a": GOOD, "b": GOOD}, {"k": ["x"] * 300}))
    for limits in (ot.Limits(entries=1), ot.Limits(entries=299), ot.Limits(index_bytes=1000)):
        with pytest.raises(LimitExceededError):
            ot.open_checkpoint(path, limits=limits)
