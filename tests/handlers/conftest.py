"""A tree with leaves of a user's type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.point_handlers import Point


@pytest.fixture
def points():
    return {"a": Point(1, 2), "w": np.ones(3), "n": {"p": Point(3, 4), "j": jnp.ones(4), "i": 5, "none": None}}


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def state(mesh):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "params": {"w": jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", "y"))), "b": jnp.arange(4.0)},
        "step": jnp.int32(3),
    }
