"""Several optimizers over disjoint parts of the parameters.

Each traversal picks leaves of a nested dict by name; what none picks is not trained. A sub-optimizer sees the part of
the tree that it owns, under the parameters' own names, so that rules by name mean the same in it as outside. Where
every sub-optimizer keeps one entry per parameter (Adafactor), `param_states` is T5X's tree: those entries in the
parameters' places and None elsewhere. Where one does not (Optax), it is `{"0": …, "1": …}`: each sub-optimizer's states
over its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
from flax.core import FrozenDict, freeze, unfreeze

from orbax_t5x.optim.base import Optimizer, OptimizerDef, OptimizerState, first_step
from orbax_t5x.optim.optax_axes import align_axes
from orbax_t5x.optim.optax_state import to_state_dict

_Path = tuple[str, ...]


class _PickMark:
    """Mark of a traversal's match; flattening stops at it."""


class MultiOptimizer(OptimizerDef):
    """Optimizer that applies sub-optimizers to leaves of their traversals.

    Attributes:
      traversals: `flax.traverse_util.ModelParamTraversal`s, one per sub-optimizer.
      sub_optimizers: the definitions.
      hyper_params: the list of theirs.
    """

    hyper_params: Any

    def __init__(self, traversals_and_optimizers: Sequence[tuple[traverse_util.Traversal, OptimizerDef]]):
        pairs = list(traversals_and_optimizers)
        self.traversals: tuple[traverse_util.Traversal, ...] = tuple(traversal for traversal, _ in pairs)
        self.sub_optimizers: tuple[OptimizerDef, ...] = tuple(optimizer for _, optimizer in pairs)
        super().__init__([optimizer.hyper_params for optimizer in self.sub_optimizers])
        self.keeps_param_tree = all(getattr(optimizer, "keeps_param_tree", True) for optimizer in self.sub_optimizers)

    @property
    def needs_param_axes(self) -> bool:
        """True if a sub-optimizer wants the logical axes of its parameters."""
        return any(
            getattr(optimizer, "needs_param_axes", hasattr(optimizer, "set_param_axes"))
            for optimizer in self.sub_optimizers
        )

    def init_state(self, params: Any) -> OptimizerState:
        """Makes a new state.

        Raises:
          ValueError: a leaf is picked by more than one traversal.
        """
        parts = self._parts(params)
        states = [
            optimizer.init_state(_subtrees_at(params, part)).param_states
            for optimizer, part in zip(self.sub_optimizers, parts, strict=True)
        ]
        return OptimizerState(step=first_step(), param_states=self._join_states(params, parts, states))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Applies gradients by every sub-optimizer.

        `hyper_params` is a list with an entry for each.
        """
        parts = self._parts(params)
        new_params = _flatten_paths(params)
        new_states = []
        subs = zip(self.sub_optimizers, parts, hyper_params, self._split_states(state.param_states, parts), strict=True)
        for optimizer, part, hyper_param, sub_states in subs:
            sub_state = OptimizerState(step=state.step, param_states=sub_states)
            sub_params, sub_state = optimizer.apply_gradient(
                hyper_param, _subtrees_at(params, part), sub_state, _subtrees_at(grads, part)
            )
            new_params.update(_flatten_paths(sub_params))
            new_states.append(sub_state.param_states)
        param_states = self._join_states(params, parts, new_states)
        return _like(params, new_params), OptimizerState(step=state.step + 1, param_states=param_states)

    def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
        """Returns the list of hyper-parameters.

        `hyper_params=[…]` replaces all; other keywords go to every optimizer.
        """
        hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
        if len(hyper_params) != len(self.sub_optimizers):
            raise ValueError(f"{len(self.sub_optimizers)} optimizers, but {len(hyper_params)} hyper-parameters.")
        if not hyper_param_overrides:
            return list(hyper_params)
        return [
            optimizer.update_hyper_params(hyper_params=hyper_param, **hyper_param_overrides)
            for optimizer, hyper_param in zip(self.sub_optimizers, hyper_params, strict=True)
        ]

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Gives sub-optimizers the logical axes of their parameters."""
        for optimizer, part in zip(self.sub_optimizers, self._parts(param_logical_axes), strict=True):
            set_param_axes = getattr(optimizer, "set_param_axes", None)
            if set_param_axes is not None:
                set_param_axes(_subtrees_at(param_logical_axes, part))
        self.hyper_params = [optimizer.hyper_params for optimizer in self.sub_optimizers]

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        params = optimizer.target
        target = align_axes(params, param_logical_axes)
        parts = self._parts(params)
        axes = []
        subs = zip(self.sub_optimizers, parts, self._split_states(optimizer.state.param_states, parts), strict=True)
        for sub_optimizer, part, states in subs:
            sub = Optimizer(
                sub_optimizer,
                OptimizerState(step=optimizer.state.step, param_states=states),
                _subtrees_at(params, part),
            )
            axes.append(sub_optimizer.derive_logical_axes(sub, _subtrees_at(target, part)).state.param_states)
        param_states = self._join_states(params, parts, axes)
        return optimizer.replace(state=OptimizerState(step=None, param_states=param_states), target=target)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns T5X's tree with None for untouched leaves.

        Over Optax it has an entry per sub-optimizer, if not empty.
        """
        return {"target": to_state_dict(target), "state": to_state_dict(state, keep_empty=self.keeps_param_tree)}

    def _parts(self, tree: Any) -> list[list[_Path]]:
        """Lists the paths that each traversal picks."""
        parts = []
        for traversal in self.traversals:
            flat = _flatten_paths(traversal.update(lambda _: _PickMark(), tree))
            parts.append([path for path, value in flat.items() if isinstance(value, _PickMark)])
        owners: dict[_Path, list[int]] = {}
        for index, part in enumerate(parts):
            for path in part:
                owners.setdefault(path, []).append(index)
        clashes = {"/".join(path): indices for path, indices in owners.items() if len(indices) > 1}
        if clashes:
            error = ValueError(f"Multiple optimizers match the same leaves : {clashes}")
            error.add_note("Each name is followed by the indices of the optimizers that match it.")
            raise error
        return parts

    def _split_states(self, param_states: Any, parts: list[list[_Path]]) -> list[Any]:
        if not self.keeps_param_tree:
            return [param_states[str(index)] for index in range(len(parts))]
        return [_subtrees_at(param_states, part) for part in parts]

    def _join_states(self, params: Any, parts: list[list[_Path]], states: list[Any]) -> Any:
        if not self.keeps_param_tree:
            return {str(index): state for index, state in enumerate(states)}
        empty = traverse_util.empty_node
        joined = {path: empty if value is empty else None for path, value in _flatten_paths(params).items()}
        for part, state in zip(parts, states, strict=True):
            joined.update({path: _subtree_at(state, path) for path in part})
        return _like(params, joined)


def _flatten_paths(tree: Any) -> dict[_Path, Any]:
    return traverse_util.flatten_dict(unfreeze(tree), keep_empty_nodes=True)


def _subtree_at(tree: Any, path: _Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _like(tree: Any, flat: Mapping[_Path, Any]) -> Any:
    """Builds a nested dict, frozen if `tree` is."""
    nested = traverse_util.unflatten_dict(flat)
    return freeze(nested) if isinstance(tree, FrozenDict) else nested


def _subtrees_at(tree: Any, part: Sequence[_Path]) -> Any:
    """Returns the tree below the given paths."""
    return _like(tree, {path: _subtree_at(tree, path) for path in part})
