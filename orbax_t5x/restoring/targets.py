"""A target, flattened: what each leaf must become, under which name, and how the whole is put together again.

Any pytree is a target; T5X's train states and `nnx.State` name their own leaves. Nothing here touches array bytes, and
nothing imports
Flax: a train state is known by its methods, and `nnx.State` can only be met where `flax.nnx` is loaded already.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from orbax_t5x.errors import Problem
from orbax_t5x.trees.flat import flatten, unflatten

Kind = Literal["jax", "key", "numpy", "scalar", "keep", "none"]

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetLeaf:
    """What one leaf of the target must become.

    Attributes:
      kind: "jax" (a `jax.Array`), "key" (a typed PRNG key), "numpy", "scalar" (of `scalar_type`), "keep" (a
        placeholder, stays as it is) or "none" (no leaf, only a name).
      shape, dtype: as stored; for a typed key those of its uint32 key data.
      sharding: of the array to make; None for what stays on the host, and for "one device".
      layout: a `jax.experimental.layout.Format` where the target asks for a layout that is not the default, else None.
      scalar_type: the Python or NumPy type of a scalar.
      key_impl: the implementation's name of a typed PRNG key.
      is_param: whether `dtype=` applies to it.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    sharding: jax.sharding.Sharding | None = None
    layout: Any = None
    scalar_type: type | None = None
    key_impl: str | None = None
    is_param: bool = False


@dataclasses.dataclass(frozen=True)
class Target:
    """A flattened target.

    Attributes:
      leaves: by '/'-joined name, in the target's order.
      original: the target's own leaves by name: what transforms see and what a "keep" leaf stays.
      rebuild: puts values by name into the target's structure.
      kind: "tree", "t5x", "inference" (a T5X train state without optimizer), "nnx" or "everything".
      problems: names that collide and leaves of unknown type.
    """

    leaves: Mapping[str, TargetLeaf]
    original: Mapping[str, Any]
    rebuild: Callable[[Mapping[str, Any]], Any]
    kind: Literal["tree", "t5x", "inference", "nnx", "everything"]
    problems: tuple[Problem, ...] = ()


def flatten_target(target: Any) -> Target:
    """Flattens any target of `orbax_t5x.restore`; see the contract there."""
    if target is None:
        # A TF bundle may hold both `a` and `a/b`.
        return Target({}, {}, functools.partial(unflatten, join_clashes=True), "everything")
    nnx_adapter = _nnx_adapter(target)
    if nnx_adapter is not None:
        named, rebuild = nnx_adapter.flatten_target(target)
        return _build(
            [(name, leaf) for name, leaf, _ in named], rebuild, "nnx", {name for name, _, param in named if param}
        )
    if is_train_state(target):
        flat = flatten(target.state_dict())
        kind = "t5x" if _has_optimizer(target) else "inference"
        return _build(flat.items(), lambda values: target.restore_state(unflatten(values)), kind)
    paths, treedef = jax.tree_util.tree_flatten_with_path(target)
    names = [leaf_name(path) for path, _ in paths]
    return _build(
        zip(names, (leaf for _, leaf in paths), strict=True),
        lambda values: jax.tree_util.tree_unflatten(treedef, [values[name] for name in names]),
        "tree",
    )


def is_train_state(target: Any) -> bool:
    """Whether it names its own leaves, as T5X's train states do."""
    if isinstance(target, type):
        return False
    return callable(getattr(target, "state_dict", None)) and callable(getattr(target, "restore_state", None))


def _has_optimizer(train_state: Any) -> bool:
    try:
        _ = train_state.param_states
    except (NotImplementedError, AttributeError):
        return False
    return True


def _nnx_adapter(target: Any) -> Any:
    """`orbax_t5x.nnx` if the target is an `nnx.State`; Flax NNX is never imported for anyone who has not done so."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(target, nnx.State):
        return None
    return importlib.import_module("orbax_t5x.nnx")


def leaf_name(path: Sequence[Any]) -> str:
    """The name that `flax.serialization.to_state_dict` gives a leaf: dict keys, field names and indices, '/'-joined."""
    return "/".join(_key_text(key) for key in path)


def _key_text(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if value is not None:
            return str(value)
    return str(key)


def _build(
    named: Iterable[tuple[str, Any]],
    rebuild: Callable[[Mapping[str, Any]], Any],
    kind: Any,
    params: set[str] | None = None,
) -> Target:
    leaves: dict[str, TargetLeaf] = {}
    original: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, leaf in named:
        if name in leaves:
            problems.append(
                Problem("duplicate", name, "two leaves of the target have this name", "rename one of the target's keys")
            )
            continue
        is_param = name in params if params is not None else name.startswith(("target/", "params/")) or name == "params"
        described = _describe(leaf, is_param)
        if described is None:
            problems.append(
                Problem(
                    "target",
                    name,
                    f"a leaf of type {type(leaf).__name__} can not be restored into",
                    "use jax.ShapeDtypeStruct, jax.Array, np.ndarray, a scalar, or ... to leave it out",
                )
            )
            continue
        leaves[name] = described
        original[name] = leaf
    return Target(leaves, original, rebuild, kind, tuple(problems))


def _describe(leaf: Any, is_param: bool) -> TargetLeaf | None:
    if leaf is Ellipsis:
        return TargetLeaf("keep")
    if leaf is None:
        return TargetLeaf("none")
    if isinstance(leaf, np.ndarray):
        return TargetLeaf("numpy", leaf.shape, leaf.dtype, is_param=is_param)
    if isinstance(leaf, _SCALARS):
        return _describe_scalar(leaf, is_param)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return None
    sharding = getattr(leaf, "sharding", None)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return TargetLeaf("key", data.shape, np.dtype(data.dtype), sharding, key_impl=_key_impl(leaf))
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = None
    return TargetLeaf("jax", tuple(shape), np.dtype(dtype), sharding, _special_layout(leaf), is_param=is_param)


def _describe_scalar(leaf: Any, is_param: bool) -> TargetLeaf:
    if isinstance(leaf, str | bytes):
        return TargetLeaf("scalar", (), np.dtype(object), scalar_type=type(leaf))
    dtype = leaf.dtype if isinstance(leaf, np.generic) else np.asarray(leaf).dtype
    return TargetLeaf("scalar", (), dtype, scalar_type=type(leaf), is_param=is_param)


def _key_impl(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    for name in _KEY_IMPLEMENTATIONS:
        if _key_dtype(name) == leaf.dtype:
            return name
    raise ValueError(f"unknown PRNG key type {leaf.dtype}; known are {', '.join(_KEY_IMPLEMENTATIONS)}")


@functools.cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _special_layout(leaf: Any) -> Any:
    """The leaf's Format where its layout is not row-major, else None (asking costs microseconds; passing it on would
    cost more).
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        format_ = getattr(leaf, "format", None)
        layout = getattr(format_, "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(len(order))):
            return format_
    return None
