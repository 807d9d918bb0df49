"""Strings that Orbax keeps outside its arrays, read as any leaf."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.readers.string_leaf import StringLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import LeafSuite


class TestString(LeafSuite):
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
            assert type(leaf) is StringLeaf
            yield leaf
