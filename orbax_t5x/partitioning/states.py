"""Whole states with shardings, for `orbax_t5x.restore`.

They are T5X's train states, linen's with `nn.Partitioned`, NNX's, or any tree by leaf names. They differ in the origin
of a leaf's axes. A T5X train state has a separate state of axes, and T5X's networks make a collection `params_axes`;
linen and NNX keep a leaf's axes in the box or the variable that holds it, also in the optimizer's state, which Optax
makes of the same boxes. What has no axes of its own, and belongs to a parameter, is split as that is.

A leaf belongs to the parameter whose name its own name contains: `opt_state/0/mu/encoder/kernel` and T5X's
`state/param_states/encoder/kernel/v_row` to `encoder/kernel`. A leaf of the parameter's shape is split as it is; one
that lacks some of the dimensions (a factored second moment), or has more in front (a stack), in those that both have.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
from flax.core.meta import Partitioned
from flax.linen.partitioning import AxisMetadata
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_t5x.optim.moments import find_optimizer, plain_name
from orbax_t5x.optim.optax_axes import StateLeaf, slot_axes
from orbax_t5x.partitioning.rules import STANDARD_LOGICAL_AXIS_RULES, AxisNames, AxisRules, LogicalAxisRules
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.trees.named_leaves import require_levels
from orbax_t5x.trees.pytree_names import key_text, leaf_name

# Leaves named in one error; a mesh that does not fit a model fits hundreds of its leaves not.
_SHOWN_LEAVES = 10
# What Flax has called the axes of an NNX variable, the newest first.
_NNX_AXES = ("out_sharding", "sharding_names", "sharding")
# The parts of names below which a train state has its parameters.
_PARAMETERS = ("params", "target")
# T5X's networks put the axes of a collection `X` into a collection `X_axes`, as `name_axes` for `name`.
_AXES_SUFFIX = "_axes"

_State = TypeVar("_State")


class SplitParameter(NamedTuple):
    """A parameter and its split; `rule` is the deciding pattern."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    rule: str | None = None
    by_axes: bool = False

    def spec_for(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the split of a leaf that belongs to the parameter.

        A leaf of an unrelated shape is not split.
        """
        slot = StateLeaf(tuple(name.split("/")), shape)
        return slot_axes(slot, self.spec, self.shape) or PartitionSpec()


class SplitParameters:
    """Table of parameters by the words in names of other leaves."""

    def __init__(self, parameters: Mapping[str, SplitParameter]):
        self._by_parts = {tuple(name.split("/")): parameter for name, parameter in parameters.items()}
        self._longest = max(map(len, self._by_parts), default=0)

    def __bool__(self) -> bool:
        return bool(self._by_parts)

    def of(self, name: str) -> SplitParameter | None:
        """Returns the parameter with the longest name in a name.

        Of equally long names, the last in the name counts.
        """
        parts = tuple(name.split("/"))
        for length in range(min(self._longest, len(parts)), 0, -1):
            for start in range(len(parts) - length, -1, -1):
                found = self._by_parts.get(parts[start : start + length])
                if found is not None:
                    return found
        return None


def with_shardings(
    train_state: _State,
    mesh: Mesh | AbstractMesh,
    rules: LogicalAxisRules = STANDARD_LOGICAL_AXIS_RULES,
    like: Any = None,
) -> _State:
    """Returns the abstract state with a sharding on every leaf.

    It is a target for `orbax_t5x.restore`. The leaves of an optimizer are split as their parameters, where no rule says
    otherwise: momenta and accumulators, the factors of a second moment in the dimensions that they have, stacks behind
    their first dimension. In a T5X train state whose parameters have axes, T5X's optimizers decide: Adafactor's factors
    are not split.

    Args:
      train_state: concrete or abstract (`jax.eval_shape`). A `FlaxOptimTrainState` or `InferenceState` with
        `params_axes`, or anything with `as_logical_axes`; a tree, such as Flax's `TrainState` or variables, whose
        arrays are in `nn.Partitioned` or `nn.LogicallyPartitioned` boxes, or which has the collection `params_axes` of
        T5X's networks; an `nnx.State` or `nnx.Module` whose variables have partitioning metadata. With rules for
        names of leaves, without rules, or with `like`: any tree.
      mesh: the devices.
      rules: pairs of a logical axis name and the mesh axis, or axes, that it is split over (None: not split); earlier
        ones go first, and no mesh axis is used twice in one leaf. In boxes and variables a name without a rule may be a
        mesh axis itself, and rules of their own go first. A pair of a regex and a `PartitionSpec` is for leaves whose
        whole '/'-joined name the regex matches, before all others: `(".*/embedding", PartitionSpec("model"))`. The
        name of a leaf in a box is that of the box, and a T5X state's leaves have those of its state dict. Without
        rules, `[]`, nothing is split.
      like: a tree whose leaves have `NamedSharding`s, such as the parameters of a running job. Every leaf whose name
        ends in the name of one of its leaves is split as that, before all rules.

    Returns:
      A state of the same kind and structure (boxes and metadata included) whose leaves are `jax.ShapeDtypeStruct`s
      with a `NamedSharding`. Leaves without a rule are not split. A regex that no leaf has
      taken is a warning.

    Raises:
      TypeError: no leaf has a rule.
      ValueError: the model named no axes, a leaf has another rank than its axes or its rule, a `PartitionSpec` of the
        rules names an axis that the mesh lacks, or a dimension is not divided evenly; all such leaves at once.

    Example:
      >>> mesh = jax.make_mesh((8,), ("model",))
      >>> state = {"embedding": jax.ShapeDtypeStruct((128, 16), jnp.float32)}
      >>> split = ot.with_shardings(state, mesh, [(".*embedding", jax.sharding.PartitionSpec("model"))])
      >>> split["embedding"].sharding.shard_shape((128, 16))
      (16, 16)
    """
    if isinstance(train_state, Mesh | AbstractMesh) or not isinstance(mesh, Mesh | AbstractMesh):
        given = type(train_state).__name__, type(mesh).__name__
        raise TypeError(f"with_shardings takes a state and a mesh, and {' and '.join(given)} were given")
    require_levels(train_state)
    loaded = sys.modules.get("flax.nnx")
    if loaded is not None and isinstance(train_state, loaded.Pytree) and not isinstance(train_state, loaded.State):
        # A variable that a module has several times is one in its state.
        graph, state = loaded.split(train_state)
        return loaded.merge(graph, with_shardings(state, mesh, rules, like))
    axis_rules = AxisRules(rules, mesh)
    is_t5x = hasattr(train_state, "as_logical_axes")
    leaves, treedef = _open_t5x_state(train_state, axis_rules, like) if is_t5x else _open_tree(train_state, axis_rules)
    if not (axis_rules.is_empty or axis_rules.has_patterns or like is not None or is_t5x):
        if all(leaf.axes is None for leaf in leaves):
            raise _no_axes(train_state)
    specs = _Splitting(axis_rules, _sharded_leaves(like, axis_rules)).specs(leaves)
    _report(axis_rules, mesh)
    made = [leaf.put(_abstract(leaf, mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)]
    return cast(_State, jax.tree_util.tree_unflatten(treedef, made))


class _ShardableLeaf(NamedTuple):
    """A leaf, or a box or variable around it.

    Attributes:
      name: that rules match.
      where: the name in errors about axes.
      axes: what the model calls its dimensions; None: not known.
      own_rules: for its axes.
      is_logical: whether the axes are logical ones, all of them with a name.
      is_parameter: whether an optimizer's leaves may belong to it.
      put: puts an abstract value in place of the leaf's.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: Any
    axes: AxisNames | None
    own_rules: LogicalAxisRules = ()
    is_logical: bool = False
    is_parameter: bool = False
    put: Callable[[Any], Any] = lambda abstract: abstract


class _Splitting:
    """Splitting of a state's leaves: parameters first, then their slots."""

    def __init__(self, rules: AxisRules, like: SplitParameters):
        self._rules = rules
        self._like = like

    def specs(self, leaves: Sequence[_ShardableLeaf]) -> list[PartitionSpec]:
        decided = [self._decided(leaf, None) if leaf.is_parameter else None for leaf in leaves]
        named = {leaf.name: found for leaf, found in zip(leaves, decided, strict=True) if found is not None}
        by_name = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves}
        plain = {plain_name(name): split for name, split in named.items()}
        slots = find_optimizer(by_name).parameters_of_slots()
        parameters = {slot: plain.get(parameter) for slot, parameter in slots.items()}
        specs = [
            found or self._decided(leaf, parameters.get(leaf.name)) for leaf, found in zip(leaves, decided, strict=True)
        ]
        return [found.spec for found in specs]

    def _decided(self, leaf: _ShardableLeaf, parameter: SplitParameter | None) -> SplitParameter:
        """Decides about a leaf and the parameter that it belongs to."""
        shape, by_axes = leaf.shape, False
        liked = self._like.of(leaf.name)
        rule = self._rules.pattern_of(leaf.name)
        # The parameter's own rule is for the parameter's dimensions.
        is_for_parameter = parameter is not None and parameter.shape != shape and parameter.rule == rule
        if liked is not None:
            spec = self._rules.checked(liked.spec_for(leaf.name, shape), shape, leaf.name)
        elif rule is not None and not is_for_parameter:
            spec = self._rules.by_name(leaf.name, shape)
        elif parameter is not None and not self._has_axes(leaf, parameter):
            spec = parameter.spec_for(leaf.name, shape)
        elif leaf.axes is None:
            spec = PartitionSpec()
        else:
            by_axes = True
            if leaf.is_logical:
                spec = self._rules.by_logical_axes(leaf.axes, shape, leaf.where)
            else:
                spec = self._rules.by_metadata(leaf.axes, shape, leaf.own_rules, leaf.name)
        return SplitParameter(shape, spec, rule, by_axes)

    def _has_axes(self, leaf: _ShardableLeaf, parameter: SplitParameter) -> bool:
        """Tests if a parameter's leaf is split by axes of its own."""
        if not parameter.by_axes:
            return False
        # T5X's optimizers say None of what they do not split; a box keeps all axes of the parameter.
        return leaf.is_logical if leaf.axes is None else len(leaf.axes) == len(leaf.shape)


def _report(rules: AxisRules, mesh: Mesh | AbstractMesh) -> None:
    """Warns of unused rules; raises ValueError if specs do not fit."""
    if rules.problems:
        # The first line is the first problem: logs and notebooks often show no other.
        found = len(rules.problems)
        text = listed(rules.problems, _SHOWN_LEAVES, separator="\n")
        what = f"{leaves_text(found)} {'does' if found == 1 else 'do'} not fit the mesh {dict(mesh.shape)}"
        raise ValueError(f"{text}\n{what} under these rules")
    if rules.unused_patterns:
        patterns = listed(map(repr, rules.unused_patterns), 5)
        warnings.warn(
            f"rules that no leaf's whole name matches, or none that an earlier rule leaves: {patterns}. What they are "
            "meant for is not split by them",
            stacklevel=3,
        )


def _no_axes(tree: Any) -> TypeError:
    return TypeError(
        "with_shardings takes a train state with logical axes (FlaxOptimTrainState, InferenceState), or a tree "
        f"with nn.Partitioned boxes, params_axes or NNX metadata, and {type(tree).__name__} has none; for any other "
        "tree give rules of names, [(regex, PartitionSpec)], or [] to split nothing, or like= a tree with shardings, "
        "or put jax.ShapeDtypeStruct(shape, dtype, sharding=...) in the place of the leaves"
    )


def _abstract(leaf: _ShardableLeaf, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _shape_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    return tuple(leaf.shape), leaf.dtype


def _sharded_leaves(tree: Any, rules: AxisRules) -> SplitParameters:
    """Returns the leaves of the tree `like`."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_holds_leaf):
        value = _abstract_value(node)
        sharding = getattr(value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            found[leaf_name(path)] = SplitParameter(tuple(value.shape), rules.on_mesh(sharding.spec))
    if tree is not None and not found:
        raise TypeError("like= has no leaf with a NamedSharding")
    return SplitParameters(found)


# -- T5X's train states, with a separate state of axes


def _open_t5x_state(train_state: Any, rules: AxisRules, like: Any) -> tuple[list[_ShardableLeaf], Any]:
    try:
        axes = _LogicalAxes(train_state.as_logical_axes())
    except ValueError:
        if not (rules.is_empty or rules.has_patterns or like is not None):
            raise
        axes = None
    paths, treedef = jax.tree_util.tree_flatten_with_path(train_state)
    leaves = []
    for path, value in paths:
        keys = tuple(key_text(key) for key in path)
        name, where = _name_in_state_dict(keys), "/".join(keys)
        names = None
        if axes is not None and not rules.has_pattern_for(name):
            try:
                names = axes.names(keys)
            except KeyError:
                rules.problems.append(f"{where}: params_axes names no axes for it")
        is_parameter = name.startswith("target/")
        leaves.append(_ShardableLeaf(name, where, *_shape_dtype(value), names, (), True, is_parameter))
    return leaves, treedef


def _name_in_state_dict(keys: Sequence[str]) -> str:
    """Returns a leaf's name in a T5X state dict."""
    first, *rest = keys
    start = {"_optimizer": [], "params": ["target"], "step": ["state", "step"]}.get(first, [first])
    return "/".join([*start, *rest])


class _LogicalAxes:
    """The logical axes of each leaf, by its place in the state."""

    def __init__(self, axes_state: Any):
        found, _ = jax.tree_util.tree_flatten_with_path(axes_state, is_leaf=_is_axes)
        self._names = {tuple(key_text(key) for key in path): names for path, names in found}

    def names(self, keys: tuple[str, ...]) -> PartitionSpec | None:
        """Returns the names, or None.

        None: the leaf, a node above it, or its collection of mutable variables lacks them.

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


# -- trees whose boxes and variables have metadata, or with a collection of axes


def _open_tree(tree: Any, rules: AxisRules) -> tuple[list[_ShardableLeaf], Any]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_holds_leaf)
    of_collections = _axes_of_collections(tree)
    is_parameter = _parameter_test([path for path, _ in paths], [node for _, node in paths])
    leaves = []
    for path, node in paths:
        name = leaf_name(path)
        axes, own_rules = _axes_of(node) if not rules.is_empty else (None, ())
        is_logical = axes is None and name in of_collections and not rules.is_empty
        axes = of_collections[name] if is_logical else axes
        leaf = _ShardableLeaf(
            name, name, *_shape_dtype(_abstract_value(node)), axes, own_rules, is_logical, is_parameter(path, node)
        )
        leaves.append(leaf._replace(put=_putter(node)))
    return leaves, treedef


def _parameter_test(paths: Sequence[Any], nodes: Sequence[Any]) -> Callable[[Any, Any], bool]:
    """Returns a test of a leaf's path and node for parameters.

    Those are what is below `params`, where that is nearest to the root, and values of `nnx.Param`; where there are
    neither, what only dicts and lists hold, since each optimizer's state is a record.
    """
    depths = [at for path in paths for at, key in enumerate(path) if key_text(key) in _PARAMETERS]
    if depths:
        depth = min(depths)
        return lambda path, node: len(path) > depth and key_text(path[depth]) in _PARAMETERS
    if any(_is_variable(node, "Param") for node in nodes):
        return lambda path, node: _is_variable(node, "Param")
    plain = jax.tree_util.DictKey | jax.tree_util.SequenceKey
    return lambda path, node: all(isinstance(key, plain) for key in path)


def _axes_of_collections(tree: Any) -> dict[str, AxisNames]:
    """Returns the axes in collections such as `params_axes`, by leaf name."""
    found: dict[str, AxisNames] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, AxisMetadata)):
        if isinstance(node, AxisMetadata):
            found["/".join(key_text(key).removesuffix(_AXES_SUFFIX) for key in path)] = node.names
    return found


def _holds_leaf(node: Any) -> bool:
    return isinstance(node, Partitioned) or _is_variable(node)


def _is_variable(node: Any, kind: str = "Variable") -> bool:
    # A variable can only be met where `flax.nnx` is loaded.
    loaded = sys.modules.get("flax.nnx")
    return loaded is not None and isinstance(node, getattr(loaded, kind))


def _abstract_value(node: Any) -> Any:
    return node.value if isinstance(node, Partitioned) else node.get_value() if _is_variable(node) else node


def _putter(node: Any) -> Callable[[Any], Any]:
    """Returns a function that replaces a leaf's value in its box."""
    if isinstance(node, Partitioned):
        return node.replace_boxed
    return node.replace if _is_variable(node) else lambda abstract: abstract


def _axes_of(node: Any) -> tuple[AxisNames | None, LogicalAxisRules]:
    """Returns the axes and rules of a box or variable."""
    if isinstance(node, Partitioned):
        return node.names, getattr(node, "rules", None) or ()
    if not _is_variable(node):
        return None, ()
    metadata = node.get_metadata()
    found = next((metadata[name] for name in _NNX_AXES if metadata.get(name)), None)
    # It may be a layout of a sharding, a sharding, or its axes.
    found = getattr(found, "sharding", found)
    return getattr(found, "spec", found), metadata.get("sharding_rules") or ()
