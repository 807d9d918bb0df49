"""Leaves of one byte range, with and without a checksum."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support.bundle_writer import bundle_of
from tests.support.leaf_arrays import ARRAY, LARGE, byte_range


class TestByteRange(LeafSuite):
    @pytest.fixture(params=[ARRAY, LARGE, np.array(7, np.int64), ARRAY % 2 == 0, LARGE.astype(ml_dtypes.bfloat16)])
    def expected(self, request):
        return request.param

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        return byte_range(tmp_path, expected)


class TestByteRangeWithChecksum(LeafSuite):
    """A tensor of a TensorFlow bundle."""

    @pytest.fixture(params=[ARRAY, LARGE])
    def expected(self, request):
        return request.param

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        with ot.open_checkpoint(bundle_of({"x": expected}).write(tmp_path)) as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is ByteRangeLeaf and type(leaf.range) is ByteRange
            yield leaf
