"""A user's type with a handler, and saves and restores with a given handler."""

import dataclasses

import jax
import numpy as np
import orbax.checkpoint as ocp


@dataclasses.dataclass
class Point:
    """A user's type, which JAX takes for a leaf."""

    x: int
    y: int


class PointHandler(ocp.type_handlers.NumpyHandler):
    """Stores points as arrays of two numbers."""

    def typestr(self):
        return "Point"

    async def serialize(self, values, infos, args=None):
        return await super().serialize([np.array([value.x, value.y]) for value in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [Point(*array.tolist()) for array in await super().deserialize(infos)]


class NegatedHandler(ocp.type_handlers.NumpyHandler):
    """Stores arrays with another sign: whoever reads them without it has other values."""

    async def serialize(self, values, infos, args=None):
        return await super().serialize([-value for value in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [-array for array in await super().deserialize(infos, args)]


def registry(numpy_handler=None):
    return ocp.type_handlers.create_type_handler_registry(
        (int, ocp.type_handlers.ScalarHandler()),
        (np.ndarray, numpy_handler or ocp.type_handlers.NumpyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (Point, PointHandler()),
    )


def save(path, handler, args):
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)
    return path


def restore(path, handler, args=None):
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(path) if args is None else checkpointer.restore(path, args=args)


def assert_equal(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if hasattr(other, "dtype"):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other
