"""Whole states with shardings: T5X's train states, linen's with `nn.Partitioned`, NNX's, or any tree by leaf names.

They differ in the origin of a leaf's axes. A T5X train state has a separate state of axes; linen and NNX keep
a leaf's axes in the box or the variable that holds it, also in the optimizer's state, which Optax makes of the same
boxes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from flax.core.meta import Partitioned
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_t5x.partitioning.rules import STANDARD_LOGICAL_AXIS_RULES, AxisNames, AxisRules, LogicalAxisRules
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.pytree_names import key_text, leaf_name

# Leaves named in one error; a mesh that does not fit a model fits hundreds of its leaves not.
_SHOWN_LEAVES = 10
# What Flax has called the axes of an NNX variable, the newest first.
_NNX_AXES = ("out_sharding", "sharding_names", "sharding")

_State = TypeVar("_State")


def with_shardings(
    train_state: _State, mesh: Mesh | AbstractMesh, rules: LogicalAxisRules = STANDARD_LOGICAL_AXIS_RULES
) -> _State:
    """Returns the abstract state with a sharding on every leaf: a target for `orbax_t5x.restore`.

    Args:
      train_state: concrete or abstract (`jax.eval_shape`). A `FlaxOptimTrainState` or `InferenceState` with
        `params_axes`, or anything with `as_logical_axes`; a tree, such as Flax's `TrainState` or variables, whose
        arrays are in `nn.Partitioned` or `nn.LogicallyPartitioned` boxes; an `nnx.State` or `nnx.Module` whose
        variables have partitioning metadata. With rules for names of leaves: any tree.
      mesh: the devices.
      rules: pairs of a logical axis name and the mesh axis, or axes, that it is split over (None: not split); earlier
        ones go first, and no mesh axis is used twice in one leaf. In boxes and variables a name without a rule may be a
        mesh axis itself, and rules of their own go first. A pair of a regex and a `PartitionSpec` is for leaves whose
        whole '/'-joined name the regex matches, before all others: `(".*/embedding", PartitionSpec("model"))`. The
        name of a leaf in a box is that of the box, and a T5X state's leaves have those of its state dict.

    Returns:
      A state of the same kind and structure (boxes and metadata included) whose leaves are `jax.ShapeDtypeStruct`s
      with a `NamedSharding`. Leaves without a rule are not split. A regex that no leaf has
      taken is a warning.

    Raises:
      TypeError: no leaf has a rule.
      ValueError: the model named no axes, a leaf has another rank than its axes, or a dimension is not divided evenly;
        all such leaves at once.

    Example:
      >>> mesh = jax.make_mesh((8,), ("model",))
      >>> state = {"embedding": jax.ShapeDtypeStruct((128, 16), jnp.float32)}
      >>> split = ot.with_shardings(state, mesh, [(".*embedding", jax.sharding.PartitionSpec("model"))])
      >>> split["embedding"].sharding.shard_shape((128, 16))
      (16, 16)
    """
    loaded = sys.modules.get("flax.nnx")
    if loaded is not None and isinstance(train_state, loaded.Pytree) and not isinstance(train_state, loaded.State):
        # A variable that a module has several times is one in its state.
        graph, state = loaded.split(train_state)
        return loaded.merge(graph, with_shardings(state, mesh, rules))
    axis_rules = AxisRules(rules, mesh)
    if hasattr(train_state, "as_logical_axes"):
        abstract = _with_logical_axes(train_state, mesh, axis_rules)
    else:
        abstract = _with_metadata(train_state, mesh, axis_rules)
    problems = axis_rules.problems
    if problems:
        more = len(problems) - _SHOWN_LEAVES
        text = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN_LEAVES])
        raise ValueError(
            f"{len(problems)} leaves do not fit the mesh {dict(mesh.shape)} under these rules:\n{text}"
            + (f"\n  … and {more} more" if more > 0 else "")
        )
    if axis_rules.unused_patterns:
        patterns = listed(map(repr, axis_rules.unused_patterns), 5)
        warnings.warn(
            f"rules that no leaf's whole name matches, or none that an earlier rule leaves: {patterns}. What they are "
            "meant for is not split by them",
            stacklevel=2,
        )
    return cast(_State, abstract)


def _abstract(leaf: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    shape, dtype = _shape_dtype(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _shape_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    return tuple(leaf.shape), leaf.dtype


# -- states with a separate state of axes


def _with_logical_axes(train_state: Any, mesh: Mesh | AbstractMesh, rules: AxisRules) -> Any:
    logical = _LogicalAxes(train_state.as_logical_axes())

    def shard(path: Sequence[Any], leaf: Any) -> jax.ShapeDtypeStruct:
        keys = tuple(key_text(key) for key in path)
        shape, _ = _shape_dtype(leaf)
        spec = rules.by_name(_name_in_state_dict(keys), shape)
        if spec is None:
            try:
                spec = rules.by_logical_axes(logical.names(keys), shape, "/".join(keys))
            except KeyError:
                rules.problems.append(f"{'/'.join(keys)}: params_axes names no axes for it")
                spec = PartitionSpec()
        return _abstract(leaf, mesh, spec)

    return jax.tree_util.tree_map_with_path(shard, train_state)


def _name_in_state_dict(keys: Sequence[str]) -> str:
    """Returns the name that the state dict of a T5X train state has for a leaf of its pytree."""
    first, *rest = keys
    start = {"_optimizer": [], "params": ["target"], "step": ["state", "step"]}.get(first, [first])
    return "/".join([*start, *rest])


class _LogicalAxes:
    """The logical axes of each leaf, by its place in the state."""

    def __init__(self, axes_state: Any):
        found, _ = jax.tree_util.tree_flatten_with_path(axes_state, is_leaf=_is_axes)
        self._names = {tuple(key_text(key) for key in path): names for path, names in found}

    def names(self, keys: tuple[str, ...]) -> PartitionSpec | None:
        """Returns the names; None where the leaf, a node above it, or its collection of mutable variables has none.

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


# -- trees whose boxes and variables have metadata


def _with_metadata(tree: Any, mesh: Mesh | AbstractMesh, rules: AxisRules) -> Any:
    has_axes = rules.has_patterns

    def shard(path: Sequence[Any], node: Any) -> Any:
        nonlocal has_axes
        is_box, is_variable = isinstance(node, Partitioned), _is_variable(node)
        value = node.value if is_box else node.get_value() if is_variable else node
        name = leaf_name(path)
        names, own_rules = _axes_of_box(node) if is_box else _axes_of_variable(node) if is_variable else (None, ())
        has_axes = has_axes or names is not None
        shape, _ = _shape_dtype(value)
        spec = rules.by_name(name, shape)
        if spec is None:
            spec = PartitionSpec() if names is None else rules.by_metadata(names, shape, own_rules, name)
        abstract = _abstract(value, mesh, spec)
        return node.replace_boxed(abstract) if is_box else node.replace(abstract) if is_variable else abstract

    abstract = jax.tree_util.tree_map_with_path(
        shard, tree, is_leaf=lambda node: isinstance(node, Partitioned) or _is_variable(node)
    )
    if not has_axes:
        axes = isinstance(tree, Mapping) and "params_axes" in tree
        raise TypeError(
            "with_shardings takes a train state with logical axes (FlaxOptimTrainState, InferenceState), or a tree "
            f"with nn.Partitioned boxes or NNX metadata, and {type(tree).__name__} has none; for any other tree give "
            "rules of names, (regex, PartitionSpec), or put jax.ShapeDtypeStruct(shape, dtype, sharding=...) in the "
            "place of the leaves"
            + ("; variables with params_axes become a train state by InferenceState.create(variables)" if axes else "")
        )
    return abstract


def _is_variable(node: Any) -> bool:
    # A variable can only be met where `flax.nnx` is loaded.
    loaded = sys.modules.get("flax.nnx")
    return loaded is not None and isinstance(node, loaded.Variable)


def _axes_of_box(box: Any) -> tuple[AxisNames, LogicalAxisRules]:
    return box.names, getattr(box, "rules", None) or ()


def _axes_of_variable(variable: Any) -> tuple[AxisNames | None, LogicalAxisRules]:
    metadata = variable.get_metadata()
    found = next((metadata[name] for name in _NNX_AXES if metadata.get(name)), None)
    # It may be a layout of a sharding, a sharding, or its axes.
    found = getattr(found, "sharding", found)
    return getattr(found, "spec", found), metadata.get("sharding_rules") or ()
