"""A small msgpack file takes little memory, opened or refused: at most ten times its bytes beyond a constant."""

import msgpack
import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.traced_memory import peak_of

_BROKEN = msgpack.ExtType(1, b"\x00")
_MIB = 1 << 20
# Fewer leaves than the smallest file may have.
_FREE_BYTES = 48 * _MIB


def _nested(depth: int, key: str, value):
    for _ in range(depth):
        value = {key: value}
    return value


def _empty_array() -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb(((0,), "int8", b"")))


FILES = {
    "broken extensions under a long key": lambda: {"k" * 4000: [_BROKEN] * 100_000},
    "broken extensions under many keys": lambda: _nested(60, "k" * 4000, [_BROKEN] * 50_000),
    "small values under a long key": lambda: {"k" * 4000: [0] * 100_000},
    "500,000 numbers": lambda: {f"{k:06}": k % 100 for k in range(500_000)},
    "40,000 numbers": lambda: {f"{k:06}": k for k in range(40_000)},
    "empty maps": lambda: [{}] * 1_900_000,
    "maps of one number": lambda: {f"{k:06}": {"a": 1} for k in range(200_000)},
    "nested lists": lambda: [[[0] * 10] * 10] * 2_000,
    "arrays without elements": lambda: {"a": [_empty_array()] * 34_000},
    "many numbers that are read": lambda: {"a": [1] * 20_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_memory_is_bounded_by_the_file(name, tmp_path):
    value = FILES[name]()
    data = msgpack.packb(value if isinstance(value, dict) else {"a": value})
    (tmp_path / "file").write_bytes(data)

    def attempt() -> None:
        try:
            ot.open_checkpoint(tmp_path / "file", format="flax_msgpack").close()
        except ot.errors.LimitExceededError as error:
            assert str(tmp_path) in str(error) and len(str(error)) < 10_000

    assert peak_of(attempt) < 10 * len(data) + _FREE_BYTES


@pytest.mark.slow
def test_trees_of_usual_size_open(tmp_path):
    """Twenty thousand numbers, or ten thousand arrays of a kilobyte."""
    array = msgpack.ExtType(1, msgpack.packb(((256,), "float32", bytes(1024))))
    for tree in ({"a": {f"k{k}": k for k in range(20_000)}}, {"a": {f"k{k}": array for k in range(10_000)}}):
        (tmp_path / "file").write_bytes(msgpack.packb(tree))
        with ot.open_checkpoint(tmp_path / "file", format="flax_msgpack") as checkpoint:
            assert len(checkpoint.leaves) == len(tree["a"])


def test_a_broken_leaf_is_named_and_others_are_read(tmp_path):
    (tmp_path / "file").write_bytes(msgpack.packb({"a": {"bad": _BROKEN, "good": 3}}))
    with ot.open_checkpoint(tmp_path / "file", format="flax_msgpack") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["a/good"].get(), 3)
        with pytest.raises(ot.errors.CorruptCheckpointError, match="leaf 'a/bad'"):
            checkpoint.leaves["a/bad"].get()
