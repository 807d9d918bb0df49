"""Damaged and hostile msgpack files: typed errors at once, naming file and leaf, and nothing allocated by a claim."""

import pickle
import resource
import struct

import msgpack
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)

# Guards against hangs and bombs, not claims.
_MOST_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def in_little_memory():
    """What a header claims here is 4 GiB and more; allocating that is a MemoryError in this process."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def array(shape=(2,), dtype="float32", data=None, code=1):
    data = bytes(4 * int(np.prod([max(n, 0) for n in shape]))) if data is None else data
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data), use_bin_type=True))


def write(directory, data, name="checkpoint_1"):
    path = directory / name
    path.write_bytes(data if isinstance(data, bytes) else msgpack.packb(data))
    return path


GOOD = array()


def refused(path, kind, match=None, **limits):
    """The error with which a file is refused as a whole."""
    with pytest.raises(CheckpointError, match=match) as caught:
        ot.open_checkpoint(path, format="flax_msgpack", limits=ot.Limits(**limits))
    assert type(caught.value) is kind
    assert caught.value.path == str(path)
    return caught.value


def broken(path, kind, match=None, name="bad"):
    """The error of one leaf, beside which others are read."""
    with ot.open_checkpoint(path, format="flax_msgpack") as checkpoint:
        with pytest.raises(CheckpointError, match=match) as caught:
            checkpoint.leaves[name].get()
        assert type(caught.value) is kind
        assert (caught.value.path, caught.value.leaf) == (str(path), name)
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), np.zeros(2))
    target = {"good": np.zeros(2, np.float32)}
    assert ot.restore(path, target, strict=False)["good"].tolist() == [0, 0]
    return caught.value


HUGE_HEADS = [
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xdc\xff\xff",
    b"\xc6\xff\xff\xff\xff",
]


@pytest.mark.parametrize("head", [*HUGE_HEADS, b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"])
@pytest.mark.parametrize("before", [b"", b"\x81\xa1x"])
def test_headers_that_claim_more_than_there_is(tmp_path, head, before):
    refused(write(tmp_path, before + head + bytes(20)), CorruptCheckpointError, "left")


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 20, -1])
def test_truncated(tmp_path, cut):
    data = msgpack.packb({"good": GOOD, "text": "abc", "number": 1.5})
    refused(write(tmp_path, data[:cut]), CorruptCheckpointError)


def test_empty_and_trailing(tmp_path):
    refused(write(tmp_path, b""), CorruptCheckpointError)
    error = refused(write(tmp_path, msgpack.packb({"a": 1}) + b"\0"), CorruptCheckpointError, "1 bytes follow")
    assert "at byte 4" in str(error)
    refused(write(tmp_path, b"\xc1"), CorruptCheckpointError, "0xc1 begins no msgpack value")


@pytest.mark.parametrize("value", [1, None, [], "x", [{"a": 1}]])
def test_what_is_no_state_dict(tmp_path, value):
    refused(write(tmp_path, value), CorruptCheckpointError, "no map at its top")


@pytest.mark.parametrize("kind", ["map", "array"])
def test_nesting(tmp_path, kind):
    step = b"\x81\xa1a" if kind == "map" else b"\x91"
    with ot.open_checkpoint(write(tmp_path, b"\x81\xa1a" + step * 62 + b"\x01"), format="flax_msgpack") as checkpoint:
        assert len(checkpoint.leaves) == 1
    for depth in (64, 100_000, 1_000_000):
        refused(write(tmp_path, b"\x81\xa1a" + step * depth + b"\x01"), LimitExceededError, "nesting = 64")
    refused(write(tmp_path, b"\x81\xa1a" + step * 3 + b"\x01"), LimitExceededError, "= 2", nesting=2)


KEYS = {
    "integer": (b"\x01", "a key is 1, not text"),
    "nil": (b"\xc0", "not text"),
    "float": (struct.pack(">Bd", 0xCB, 1.0), "not text"),
    "bytes": (b"\xc4\x01a", "not text"),
    "list": (b"\x91\xa1a", "not text"),
    "map": (b"\x80", "not text"),
    "extension": (b"\xd4\x01\x00", "not text"),
    "no UTF-8": (b"\xa2\xff\xfe", "not UTF-8"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys(tmp_path, case):
    key, match = KEYS[case]
    error = refused(write(tmp_path, b"\x81\xa1p\x81" + key + b"\x01" + bytes(8)), CorruptCheckpointError, match)
    assert error.leaf == "p"


def test_a_million_colliding_keys(tmp_path):
    """Of a kind that a reader which takes any key hashes into one place."""
    keys = b"".join(struct.pack(">BQB", 0xCF, k * (2**61 - 1) % 2**64, 0xC0) for k in range(100_000))
    refused(write(tmp_path, struct.pack(">BI", 0xDF, 100_000) + keys), CorruptCheckpointError, "not text")


@pytest.mark.slow
def test_keys_twice(tmp_path):
    error = refused(write(tmp_path, b"\x81\xa1p\x82\xa1a\x01\xa1a\x02"), CorruptCheckpointError, "'a' occurs twice")
    assert error.leaf == "p"
    many = b"".join(msgpack.packb(f"{k:06}") + b"\xc0" for k in range(50_000)) + b"\xa6000000\xc0"
    refused(write(tmp_path, struct.pack(">BI", 0xDF, 50_001) + many), CorruptCheckpointError, "twice")


def test_names_that_are_joined_to_one(tmp_path):
    error = refused(write(tmp_path, {"a/b": 1, "a": {"b": 2}}), CorruptCheckpointError, "two leaves have this name")
    assert error.leaf == "a/b"
    with ot.open_checkpoint(write(tmp_path, {"a/c": 1, "a": {"b": 2}}), format="flax_msgpack") as checkpoint:
        assert list(checkpoint.leaves) == ["a/b", "a/c"]


def test_limits(tmp_path):
    refused(write(tmp_path, {str(k): k for k in range(100)}), LimitExceededError, "entries = 100", entries=100)
    broken(write(tmp_path, {"good": GOOD, "bad": array((1,) * 33, data=bytes(4))}), LimitExceededError, "rank = 32")


DTYPES = [
    "object",
    "O",
    "V0",
    "void",
    "<U4",
    "str",
    "bytes",
    "datetime64",
    "datetime64[ns]",
    "f4,f4",
    "float128",
    "",
    "x" * 64,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_are_no_numbers(tmp_path, dtype):
    error = broken(write(tmp_path, {"bad": array(dtype=dtype), "good": GOOD}), UnsupportedCheckpointError)
    assert dtype in str(error)


BAD_ARRAYS = {
    "negative": array((-1,), data=bytes(4)),
    "overflow": array((2**40, 2**40), data=bytes(8)),
    "overflow with a zero": array((0, 2**62), data=b""),
    "too few bytes": array((3,), data=bytes(8)),
    "too many bytes": array((1,), data=bytes(8)),
    "a float in the shape": array((2.0,), data=bytes(8)),
    "a bool in the shape": array((True,), data=bytes(4)),
    "a long dtype": array(dtype="x" * 1000),
    "empty": msgpack.ExtType(1, b""),
    "no array": msgpack.ExtType(1, b"\x01"),
    "two parts": msgpack.ExtType(1, msgpack.packb(((2,), "float32"))),
    "four parts": msgpack.ExtType(1, msgpack.packb(((2,), "float32", bytes(8), 1))),
    "a shape that is none": msgpack.ExtType(1, msgpack.packb((2, "float32", bytes(8)))),
    "a dtype that is none": msgpack.ExtType(1, msgpack.packb(((2,), 1, bytes(8)))),
    "bytes that are none": msgpack.ExtType(1, msgpack.packb(((2,), "float32", 8))),
    "bytes that end early": msgpack.ExtType(1, msgpack.packb(((2,), "float32", bytes(8))) + b"\0"),
    "a claim of 4 GiB": msgpack.ExtType(1, b"\x93\xdd\xff\xff\xff\xff"),
    "a claim inside the file": msgpack.ExtType(1, b"\x93\x91\x02\xa7float32\xc4\x10"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_arrays_that_do_not_hold_together(tmp_path, case):
    broken(write(tmp_path, {"bad": BAD_ARRAYS[case], "good": GOOD}), CorruptCheckpointError)


@pytest.mark.parametrize("code", [0, 4, 5, 127, -1, -2])
def test_extensions_that_are_not_flaxs(tmp_path, code):
    for data in (bytes(1), bytes(4), bytes(8), bytes(12), bytes(300)):
        value = msgpack.ExtType(code, data) if code >= 0 else None
        body = msgpack.packb({"good": GOOD})[1:]
        packed = msgpack.packb(value) if value else struct.pack(">BIb", 0xC9, len(data), code) + data
        path = write(tmp_path, b"\x82" + body + b"\xa3bad" + packed)
        broken(path, CorruptCheckpointError, f"extension {code} is none of Flax's")


@pytest.mark.parametrize("parts", [(1.0,), (1.0, 2.0, 3.0), ("a", "b"), 1.0, (None, 1.0), ([], 1.0)])
def test_complex_numbers(tmp_path, parts):
    value = msgpack.ExtType(2, msgpack.packb(parts))
    broken(write(tmp_path, {"bad": value, "good": GOOD}), CorruptCheckpointError, "complex number")


def chunked(**changes):
    node = {"__msgpack_chunked_array__": True, "shape": {"0": 4}, "chunks": {"0": GOOD, "1": GOOD}}
    node |= changes
    return {key: value for key, value in node.items() if value is not ...}


CHUNKED = {
    "no shape": chunked(shape=...),
    "no chunks": chunked(chunks=...),
    "empty": chunked(chunks={}),
    "a gap": chunked(chunks={"0": GOOD, "2": GOOD}),
    "not from zero": chunked(chunks={"1": GOOD, "2": GOOD}),
    "too few elements": chunked(chunks={"0": GOOD}),
    "too many elements": chunked(shape={"0": 3}),
    "mixed dtypes": chunked(chunks={"0": GOOD, "1": array(dtype="int32")}),
    "a chunk that is none": chunked(chunks={"0": GOOD, "1": 1}),
    "a broken chunk": chunked(chunks={"0": GOOD, "1": BAD_ARRAYS["too few bytes"]}),
    "a shape that is none": chunked(shape=[4]),
    "a negative shape": chunked(shape={"0": -2, "1": -2}),
    "a shape of floats": chunked(shape={"0": 4.0}),
    "nested": chunked(chunks={"0": GOOD, "1": chunked(shape={"0": 2}, chunks={"0": GOOD})}),
}


@pytest.mark.parametrize("case", CHUNKED)
def test_chunked_arrays(tmp_path, case):
    broken(write(tmp_path, {"bad": CHUNKED[case], "good": GOOD}), CorruptCheckpointError)


def test_a_shape_of_chunks_that_cannot_be_counted(tmp_path):
    node = chunked(shape={"0": 0, "1": 2**62, "2": 2**62}, chunks={"0": array((0,), data=b"")})
    broken(write(tmp_path, {"bad": node, "good": GOOD}), CorruptCheckpointError)
    node = chunked(shape={str(k): 1 for k in range(65)}, chunks={"0": array((1,))})
    broken(write(tmp_path, {"bad": node, "good": GOOD}), LimitExceededError, "rank")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/etc/passwd", UnsafeCheckpointError), ("a/../../b", UnsafeCheckpointError), ("w", UnsupportedCheckpointError)],
)
def test_arrays_beside_the_file(tmp_path, path, kind):
    broken(write(tmp_path, {"bad": f"//GDAPlaceholder:{path}", "good": GOOD}), kind, "beside|outside")


def test_what_is_something_else(tmp_path):
    for data, match in (
        (pickle.dumps({"a": 1}), "pickle"),
        (b"PK\x03\x04" + bytes(30), "zip"),
        (b"\x93NUMPY\x01\x00", "NumPy"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        with pytest.raises(UnsupportedCheckpointError, match=match):
            ot.open_checkpoint(write(tmp_path, data))
    hub = tmp_path / "hub"
    hub.mkdir()
    write(hub, b"version https://git-lfs.github.com/spec/v1\n", "flax_model.msgpack")
    with pytest.raises(UnsupportedCheckpointError, match="git lfs pull"):
        ot.open_checkpoint(hub)


def test_a_link_out_of_a_directory(tmp_path):
    (tmp_path / "hub").mkdir()
    outside = write(tmp_path, {"a": 1}, "outside")
    (tmp_path / "hub" / "flax_model.msgpack").symlink_to(outside)
    with pytest.raises(UnsafeCheckpointError):
        ot.open_checkpoint(tmp_path / "hub")
    with ot.open_checkpoint(tmp_path / "hub" / "flax_model.msgpack") as checkpoint:  # the caller's own word
        assert list(checkpoint.leaves) == ["a"]


@pytest.mark.slow
def test_flips_and_cuts_of_every_byte(tmp_path):
    """Values are right, or the error is typed; a flip inside an array's bytes is all that can go unseen."""
    tree = {"w": array((2, 3), data=bytes(range(24))), "n": {"x": 1.5, "t": "abc"}, "c": chunked()}
    data = msgpack.packb(tree)
    for position in range(len(data)):
        for changed in (data[:position] + bytes([data[position] ^ 0x81]) + data[position + 1 :], data[:position]):
            path = write(tmp_path, changed)
            try:
                with ot.open_checkpoint(path, format="flax_msgpack") as checkpoint:
                    for lazy in checkpoint.leaves.values():
                        try:
                            assert lazy.get().nbytes < 200
                        except CheckpointError as error:
                            assert error.leaf is not None and error.path == str(path)
            except CheckpointError as error:
                assert error.path == str(path)
