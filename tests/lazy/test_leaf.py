"""Every kind of leaf runs the leaf suite: in memory, behind a function, in byte ranges, read by TensorStore, broken."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.readers.broken_leaf import BrokenLeaf
from orbax_t5x.readers.empty_leaf import EmptyLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite, LeafSuite
from tests.support.bundle_writer import bundle_of
from tests.support.leaf_arrays import ARRAY


class TestEmpty(LeafSuite):
    @pytest.fixture
    def expected(self):
        return np.zeros((3, 0, 2), ml_dtypes.bfloat16)

    @pytest.fixture
    def leaf(self, expected):
        return EmptyLeaf("empty", "/checkpoint", expected.shape, expected.dtype)


class TestBroken(BrokenLeafSuite):
    @pytest.fixture
    def leaf(self):
        return BrokenLeaf("broken", CorruptCheckpointError("damaged", path="/checkpoint", leaf="broken"))


class TestBrokenEntryOfABundle(BrokenLeafSuite):
    @pytest.fixture
    def leaf(self, tmp_path):
        bundle = bundle_of({"x": ARRAY, "y": ARRAY})
        bundle.entries[b"x"] = b"\x07garbage"
        with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
            yield leaf_of(checkpoint, "x")
