"""Leaves of values in memory, of text and of functions that are called when they are read."""

import asyncio

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support.leaf_arrays import ARRAY


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
