"""Flattens targets: leaves by name, and their rebuilder.

Any pytree is a target. T5X's train states and `nnx` states and modules name their own leaves, alone or inside other
containers. Nothing here touches array bytes, and nothing imports Flax: a train state is known by its methods, and
`nnx.State` can only be met where `flax.nnx` is loaded already.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from orbax_t5x.errors import Fix, Problem, ProblemKind, RestorePlanError
from orbax_t5x.restoring.target_leaf import TargetLeaf, describe_leaf
from orbax_t5x.trees.flat import EndlessTreeError, flatten, unflatten
from orbax_t5x.trees.named_leaves import flatten_node, is_nnx_node, is_train_state, names_itself, require_levels
from orbax_t5x.trees.pytree_names import leaf_name, names_in_dicts

Rebuild = Callable[[Mapping[str, Any]], Any]

_MODEL_PARAMETERS = frozenset({"target", "params"})


def is_parameter_name(name: str) -> bool:
    """Tests for a model parameter's name in a train state."""
    return name.partition("/")[0] in _MODEL_PARAMETERS


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A flattened target.

    Attributes:
      leaves: by '/'-joined name, in the target's order.
      original: the target's own leaves by name: what transforms see and what a "keep" leaf stays.
      rebuild: puts values by name into the target's structure.
      kind: "tree", or "everything" for a target of None.
      problems: names that collide and leaves of unknown type.
      train_states: the names of T5X train states, "" for the target itself.
      inference_states: the same of those without an optimizer (`InferenceState`).
    """

    leaves: Mapping[str, TargetLeaf]
    original: Mapping[str, Any]
    rebuild: Rebuild
    kind: Literal["tree", "everything"] = "tree"
    problems: tuple[Problem, ...] = ()
    train_states: tuple[str, ...] = ()
    inference_states: tuple[str, ...] = ()

    @functools.cached_property
    def kept(self) -> frozenset[str]:
        """Names of the placeholders."""
        return frozenset(name for name, leaf in self.leaves.items() if leaf.kind == "keep")

    def is_kept(self, name: str) -> bool:
        """Tests if a name or its container is a placeholder."""
        parts = name.split("/")
        return "" in self.kept or any("/".join(parts[:end]) in self.kept for end in range(1, len(parts) + 1))


def require_finite(tree: Any, kind: ProblemKind = "target") -> None:
    """Refuses a recursive or too deep tree."""
    try:
        require_levels(tree)
    except EndlessTreeError as error:
        fix = Fix.in_program("pass a tree of arrays, whose containers hold none of those above them")
        raise RestorePlanError([Problem(kind, None, f"the tree {error}", fix)]) from None


def flatten_target(target: Any, kind: ProblemKind = "target") -> Target:
    """Flattens any target of `orbax_t5x.restore`; see the contract there."""
    require_finite(target, kind)
    if target is None:
        # A TF bundle may hold both `a` and `a/b`.
        return Target({}, {}, functools.partial(unflatten, join_clashes=True), "everything")
    return _Flattening().flatten(target)


def _has_optimizer(train_state: Any) -> bool:
    try:
        _ = train_state.param_states
    except (NotImplementedError, AttributeError):
        return False
    return True


def _in_structure_of(target: Any, restored: Any) -> Any:
    """Puts a restored train state into the target's containers."""
    treedef = jax.tree_util.tree_structure(target)
    leaves = jax.tree_util.tree_leaves(restored)
    # A target without parameters takes any.
    return treedef.unflatten(leaves) if len(leaves) == treedef.num_leaves else restored


class _OwnLeaf(NamedTuple):
    """A leaf of a node that names its own leaves."""

    name: str
    value: Any
    is_param: bool


class _Flattening:
    """Builder of a `Target`."""

    def __init__(self) -> None:
        self._leaves: dict[str, TargetLeaf] = {}
        self._original: dict[str, Any] = {}
        self._described: dict[tuple[Any, bool, bool], TargetLeaf] = {}
        self._problems: list[Problem] = []
        self._train_states: list[str] = []
        self._inference_states: list[str] = []

    def flatten(self, target: Any) -> Target:
        rebuild = self._add_node("", target)
        return Target(
            self._leaves,
            self._original,
            rebuild,
            problems=tuple(self._problems),
            train_states=tuple(self._train_states),
            inference_states=tuple(self._inference_states),
        )

    def _add_node(self, name: str, node: Any) -> Rebuild:
        """Adds the leaves of any pytree; returns its rebuilder."""
        names, leaves, treedef = _open_pytree(node, f"{name}/" if name else "")
        own: dict[int, Rebuild] = {}
        for position, (leaf_path, leaf) in enumerate(zip(names, leaves, strict=True)):
            if type(leaf) is not jax.ShapeDtypeStruct and (type(leaf) is dict or names_itself(leaf)):
                own[position] = self._add_own(leaf_path, leaf)
            else:
                self._add_leaf(leaf_path, leaf, leaf_path.partition("/")[0] in _MODEL_PARAMETERS)

        def rebuild(values: Mapping[str, Any]) -> Any:
            made = [own[at](values) if at in own else values[leaf] for at, leaf in enumerate(names)]
            return jax.tree_util.tree_unflatten(treedef, made)

        return rebuild

    def _add_own(self, name: str, node: Any) -> Rebuild:
        """Adds the leaves of a node that names them itself."""
        if type(node) is dict:
            return self._add_dict(name, node)
        start = f"{name}/" if name else ""
        if is_train_state(node):
            leaves, put_together = self._open_train_state(name, node)
        else:
            named, put_together = flatten_node(node)
            leaves = [_OwnLeaf(*leaf) for leaf in named]
        is_variable = is_nnx_node(node)
        for leaf in leaves:
            self._add_leaf(start + leaf.name, leaf.value, leaf.is_param, is_variable)
        return lambda values: put_together({leaf.name: values[start + leaf.name] for leaf in leaves})

    def _open_train_state(self, name: str, state: Any) -> tuple[list[_OwnLeaf], Rebuild]:
        (self._train_states if _has_optimizer(state) else self._inference_states).append(name)
        flat = flatten(state.state_dict())
        leaves = [_OwnLeaf(leaf, value, is_parameter_name(leaf)) for leaf, value in flat.items()]
        return leaves, lambda values: _in_structure_of(state, state.restore_state(unflatten(values)))

    def _add_dict(self, name: str, node: dict[Any, Any]) -> Rebuild:
        """Adds a dict's leaves in its own order."""
        start = f"{name}/" if name else ""
        rebuilds = {key: self._add_node(f"{start}{key}", child) for key, child in node.items() if child is not None}
        return lambda values: {key: rebuilds[key](values) if key in rebuilds else None for key in node}

    def _add_leaf(self, name: str, leaf: Any, is_param: bool, is_variable: bool = False) -> None:
        if name in self._leaves:
            fix = Fix.by_target("rename one of the target's keys")
            self._problems.append(Problem("duplicate", name, "two leaves of the target have this name", fix))
            return
        # Descriptions do not depend on the name, and most leaves are like another one.
        kind = (leaf, is_param, is_variable) if type(leaf) is jax.ShapeDtypeStruct else None
        try:
            described = None if kind is None else self._described.get(kind)
        except (TypeError, ValueError):  # its sharding is a PartitionSpec that does not fit the mesh in use
            described = kind = None
        if described is None:
            described = describe_leaf(name, leaf, is_param=is_param, is_variable=is_variable)
            if isinstance(described, Problem):
                self._problems.append(described)
                return
            if kind is not None:
                self._described[kind] = described
        self._leaves[name] = described
        self._original[name] = leaf


def _open_pytree(node: Any, start: str) -> tuple[list[str], list[Any], Any]:
    """Returns names that begin with `start`, leaves and structure."""
    if (names := names_in_dicts(node, start)) is not None:
        return names, *jax.tree_util.tree_flatten(node)
    try:
        paths, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=names_itself)
    except ValueError:
        # JAX sorts the keys of a dict, and refuses keys of several types.
        paths, treedef = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda x: names_itself(x) or _is_unsortable(x)
        )
    names = [start + leaf_name(path) if path else start.removesuffix("/") for path, _ in paths]
    return names, [leaf for _, leaf in paths], treedef


def _is_unsortable(node: Any) -> bool:
    if type(node) is not dict:
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False
