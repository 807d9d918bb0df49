"""Every kind of leaf runs the leaf suite: in memory, behind a function, in byte ranges, read by TensorStore, broken."""

import pytest

import orbax_t5x as ot
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite
from tests.support.bundle_writer import bundle_of
from tests.support.leaf_arrays import ARRAY


class TestBrokenEntryOfABundle(BrokenLeafSuite):
    @pytest.fixture
    def leaf(self, tmp_path):
        bundle = bundle_of({"x": ARRAY, "y": ARRAY})
        bundle.entries[b"x"] = b"\x07garbage"
        with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
            yield leaf_of(checkpoint, "x")
