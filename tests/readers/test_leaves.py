"""Leaves without bytes run the leaf suite: empty and broken leaves."""

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.readers.leaves import BrokenLeaf, EmptyLeaf
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite, LeafSuite


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
