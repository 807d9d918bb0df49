"""Suite for leaves: promises that views, plans and the executor need.

A subclass makes the leaf and its expected values:

    class TestMyLeaf(LeafSuite):
        @pytest.fixture
        def expected(self): return np.arange(12).reshape(3, 4)

        @pytest.fixture
        def leaf(self, expected, tmp_path): ...

`BrokenLeafSuite` is the same for leaves that cannot be read.
"""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import pytest

from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy.box import box_shape, box_slices, full_box
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.lazy.view import as_view
from orbax_t5x.testing.leaf_reads import assert_same, random_box, random_buffer, read, read_boxes


class LeafAttributes:
    """Tests of a leaf's attributes before it is read.

    Both suites have them.
    """

    @pytest.fixture
    def leaf(self) -> Leaf:
        """Returns the leaf that is tested; implemented by a subclass."""
        raise NotImplementedError

    def test_shape_and_dtype_are_plain(self, leaf: Leaf) -> None:
        assert isinstance(leaf.name, str) and leaf.name
        assert isinstance(leaf.path, str)
        assert isinstance(leaf.shape, tuple) and all(type(size) is int and size >= 0 for size in leaf.shape)
        assert isinstance(leaf.dtype, np.dtype)
        assert leaf.chunks is None or len(leaf.chunks) == len(leaf.shape)
        assert isinstance(leaf.is_value, bool)

    def test_leaves_are_keys_by_identity(self, leaf: Leaf) -> None:
        assert {leaf: 1}[leaf] == 1
        assert leaf == leaf and leaf != object()

    def test_it_has_a_short_text(self, leaf: Leaf) -> None:
        assert len(repr(leaf)) < 1000


class LeafSuite(LeafAttributes):
    """Tests of the promises of every readable leaf."""

    @pytest.fixture
    def expected(self) -> np.ndarray:
        """Returns the whole array; implemented by a subclass."""
        raise NotImplementedError

    def test_it_is_what_it_says(self, leaf: Leaf, expected: np.ndarray) -> None:
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert leaf.error is None
        leaf.raise_error()

    def test_the_whole_of_it(self, leaf: Leaf, expected: np.ndarray) -> None:
        assert_same(read_boxes(leaf).arrays[0], expected)

    def test_random_boxes_into_random_buffers(self, leaf: Leaf, expected: np.ndarray) -> None:
        rng = np.random.default_rng(11)
        for _ in range(8):
            boxes = [random_box(rng, expected.shape) for _ in range(5)]
            boxes += boxes[:2]  # the same box for two buffers; most others overlap
            requests = [Request(box, random_buffer(rng, box_shape(box), expected.dtype)) for box in boxes]
            read(leaf, requests)
            for box, out in requests:
                assert_same(out, np.asarray(expected[box_slices(box)], expected.dtype))

    def test_nothing_is_asked(self, leaf: Leaf) -> None:
        assert read(leaf, []).bytes_read == 0

    def test_two_boxes_count_no_byte_twice(self, leaf: Leaf, expected: np.ndarray) -> None:
        box = full_box(leaf.shape)
        once = read_boxes(leaf, [box]).stats
        twice = read_boxes(leaf, [box, box]).stats
        assert (twice.bytes_read, twice.gap_bytes) == (once.bytes_read, once.gap_bytes)

    def test_bytes_of_boxes_is_what_reading_them_counts(self, leaf: Leaf, expected: np.ndarray) -> None:
        rng = np.random.default_rng(12)
        for count in (1, 1, 2, 5):
            boxes = tuple(random_box(rng, expected.shape) for _ in range(count))
            assert read_boxes(leaf, boxes).stats.bytes_read == leaf.bytes_of(boxes)
        assert leaf.bytes_of(()) == 0

    def test_blocking_reads_give_the_same(self, leaf: Leaf, expected: np.ndarray) -> None:
        if not isinstance(leaf, BlockingLeaf):
            assert not hasattr(leaf, "read_blocking"), "a leaf with blocking reads is a BlockingLeaf"
            return
        out = np.empty(leaf.shape, leaf.dtype)
        leaf.read_blocking([Request(full_box(leaf.shape), out)], ReadStats())
        assert_same(out, expected)

    def test_threads_read_at_once(self, leaf: Leaf, expected: np.ndarray) -> None:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for reading in pool.map(lambda _: read_boxes(leaf), range(8)):
                assert_same(reading.arrays[0], expected)

    def test_event_loops_read_at_once(self, leaf: Leaf, expected: np.ndarray) -> None:
        outs = [np.empty(leaf.shape, leaf.dtype) for _ in range(4)]

        async def run() -> None:
            requests = [[Request(full_box(leaf.shape), out)] for out in outs]
            await asyncio.gather(*(leaf.read_into(some, ReadStats()) for some in requests))

        asyncio.run(run())
        for out in outs:
            assert_same(out, expected)

    def test_checksums_are_verified_when_all_was_read(self, leaf: Leaf) -> None:
        whole = None if leaf.checksums is None else True
        assert read_boxes(leaf).verified is whole
        assert read_boxes(leaf, verify="full").verified is whole
        assert read_boxes(leaf, [], verify="full").verified is whole

    def test_a_part_is_unverified(self, leaf: Leaf) -> None:
        assert read_boxes(leaf, []).verified is (None if leaf.checksums is None else False)

    def test_nothing_is_summed_where_nothing_is_verified(self, leaf: Leaf, expected: np.ndarray) -> None:
        reading = read_boxes(leaf, verify="off")
        assert reading.verified is None
        assert reading.stats.ranges(leaf) == []
        assert_same(reading.arrays[0], expected)


class BrokenLeafSuite(LeafAttributes):
    """Tests of a leaf that is named but cannot be read."""

    def test_it_has_an_error_that_names_it(self, leaf: Leaf) -> None:
        assert isinstance(leaf.error, CheckpointError)
        assert leaf.error.path

    def test_reading_raises_a_new_exception_each_time(self, leaf: Leaf) -> None:
        raised = []
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught:
                read_boxes(leaf)
            assert type(caught.value) is type(leaf.error) and str(caught.value) == str(leaf.error)
            raised.append(caught.value)
        assert raised[0] is not raised[1] and raised[0] is not leaf.error

    def test_an_empty_box_raises_too(self, leaf: Leaf) -> None:
        box = tuple((0, 0) for _ in leaf.shape)
        with pytest.raises(CheckpointError):
            read_boxes(leaf, [box])

    def test_composing_raises_no_other_error(self, leaf: Leaf) -> None:
        view = as_view(leaf)
        for compose in (
            lambda: view[0],
            lambda: view[..., None, 5:],
            lambda: view.transpose(1, 0),
            lambda: view.reshape(3, 5),
            lambda: view.astype(np.float32),
        ):
            with pytest.raises(CheckpointError) as caught:
                compose().get()
            assert str(caught.value) == str(leaf.error)
