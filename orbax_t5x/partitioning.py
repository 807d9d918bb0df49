"""From logical axes to the abstract state with shardings that a restore wants.

A model names the axes of its parameters (`flax.linen.partitioning.param_with_axes`); rules say which mesh axis a
logical one is split over; Flax's `logical_to_mesh_axes` applies them. The result has a `NamedSharding` on every leaf
and no array. A logical axis without a rule, a rule for a mesh axis that the mesh lacks, and a leaf without axes mean:
not split. A dimension that its mesh axes do not divide is an error that lists every such leaf, since JAX would refuse
the first one later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_t5x.trees.pytree_names import key_text

MeshAxes = str | tuple[str, ...] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]

STANDARD_LOGICAL_AXIS_RULES: LogicalAxisRules = (
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
    ("relpos_buckets", None),
    ("abspos_buckets", None),
    ("length", None),
    ("layers", None),
    ("stack", None),
    ("mlp_activations", None),
)
"""T5X's rules for a mesh with the axes `data` and `model`: batches over `data`, wide dimensions over `model`."""

# Leaves named in one error; a mesh that does not fit a model fits hundreds of its leaves not.
_SHOWN_LEAVES = 10

_State = TypeVar("_State")


def with_shardings(
    train_state: _State, mesh: Mesh | AbstractMesh, rules: LogicalAxisRules = STANDARD_LOGICAL_AXIS_RULES
) -> _State:
    """The abstract train state with a sharding on every leaf: a target for `orbax_t5x.restore`.

    Args:
      train_state: a `FlaxOptimTrainState` or `InferenceState` with `params_axes`, concrete or abstract
        (`jax.eval_shape`); anything with `as_logical_axes`.
      mesh: the devices.
      rules: pairs of a logical axis name and the mesh axis, or axes, that it is split over (None: not split); earlier
        ones go first, and no mesh axis is used twice in one leaf.

    Returns:
      A state of the same kind and structure whose leaves are `jax.ShapeDtypeStruct`s with a `NamedSharding`.

    Raises:
      TypeError: the state knows no logical axes at all.
      ValueError: the model named no axes, a leaf has another rank than its axes, or a dimension is not divided evenly.
    """
    as_logical_axes = getattr(train_state, "as_logical_axes", None)
    if as_logical_axes is None:
        raise TypeError(
            "with_shardings takes a train state with logical axes (FlaxOptimTrainState, InferenceState), not "
            f"{type(train_state).__name__}; in any other tree, put jax.ShapeDtypeStruct(shape, dtype, sharding=...) in "
            "the place of the leaves"
        )
    logical = _LogicalAxes(as_logical_axes())
    rules = _rules_for(mesh, rules)
    problems: list[str] = []

    def shard(path: Sequence[Any], leaf: Any) -> jax.ShapeDtypeStruct:
        keys = tuple(key_text(key) for key in path)
        shape, dtype = _shape_dtype(leaf)
        try:
            spec = _mesh_spec(logical.names(keys), shape, mesh, rules, "/".join(keys), problems)
        except KeyError:
            problems.append(f"{'/'.join(keys)}: params_axes names no axes for it")
            spec = PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    abstract = jax.tree_util.tree_map_with_path(shard, train_state)
    if problems:
        more = len(problems) - _SHOWN_LEAVES
        text = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN_LEAVES])
        raise ValueError(
            f"{len(problems)} leaves do not fit the mesh {dict(mesh.shape)} under these rules:\n{text}"
            + (f"\n  … and {more} more" if more > 0 else "")
        )
    return abstract


class _LogicalAxes:
    """The logical axes of each leaf, by its place in the state."""

    def __init__(self, axes_state: Any):
        found, _ = jax.tree_util.tree_flatten_with_path(axes_state, is_leaf=_is_axes)
        self._names = {tuple(key_text(key) for key in path): names for path, names in found}

    def names(self, keys: tuple[str, ...]) -> PartitionSpec | None:
        """The names; None where the leaf, or a node above it, or its collection of mutable variables has none.

        Raises:
          KeyError: the state has a leaf that the state of axes does not have.
        """
        for end in range(len(keys), -1, -1):
            if keys[:end] in self._names:
                return self._names[keys[:end]]
        if keys[0] == "flax_mutables":
            return None
        raise KeyError(keys)


def _is_axes(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _shape_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    return tuple(leaf.shape), leaf.dtype


def _rules_for(mesh: Mesh | AbstractMesh, rules: LogicalAxisRules) -> tuple[tuple[str, MeshAxes], ...]:
    """The rules without the mesh axes that the mesh lacks; one that has only such axes leaves room for a later one."""
    present = set(mesh.axis_names)
    kept: list[tuple[str, MeshAxes]] = []
    for logical, mesh_axes in rules:
        if mesh_axes is None or (isinstance(mesh_axes, str) and mesh_axes in present):
            kept.append((logical, mesh_axes))
        elif not isinstance(mesh_axes, str):
            remaining = tuple(axis for axis in mesh_axes if axis in present)
            if remaining:
                kept.append((logical, remaining))
    return tuple(kept)


def _mesh_spec(
    names: PartitionSpec | None,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    rules: tuple[tuple[str, MeshAxes], ...],
    where: str,
    problems: list[str],
) -> PartitionSpec:
    """The mesh axes of one leaf; what is wrong goes to the problems."""
    if names is None:
        return PartitionSpec()
    if len(names) != len(shape):
        problems.append(f"{where}: {len(names)} logical axes {tuple(names)} for shape {shape}")
        return PartitionSpec()
    spec = logical_to_mesh_axes(tuple(names), rules)
    assert spec is not None
    for size, name, mesh_axes in zip(shape, names, spec, strict=True):
        axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes or ())
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if size % devices:
            problems.append(
                f"{where}: logical axis {name!r} has size {size}, which mesh axis {'*'.join(axes)} of size {devices} "
                f"does not divide; give it the rule ({name!r}, None) or another mesh"
            )
    return spec
