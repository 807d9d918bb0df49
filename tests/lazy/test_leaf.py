"""Every kind of leaf runs the leaf suite: in memory, behind a function, in byte ranges, read by TensorStore, broken."""

import asyncio

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.readers.broken_leaf import BrokenLeaf
from orbax_t5x.readers.empty_leaf import EmptyLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.ranges.sliced_leaf import SlicedLeaf
from orbax_t5x.readers.string_leaf import StringLeaf
from orbax_t5x.readers.tensorstore_leaf import TensorStoreLeaf
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.readers.tf_bundle.string_range import StringRange
from orbax_t5x.storage.files import FileSet
from orbax_t5x.storage.paths import Root
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite, LeafSuite
from tests.support.bundle_writer import Bundle, bundle_of

ARRAY = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
# A staging window holds a fraction of it, and its columns are runs of many rows.
LARGE = np.random.default_rng(3).random((700, 800), np.float32)


class TestValue(LeafSuite):
    @pytest.fixture
    def expected(self):
        return ARRAY

    @pytest.fixture
    def leaf(self, expected):
        return ValueLeaf(expected, "value")


class TestScalarValue(TestValue):
    @pytest.fixture
    def expected(self):
        return np.float32(2.5).reshape(())


class TestTextValue(LeafSuite):
    @pytest.fixture
    def expected(self):
        return np.array(b"text", object)

    @pytest.fixture
    def leaf(self):
        return ValueLeaf(b"text", "text")


class TestShardedValue(LeafSuite):
    @pytest.fixture
    def expected(self):
        return np.arange(64, dtype=np.float32).reshape(8, 8)

    @pytest.fixture
    def leaf(self, expected):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
        return ValueLeaf(jax.device_put(expected, sharding), "sharded")


class TestBlockingFunction(LeafSuite):
    @pytest.fixture
    def expected(self):
        return ARRAY

    @pytest.fixture
    def leaf(self, expected):
        return OpaqueLeaf(ot.LazyThreadPoolArray(expected.shape, expected.dtype, lambda: expected), "function")


class TestAwaitableFunction(LeafSuite):
    @pytest.fixture
    def expected(self):
        return ARRAY

    @pytest.fixture
    def leaf(self, expected):
        async def get():
            await asyncio.sleep(0)
            return expected

        return OpaqueLeaf(ot.LazyAwaitableArray(expected.shape, expected.dtype, get), "function")


def byte_range(directory, array, crc=None):
    (directory / "file").write_bytes(b"head" + array.tobytes())
    file = FileSet(Root(directory)).file("file")
    return ByteRangeLeaf("range", ByteRange(file, 4, array.shape, array.dtype), crc)


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


class TestStrings(LeafSuite):
    """A string tensor of a TensorFlow bundle."""

    @pytest.fixture
    def expected(self):
        return np.array([[b"a", b"", b"long " * 100], [b"\0", b"\xff", b"z"]], object)

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        bundle = Bundle()
        bundle.add("x", expected)
        with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is ByteRangeLeaf and type(leaf.range) is StringRange
            yield leaf


class OrbaxLeaf(LeafSuite):
    ocdbt = True
    zarr3 = False

    @pytest.fixture
    def expected(self):
        return LARGE

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=self.ocdbt, use_zarr3=self.zarr3)) as checkpointer:
            save_args = {"x": ocp.SaveArgs(chunk_byte_size=1 << 19)}
            checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"x": expected}, save_args=save_args))
        with ot.open_checkpoint(tmp_path / "item") as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is TensorStoreLeaf
            yield leaf


class TestTensorStoreDatabase(OrbaxLeaf):
    pass


class TestTensorStoreZarr(OrbaxLeaf):
    ocdbt = False


class TestTensorStoreZarr3(OrbaxLeaf):
    ocdbt = False
    zarr3 = True


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


class TestBrokenArrayOfOrbax(BrokenLeafSuite):
    @pytest.fixture
    def leaf(self, tmp_path):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"x": ARRAY, "y": ARRAY}))
        (tmp_path / "item/x/.zarray").write_text("{}")
        with ot.open_checkpoint(tmp_path / "item") as checkpoint:
            yield leaf_of(checkpoint, "x")
