"""Logical axes of optimizer states, from the parameters' axes.

A state holds trees like the parameters (moments, averages, accumulators) among counters and hyper-parameters. Optax
itself can find them: an optimizer initialised with a placeholder for the parameters has it wherever such a tree
belongs (`optax.tree_utils.tree_map_params`). Where an optimizer cannot be initialised so, or is not at hand, trees of
the same structure are looked for. Each leaf of such a tree then takes its parameter's axes by shape: all of them, those
of the dimensions that a factored moment kept, or those behind a leading history dimension. What stays ambiguous gets
None, which means replicated: always right, though it takes more memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from orbax_t5x.optim.factored_dims import dims_by_size
from orbax_t5x.optim.optax_state import flatten_by_name, open_node
from orbax_t5x.trees.pytree_names import key_text

AxesRule = Callable[[Any, Any], Any]
"""The axes of a state, of the state's structure, from the state and the axes of the parameters."""


class StateLeaf:
    """The path and shape of a leaf of a state.

    It is no pytree node, so a tree of these has the state's structure.
    """

    def __init__(self, path: tuple[str, ...], shape: tuple[int, ...]):
        self.path = path
        self.shape = shape


class _ParamTree:
    """Mark of a tree like the parameters within a state."""

    def __init__(self, tree: Any):
        self.tree = tree


def state_axes(state: Any, params_axes: Any, params: Any = None, initable: Any = None) -> Any:
    """Returns the state with partition specs for leaves.

    A leaf without logical axes has None.

    Args:
      state: any optimizer state; leaves may be abstract.
      params_axes: a tree like the parameters whose leaves are `PartitionSpec`s or None.
      params: the parameters, abstract or not. Without them the rank has to do for the shape, and leaves of another rank
        than their parameter's, such as factored moments, get None.
      initable: the gradient transformation that made the state, if at hand.
    """
    slots = jax.tree_util.tree_map_with_path(
        lambda path, leaf: StateLeaf(tuple(map(key_text, path)), np.shape(leaf)), state
    )
    marked = _ask_optax(initable, slots, params_axes)
    if marked is None:
        return _search(slots, _param_trees(params_axes, params))
    return jax.tree.map(
        lambda node: _assign(node.tree, params_axes, params) if isinstance(node, _ParamTree) else None, marked
    )


def apply_axes_rules(rules: Mapping[type, AxesRule], state: Any, params_axes: Any, axes: Any) -> Any:
    """Replaces the axes of states by the results of their rules.

    `rules` are by the class of a state.
    """
    rule = rules.get(type(state))
    if rule is not None:
        return rule(state, params_axes)
    opened, found = open_node(state), open_node(axes)
    if not rules or opened is None or found is None:
        return axes
    children = zip(opened.children, found.children, strict=True)
    return found.rebuild([apply_axes_rules(rules, child, params_axes, below) for child, below in children])


def _ask_optax(initable: Any, slots: Any, params_axes: Any) -> Any:
    """Wraps every tree like the parameters in a `_ParamTree`.

    None: Optax cannot find them.
    """
    if initable is None or isinstance(params_axes, optax.LookaheadParams):
        # A lookahead optimizer logs that it got no lookahead parameters when it gets the placeholder.
        return None
    try:
        return optax.tree_utils.tree_map_params(initable, _ParamTree, slots, is_leaf=lambda _: True)
    except Exception:
        # The optimizer's own code got a placeholder, so any exception may come.
        return None


def _search(node: Any, candidates: list[tuple[Any, Any]]) -> Any:
    """Finds trees like the parameters by their structure, outermost first."""
    opened = open_node(node)
    for axes, params in candidates:
        if open_node(axes) is None:
            # Parameters that are a single array have no structure to compare; only the shape is left.
            if opened is None and node.shape == _only_shape(params):
                return axes
        elif (
            opened is not None
            and _is_like_params(node, axes, allow_records=isinstance(axes, Mapping))
            and any(isinstance(leaf, StateLeaf) for leaf in jax.tree.leaves(node))
        ):
            return _assign(node, axes, params)
    return None if opened is None else opened.rebuild([_search(child, candidates) for child in opened.children])


def _param_trees(axes: Any, params: Any) -> list[tuple[Any, Any]]:
    """Lists the trees that a state may hold copies of.

    They are the parameters, and the fast parameters of a lookahead optimizer.
    """
    found = [(axes, params)]
    if isinstance(axes, optax.LookaheadParams):
        found.append((axes.fast, params.fast if isinstance(params, optax.LookaheadParams) else params))
    # Without leaves a copy cannot be recognised.
    return [(tree, shapes) for tree, shapes in found if open_node(tree) is None or flatten_by_name(tree)[0]]


def _is_like_params(node: Any, axes: Any, *, allow_records: bool) -> bool:
    """Tests if a node has the structure of the parameters.

    Masked parts fit anything.

    `allow_records`: a state may have several leaves for a parameter. Not where the parameters are a tuple or a list,
    because the states of chained optimizers look the same.
    """
    opened, wanted = open_node(node), open_node(axes)
    if wanted is None:
        return opened is None or allow_records or _is_masked(node)
    if opened is None:
        return False
    if isinstance(axes, Mapping) != isinstance(node, Mapping) or set(opened.names) != set(wanted.names):
        return False
    wanted_children = dict(zip(wanted.names, wanted.children, strict=True))
    return all(
        _is_masked(child) or _is_like_params(child, wanted_children[name], allow_records=allow_records)
        for name, child in zip(opened.names, opened.children, strict=True)
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _assign(node: Any, axes: Any, params: Any) -> Any:
    """Returns the axes for leaves of a tree like the parameters.

    Masked nodes stay.
    """
    if isinstance(axes, optax.LookaheadParams) and not isinstance(node, optax.LookaheadParams):
        return _assign(node, axes.fast, params.fast if isinstance(params, optax.LookaheadParams) else params)
    wanted = open_node(axes)
    if wanted is None:
        shape = None if params is None else _only_shape(params)
        return jax.tree.map(lambda slot: slot_axes(slot, axes, shape), node)
    opened = open_node(node)
    if opened is None:
        return None
    below = dict(zip(wanted.names, wanted.children, strict=True))
    param_node = open_node(params)
    param_below = {} if param_node is None else dict(zip(param_node.names, param_node.children, strict=True))
    children = [
        _assign(child, below[name], param_below.get(name)) if name in below else jax.tree.map(lambda _: None, child)
        for name, child in zip(opened.names, opened.children, strict=True)
    ]
    return opened.rebuild(children)


def _only_shape(param: Any) -> tuple[int, ...] | None:
    """Returns the parameter's shape, unboxed, or None.

    None: there is not exactly a single array.
    """
    leaves = jax.tree.leaves(param)
    return np.shape(leaves[0]) if len(leaves) == 1 else None


def slot_axes(slot: StateLeaf, axes: Any, param_shape: tuple[int, ...] | None) -> PartitionSpec | None:
    """Returns the axes of a leaf in a parameter's position.

    None: it is not split.

    Args:
      slot: the leaf.
      axes: of the parameter.
      param_shape: of the parameter, or None where it is not known.
    """
    shape = slot.shape
    if axes is None or not shape:
        return None
    if shape == param_shape:
        return axes
    # Whatever it is, a placeholder of a factored state included: there is nothing to shard.
    if all(size == 1 for size in shape):
        return None
    if param_shape is None:
        return axes if len(axes) == len(shape) else None
    names = (*axes, *[None] * (len(param_shape) - len(axes)))
    history = len(shape) - len(param_shape)
    if history > 0:
        return PartitionSpec(*[None] * history, *names) if shape[history:] == param_shape else None
    if history == 0:
        if not all(size in (1, full) for size, full in zip(shape, param_shape, strict=True)):
            return None
        return PartitionSpec(
            *(name if size == full else None for name, size, full in zip(names, shape, param_shape, strict=True))
        )
    kept = _kept_dims(slot, param_shape, names)
    return None if kept is None else PartitionSpec(*(names[dim] for dim in kept))


def _kept_dims(slot: StateLeaf, param_shape: tuple[int, ...], names: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Returns the parameter's dimensions in a leaf of lower rank.

    None: they are ambiguous.
    """
    shape = slot.shape
    all_dims = range(len(param_shape))
    for dropped in _factored_drop(slot, param_shape):
        kept = tuple(dim for dim in all_dims if dim != dropped)
        if tuple(param_shape[dim] for dim in kept) == shape:
            return kept
    # One accumulator per dimension, in a list (SM3).
    last = slot.path[-1] if slot.path else ""
    if len(shape) == 1 and last.isdecimal() and int(last) < len(param_shape) and param_shape[int(last)] == shape[0]:
        return (int(last),)
    candidates = [
        kept
        for kept in itertools.combinations(all_dims, len(shape))
        if tuple(param_shape[dim] for dim in kept) == shape
    ]
    # Several ways are fine when they come to the same axes.
    if len({tuple(names[dim] for dim in kept) for kept in candidates}) == 1:
        return candidates[0]
    return None


def _factored_drop(slot: StateLeaf, param_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimension that factored moments average over.

    Of v_row it is the largest, of v_col the second.
    """
    dims = dims_by_size(param_shape)
    if dims is None:
        return ()
    return dims.column if "v_row" in slot.path else dims.row if "v_col" in slot.path else ()


def align_axes(params: Any, params_axes: Any) -> Any:
    """Returns the axes in the parameters' own structure.

    Raises:
      ValueError: a parameter has no place in `params_axes`.
    """
    missing: list[str] = []
    result = _align(params, params_axes, (), missing)
    if missing:
        raise ValueError(f"No logical axes for parameters: {missing}")
    return result


def _align(params: Any, axes: Any, path: tuple[str, ...], missing: list[str]) -> Any:
    wanted = open_node(axes)
    if wanted is None:
        return jax.tree.map(lambda _: axes, params)
    opened = open_node(params)
    if opened is None:
        missing.append("/".join(path))
        return None
    below = dict(zip(wanted.names, wanted.children, strict=True))
    children = []
    for name, child in zip(opened.names, opened.children, strict=True):
        if name in below:
            children.append(_align(child, below[name], (*path, name), missing))
        else:
            missing.extend("/".join((*path, name, leaf)).rstrip("/") for leaf in flatten_by_name(child)[0])
            children.append(child)
    return opened.rebuild(children)
