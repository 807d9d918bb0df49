"""Leaves without bytes to read run the leaf suite: empty, broken and known leaves."""

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.readers.leaves import BrokenLeaf, EmptyLeaf, KnownLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
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


class TestKnown(LeafSuite):
    """A string that Orbax keeps outside its arrays."""

    @pytest.fixture
    def expected(self):
        return np.array("grüße".encode(), object)

    @pytest.fixture
    def leaf(self, tmp_path):
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "item", {"x": "grüße", "y": np.ones(2)})
        with ot.open_checkpoint(tmp_path / "item") as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is KnownLeaf
            yield leaf
