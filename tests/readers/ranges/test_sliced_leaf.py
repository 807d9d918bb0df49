"""Leaves stored in slices, each with a byte range of its own."""

import pytest

import orbax_t5x as ot
from orbax_t5x.readers.ranges.sliced_leaf import SlicedLeaf
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support.bundle_writer import Bundle
from tests.support.leaf_arrays import LARGE


class TestSliced(LeafSuite):
    """A partitioned variable of a TensorFlow bundle, in four slices."""

    @pytest.fixture
    def expected(self):
        return LARGE

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        bundle = Bundle(2)
        extents = [[Extent(a, 350), Extent(b, 400)] for a in (0, 350) for b in (0, 400)]
        bundle.add_sliced("x", expected, extents)
        with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is SlicedLeaf
            yield leaf
