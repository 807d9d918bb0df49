"""Describes a target leaf: shape, dtype, sharding and type.

A leaf that nothing can be restored into is a problem, never an exception. Nothing here touches array bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.trees.dtypes import kind_of

Kind = Literal["jax", "key", "numpy", "scalar", "keep", "none"]

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)
# Orbax's descriptions of NumPy arrays have a shape and a dtype, and no sharding as those of `jax.Array` have one.
_ORBAX = "orbax."
_GIVE_MESH = "call this within `with jax.set_mesh(mesh):` of a mesh with these axes, or give NamedShardings on a mesh"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TargetLeaf:
    """Description of a leaf of the target.

    Attributes:
      kind: "jax" (a `jax.Array`), "key" (a typed PRNG key), "numpy", "scalar" (of `scalar_type`), "keep" (a
        placeholder, stays as it is) or "none" (no leaf, only a name).
      shape, dtype: as stored; for a typed key those of its uint32 key data.
      sharding: of the array to make; None for what stays on the host, and for "one device".
      layout: a `jax.experimental.layout.Format` where the target asks for a layout that is not the default, else None.
      scalar_type: the Python or NumPy type of a scalar.
      key_impl: the implementation's name of a typed PRNG key.
      is_param: whether `dtype=` applies to it where it is of a floating-point type.
      is_variable: whether it is the value of an `nnx.Variable`, behind whose name stock Orbax writes `/value`.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    sharding: jax.sharding.Sharding | None = None
    layout: Any = None
    scalar_type: type | None = None
    key_impl: str | None = None
    is_param: bool = False
    is_variable: bool = False

    @property
    def is_on_host(self) -> bool:
        """True for a NumPy array or a scalar."""
        return self.kind in ("numpy", "scalar")

    @property
    def is_float_param(self) -> bool:
        """True for a leaf that `dtype=` casts: a model parameter."""
        return self.is_param and self.kind in ("jax", "numpy") and kind_of(self.dtype) == "float"

    @property
    def placing(self) -> Any:
        """The `device` argument for `jax.device_put`."""
        return self.layout if self.layout is not None else self.sharding


class MissingLeaf(NamedTuple):
    """A leaf of the target that nothing fills.

    `is_none`: the checkpoint has None under the name. `is_reset`: a transform found that it has no counterpart.
    `is_barred`: the fallback has a value, and `fallback_for` does not let it fill the leaf.
    """

    name: str
    leaf: TargetLeaf
    is_none: bool
    is_reset: bool
    is_barred: bool = False


def describe_leaf(name: str, leaf: Any, *, is_param: bool = False, is_variable: bool = False) -> TargetLeaf | Problem:
    """Describes a leaf of the target, or returns the problem with it."""
    if leaf is Ellipsis:
        return TargetLeaf("keep")
    if leaf is None:
        return TargetLeaf("none")
    if isinstance(leaf, np.ndarray):
        return TargetLeaf("numpy", leaf.shape, leaf.dtype, is_param=is_param, is_variable=is_variable)
    if isinstance(leaf, type) and issubclass(leaf, _SCALARS):
        with contextlib.suppress(TypeError):  # np.generic and other abstract classes make no value
            leaf = leaf()
    if isinstance(leaf, _SCALARS):
        return _describe_scalar(leaf, is_param, is_variable)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        if not jax.tree_util.tree_leaves(leaf):  # a node without leaves, such as Flax's names of axes in an NNX state
            return TargetLeaf("keep")
        return _unknown(name, leaf, f"a leaf of type {type(leaf).__name__} can not be restored into")
    if type(leaf).__module__.startswith(_ORBAX) and not hasattr(type(leaf), "sharding"):
        return TargetLeaf("numpy", tuple(shape), np.dtype(dtype), is_param=is_param, is_variable=is_variable)
    try:
        sharding = getattr(leaf, "sharding", None)
    except (TypeError, ValueError) as error:  # JAX puts a PartitionSpec on the mesh in use when it is asked for
        message = f"its PartitionSpec does not fit the mesh in use: {error}"
        return Problem("sharding", name, message, Fix.in_program(_GIVE_MESH))
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = None
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sharding = _on_mesh_in_use(sharding)
        if sharding is None:
            return _abstract_mesh(name, leaf)
    if not isinstance(dtype, np.dtype):
        try:
            if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
                return _describe_key(name, leaf, sharding, is_variable)
            dtype = np.dtype(dtype)
        except TypeError:
            return _unknown(name, leaf, f"its dtype {dtype!r} is neither NumPy's nor JAX's")
    layout = _special_layout(leaf, sharding)
    return TargetLeaf("jax", tuple(shape), dtype, sharding, layout, is_param=is_param, is_variable=is_variable)


def _unknown(name: str, leaf: Any, message: str) -> Problem:
    fix = "use jax.ShapeDtypeStruct, jax.Array, np.ndarray, a scalar, or ... to leave it out"
    if callable(getattr(leaf, "init", None)) and callable(getattr(leaf, "apply", None)):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        message = f"{kind.__name__} is a model, and a target has the shapes of what it holds"
        fix = "pass jax.eval_shape(model.init, …), with what model.init takes"
    elif isinstance(leaf, type):
        message = f"{leaf.__name__} is a class, and a target has the shapes of what an object of it holds"
        fix = (
            f"pass nnx.eval_shape(lambda: {leaf.__name__}(…)) of an NNX model, or jax.eval_shape(function) with a "
            "function that makes the object"
        )
    elif callable(leaf):
        fix = (
            "give the shapes of what it makes: jax.eval_shape(function), of a linen model jax.eval_shape(model.init, …)"
        )
    return Problem("target", name, message, Fix.by_target(fix))


def _describe_scalar(leaf: Any, is_param: bool, is_variable: bool) -> TargetLeaf:
    if isinstance(leaf, str | bytes):
        dtype = np.dtype(object)
    else:
        dtype = leaf.dtype if isinstance(leaf, np.generic) else np.asarray(leaf).dtype
    return TargetLeaf("scalar", (), dtype, scalar_type=type(leaf), is_param=is_param, is_variable=is_variable)


# -- typed keys


def _describe_key(
    name: str, leaf: Any, sharding: jax.sharding.Sharding | None, is_variable: bool
) -> TargetLeaf | Problem:
    impl = key_impl_of(leaf.dtype)
    if impl is None:
        known = ", ".join(_KEY_IMPLEMENTATIONS)
        return _unknown(name, leaf, f"its PRNG key type {leaf.dtype} is unknown; known are {known}")
    shape = key_data_shape(leaf.shape, leaf.dtype)
    return TargetLeaf("key", shape, np.dtype(np.uint32), sharding, key_impl=impl, is_variable=is_variable)


def is_key_dtype(dtype: Any) -> bool:
    """Returns True for the dtype of typed PRNG keys."""
    return not isinstance(dtype, np.dtype) and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl_of(dtype: Any) -> str | None:
    """Returns a typed key dtype's implementation, or None."""
    return next((name for name in _KEY_IMPLEMENTATIONS if _key_dtype(name) == dtype), None)


def key_data_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Returns the shape of the uint32 data of typed keys."""
    return tuple(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype)).shape)


def impls_of_data(shape: tuple[int, ...]) -> list[str]:
    """Returns the implementations with key data of this shape."""
    return [impl for impl in _KEY_IMPLEMENTATIONS if key_data_shape((), _key_dtype(impl)) == shape]


@functools.cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


# -- placing


def _on_mesh_in_use(sharding: NamedSharding) -> NamedSharding | None:
    """Moves an abstract sharding to the mesh in use."""
    mesh = jax.sharding.get_mesh()
    if dict(mesh.shape) != dict(sharding.mesh.shape):
        return None
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _abstract_mesh(name: str, leaf: Any) -> Problem:
    wanted, in_use = dict(leaf.sharding.mesh.shape), dict(jax.sharding.get_mesh().shape)
    used = f"the mesh in use has axes {in_use}" if in_use else "no mesh is in use"
    message = f"its sharding is over an abstract mesh with axes {wanted}, which has no devices, and {used}"
    return Problem("sharding", name, message, Fix.in_program(_GIVE_MESH))


def _special_layout(leaf: Any, sharding: jax.sharding.Sharding | None) -> Format | None:
    """Returns the leaf's Format if it is special, else None.

    A layout is special if not row-major: passing the default costs more.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct) or isinstance(leaf, jax.Array):  # the check of jax.Array is slow
        layout = getattr(getattr(leaf, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(len(order))):
            return Format(layout, sharding)
    return None
