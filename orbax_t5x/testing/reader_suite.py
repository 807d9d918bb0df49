"""Suite for readers: a subclass writes arrays with stock software.

    class TestMyFormat(ReaderSuite):
        dtypes = (np.dtype(np.float32), np.dtype(np.int64))

        def write(self, directory, arrays):
            path = directory / "checkpoint.mine"
            the_formats_own_writer(path, arrays)
            return path

        def open(self, path):
            return open_my_format(path)

The arrays are compared bit for bit with what was written: the oracle is the format's own writer, never ours. The suite
also proves that opening reads no array, that a box reads only its bytes, that threads may open and read at once, and
that reading a closed checkpoint is an error.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.lazy import LazyArray
from orbax_t5x.lazy.box import box_shape, box_size, box_slices, full_box
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.testing.leaf_reads import (
    assert_same,
    bytes_read_by_process,
    leaf_of,
    random_array,
    random_box,
    random_buffer,
    read,
)

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64".split()
_ML_DTYPES = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
NUMBERS: tuple[np.dtype, ...] = tuple(np.dtype(dtype) for dtype in (*_NAMES, *_ML_DTYPES))
"""The dtypes that every format stores."""

Arrays = dict[str, np.ndarray]
"""Arrays by '/'-joined name."""

Written = tuple[Path, Arrays]
"""The path of a checkpoint, and the arrays in it."""

_BIG = "big/matrix"
_BIG_BYTES = 1024 * 2048 * 4
# Other reads of the process: small index files, and the interpreter's own.
_OPENING_BYTES = 1 << 20


def sample_arrays(dtypes: tuple[np.dtype, ...]) -> Arrays:
    """Makes arrays of every dtype, of ranks 0 to 5."""
    rng = np.random.default_rng(7)
    shapes = [(), (5,), (3, 7), (2, 3, 4), (1, 4, 1, 3), (2, 1, 3, 2, 2)]
    arrays = {
        f"dtypes/{dtype.name}": random_array(rng, shapes[index % len(shapes)], dtype)
        for index, dtype in enumerate(dtypes)
    }
    arrays |= {f"ranks/{len(shape)}": random_array(rng, shape, np.dtype(np.float32)) for shape in shapes}
    # Incompressible, so that bytes read say something in every format.
    arrays[_BIG] = rng.random((1024, 2048), np.float32)
    return arrays


class ReaderSuite:
    """Tests of the promises of every reader.

    Attributes:
      dtypes: those that the format stores.
      separator: the replacement of '/' in the names of the opened checkpoint, in formats that have no '/'.
    """

    dtypes: tuple[np.dtype, ...] = NUMBERS
    separator: str = "/"

    def write(self, directory: Path, arrays: Mapping[str, np.ndarray]) -> Path:
        """Writes arrays with the format's own writer; returns the path to open."""
        raise NotImplementedError

    def open(self, path: Path) -> Checkpoint:
        """Opens the result of `write`.

        A subclass of a format outside the table calls its own reader.
        """
        return open_checkpoint(path)

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory: pytest.TempPathFactory) -> Written:
        """Writes the arrays and returns their path, with arrays by name."""
        arrays = sample_arrays(cls.dtypes)
        path = cls().write(tmp_path_factory.mktemp("suite"), arrays)
        return path, {name.replace("/", cls.separator): value for name, value in arrays.items()}

    @pytest.fixture
    def opened(self, written: Written) -> Iterator[Checkpoint]:
        """Opens the checkpoint."""
        with self.open(written[0]) as checkpoint:
            yield checkpoint

    @pytest.fixture
    def arrays(self, written: Written) -> Arrays:
        """Returns the arrays by the names of their leaves."""
        return written[1]

    def test_names_are_sorted_and_complete(self, opened: Checkpoint, arrays: Arrays) -> None:
        assert list(opened.leaves) == sorted(arrays)

    def test_shapes_and_dtypes_are_known(self, opened: Checkpoint, arrays: Arrays) -> None:
        for name, expected in arrays.items():
            lazy = opened.leaves[name]
            assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype), name
            assert lazy.nbytes == expected.nbytes
            chunks = leaf_of(opened, name).chunks
            assert chunks is None or len(chunks) == expected.ndim

    def test_opening_reads_no_array(self, written: Written) -> None:
        self.open(written[0]).close()  # imports and caches
        before = bytes_read_by_process()
        with self.open(written[0]) as checkpoint:
            assert bytes_read_by_process() - before < _OPENING_BYTES
            assert 0 < checkpoint.index_bytes < _OPENING_BYTES

    def test_whole_leaves(self, opened: Checkpoint, arrays: Arrays) -> None:
        for name, expected in arrays.items():
            assert_same(opened.leaves[name].get(), expected)

    def test_random_boxes_into_random_buffers(self, opened: Checkpoint, arrays: Arrays) -> None:
        rng = np.random.default_rng(11)
        for name, expected in arrays.items():
            boxes = [random_box(rng, expected.shape) for _ in range(6)] + [full_box(expected.shape)]
            boxes += boxes[:2]  # the same box for two buffers
            requests = [Request(box, random_buffer(rng, box_shape(box), expected.dtype)) for box in boxes]
            read(leaf_of(opened, name), requests)
            for box, out in requests:
                assert_same(out, expected[box_slices(box)])

    def test_an_unaligned_buffer(self, opened: Checkpoint, arrays: Arrays) -> None:
        name = f"ranks{self.separator}2"
        expected = arrays[name]
        raw = np.zeros(expected.nbytes + 1, np.uint8)
        out = raw[1:].view(expected.dtype).reshape(expected.shape)
        assert not out.flags.aligned
        read(leaf_of(opened, name), [Request(full_box(expected.shape), out)])
        assert_same(out.copy(), expected)

    def test_bytes_are_counted_and_few(self, opened: Checkpoint, arrays: Arrays) -> None:
        name = _BIG.replace("/", self.separator)
        leaf = leaf_of(opened, name)
        rows = ((256, 512), (0, 2048))
        out = np.empty(box_shape(rows), np.float32)
        read(leaf, [Request(((0, 1), (0, 1)), np.empty((1, 1), np.float32))])  # files are open
        before = bytes_read_by_process()
        stats = read(leaf, [Request(rows, out), Request(rows, np.empty_like(out))])
        assert stats.bytes_read == out.nbytes, "a box that is requested twice is read once"
        assert stats.gap_bytes == 0
        unit = math.prod(leaf.chunks) * 4 if leaf.chunks is not None else 0
        assert bytes_read_by_process() - before < out.nbytes + 2 * unit + _OPENING_BYTES
        assert box_size(full_box(leaf.shape)) * 4 == _BIG_BYTES

    def test_threads_read_at_once(self, opened: Checkpoint, arrays: Arrays) -> None:
        big = _BIG.replace("/", self.separator)
        names = [*arrays, *[name for name in arrays if name != big] * 3]

        def one(name: str) -> tuple[str, np.ndarray]:
            return name, opened.leaves[name].get()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for name, value in pool.map(one, names):
                assert_same(value, arrays[name])

    def test_threads_open_at_once(self, written: Written) -> None:
        path, arrays = written

        def one(_: int) -> list[str]:
            with self.open(path) as checkpoint:
                return list(checkpoint.leaves)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for names in pool.map(one, range(8)):
                assert names == sorted(arrays)

    def test_reading_after_close_is_a_value_error(self, written: Written) -> None:
        checkpoint = self.open(written[0])
        views = list(checkpoint.leaves.values())
        checkpoint.close()
        checkpoint.close()
        for view in views:
            with pytest.raises(ValueError, match="closed"):
                view.get()

    def test_the_tree_has_the_leaves(self, opened: Checkpoint) -> None:
        def walk(node: object, prefix: str) -> Iterator[tuple[str, object]]:
            if isinstance(node, dict) and node:
                for key, value in node.items():
                    yield from walk(value, f"{prefix}/{key}")
            else:
                yield prefix.removeprefix("/"), node

        found = dict(walk(opened.tree(), ""))
        assert {name for name, value in found.items() if isinstance(value, LazyArray)} == set(opened.leaves)
