"""T5X's train states: parameters, optimizer, mutable variables and logical axes.

Both kinds name their own leaves (`state_dict`) and take them back (`restore_state`), concrete or abstract (leaves
`jax.ShapeDtypeStruct`, as `jax.eval_shape` makes them). Names are `target/…`, `state/step`, `state/param_states/…`
and, where there are any, `flax_mutables/…`. Axes are metadata, in no state dict.
What does not fit is a ValueError that names it; nothing is filled in or left out quietly.

Example:
  >>> optimizer = ot.optimizers.adam(learning_rate=1e-3)
  >>> state = ot.train_state.FlaxOptimTrainState.create(optimizer, {"params": {"w": jnp.ones(3)}})
  >>> sorted(ot.state_utils.flatten_state_dict(state.state_dict()))
  ['state/param_states/0/count', 'state/param_states/0/mu/w', 'state/param_states/0/nu/w', 'state/step', 'target/w']
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, Self, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from flax.core import FrozenDict, freeze

from orbax_t5x.optim.model_variables import (
    check_axes,
    mutables_axis_names,
    params_axis_names,
    split_collections,
    split_variables,
)
from orbax_t5x.optim.optax_state import from_state_dict, to_state_dict
from orbax_t5x.optimizers import Optimizer, OptimizerDef

__all__ = ["EMPTY_DICT", "FlaxOptimTrainState", "InferenceState", "TrainState"]

EMPTY_DICT: FrozenDict[str, Any] = FrozenDict({})


class _StaticInstanceCheck(type(Protocol)):
    """Metaclass of an `isinstance` by names.

    Python 3.11 would call properties, and a property here raises.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is not TrainState:
            return super().__instancecheck__(instance)
        missing = object()
        return all(inspect.getattr_static(instance, name, missing) is not missing for name in _TRAIN_STATE_MEMBERS)


@runtime_checkable
class TrainState(Protocol, metaclass=_StaticInstanceCheck):
    """Protocol of a state in training, evaluation and checkpointing."""

    @property
    def step(self) -> Any:
        """The training step, rank 0."""
        ...

    @property
    def params(self) -> Any:
        """The parameters."""
        ...

    @property
    def param_states(self) -> Any:
        """The optimizer's states of the parameters."""
        ...

    @property
    def flax_mutables(self) -> Any:
        """Collections of mutable variables by name."""
        ...

    def state_dict(self) -> MutableMapping[str, Any]:
        """Returns the nested dict that is written to checkpoints."""
        ...

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """Returns this kind of state with a state dict's values."""
        ...

    def replace_params(self, params: Any) -> TrainState:
        """Returns the state with other parameters."""
        ...

    def replace_flax_mutables(self, flax_mutables: Any) -> TrainState:
        """Returns the state with other mutable variables."""
        ...

    def replace_step(self, step: Any) -> TrainState:
        """Returns the state at another step."""
        ...

    def apply_gradient(self, grads: Any, learning_rate: Any, flax_mutables: Any = EMPTY_DICT) -> TrainState:
        """Returns the state after a step of the optimizer."""
        ...

    def as_logical_axes(self) -> TrainState:
        """Returns the state with `PartitionSpec`s in place of its leaves.

        They hold logical axis names; a leaf without them has None.
        """
        ...


_TRAIN_STATE_MEMBERS = tuple(name for name in vars(TrainState) if not name.startswith("_"))


class FlaxOptimTrainState(flax.struct.PyTreeNode):
    """A train state around an `orbax_t5x.optimizers.Optimizer`.

    Attributes:
      params_axes: axis metadata by parameter, as `flax.linen.partitioning.param_with_axes` leaves it; None without.
      flax_mutables: collections of mutable variables by name.
      flax_mutables_axes: their axis metadata by collection; None without.
    """

    _optimizer: Optimizer
    params_axes: Any = None
    flax_mutables: Any = EMPTY_DICT
    flax_mutables_axes: Any = None

    @classmethod
    def create(cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]) -> Self:
        """Makes a state at step 0.

        Args:
          optimizer_def: an optimizer with `set_param_axes` gets the parameters' logical axes, in place.
          model_variables: what `module.init` returns: `params`, `params_axes` where the model names axes, and mutable
            collections `x` with their axes `x_axes`.

        Raises:
          ValueError: axis names are missing, for some parameters or for an optimizer that wants them.
        """
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        set_param_axes = getattr(optimizer_def, "set_param_axes", None)
        if set_param_axes is not None:
            if params_axes is not None:
                set_param_axes(params_axis_names(params_axes))
            elif getattr(optimizer_def, "needs_param_axes", True):
                error = ValueError(
                    "The optimizer supports params_axes for model-based partitioning, but the model is not emitting "
                    "them."
                )
                error.add_note(
                    "Declare parameters with flax.linen.partitioning.param_with_axes, and pass what module.init "
                    "returns, the collection 'params_axes' included."
                )
                raise error
        return cls(optimizer_def.create(params), params_axes, mutables, mutables_axes)

    @property
    def step(self) -> Any:
        """The training step, an int32 of rank 0."""
        return self._optimizer.state.step

    @property
    def params(self) -> Any:
        """The parameters."""
        return self._optimizer.target

    @property
    def param_states(self) -> Any:
        """The optimizer's states of the parameters."""
        return self._optimizer.state.param_states

    def state_dict(self) -> dict[str, Any]:
        """Returns `target`, `state` and perhaps `flax_mutables`, as nested dicts."""
        return _with_mutables(dict(self._optimizer.state_dict()), self.flax_mutables)

    def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
        """Returns this state with the values of a state dict.

        Raises:
          ValueError: entries are missing.
        """
        mutables = _restore_mutables(self.flax_mutables, state_dict)
        optimizer_dict = {part: state_dict[part] for part in ("target", "state") if part in state_dict}
        return self.replace(_optimizer=self._optimizer.restore_state(optimizer_dict), flax_mutables=mutables)

    def apply_gradient(self, grads: Any, learning_rate: Any, flax_mutables: Any = EMPTY_DICT) -> Self:
        """Returns the state after a step of the optimizer.

        Args:
          grads: like the parameters.
          learning_rate: for optimizers that take one here.
          flax_mutables: the mutable variables after the step; left out, they stay what they are.
        """
        optimizer = self._optimizer.apply_gradient(grads, learning_rate=learning_rate)
        # The default, not its value, means "left out": passing an empty dict empties them.
        mutables = self.flax_mutables if flax_mutables is EMPTY_DICT else _contained(self.flax_mutables, flax_mutables)
        return self.replace(_optimizer=optimizer, flax_mutables=mutables)

    def replace_params(self, params: Any) -> Self:
        """Returns the state with other parameters."""
        return self.replace(_optimizer=dataclasses.replace(self._optimizer, target=params))

    def replace_flax_mutables(self, flax_mutables: Any) -> Self:
        """Returns the state with other mutable variables."""
        return self.replace(flax_mutables=flax_mutables)

    def replace_step(self, step: Any) -> Self:
        """Returns the state at another step."""
        state = dataclasses.replace(self._optimizer.state, step=step)
        return self.replace(_optimizer=dataclasses.replace(self._optimizer, state=state))

    def as_logical_axes(self) -> Self:
        """Returns the state with `PartitionSpec`s in place of its leaves.

        They hold logical axis names; a leaf without them has None.

        Raises:
          ValueError: the model named no axes, or the optimizer can not derive those of its states.
        """
        optimizer_def = self._optimizer.optimizer_def
        if not hasattr(optimizer_def, "derive_logical_axes"):
            raise ValueError(
                f"Optimizer '{type(optimizer_def).__name__}' requires a `derive_logical_axes` method to be used with "
                "named axis partitioning."
            )
        axis_names = params_axis_names(self.params_axes)
        return type(self)(
            _optimizer=optimizer_def.derive_logical_axes(self._optimizer, axis_names),
            flax_mutables=mutables_axis_names(self.flax_mutables_axes),
        )


class InferenceState(flax.struct.PyTreeNode):
    """Parameters without an optimizer, for evaluation and inference.

    Attributes:
      step: the training step, rank 0.
      params: the parameters.
      params_axes, flax_mutables, flax_mutables_axes: as in `FlaxOptimTrainState`.
    """

    step: Any
    params: Any
    params_axes: Any = None
    flax_mutables: Any = EMPTY_DICT
    flax_mutables_axes: Any = None

    @classmethod
    def create(cls, model_variables: Mapping[str, Any]) -> Self:
        """Makes a state at step 0 from `FlaxOptimTrainState.create`'s variables."""
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        return cls(jnp.zeros((), jnp.int32), params, params_axes, mutables, mutables_axes)

    @property
    def param_states(self) -> Any:
        """Absent here.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError("InferenceState has no optimizer states.")

    def apply_gradient(self, *args: Any, **kwargs: Any) -> Self:
        """Raises NotImplementedError: there is no optimizer."""
        raise NotImplementedError("InferenceState does not support `apply_gradient`.")

    def state_dict(self) -> dict[str, Any]:
        """Returns `target`, `state/step` and perhaps `flax_mutables`, as nested dicts."""
        state = {"target": to_state_dict(self.params), "state": {"step": self.step}}
        return _with_mutables(state, self.flax_mutables)

    def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
        """Returns this state with a state dict's values.

        Optimizer states in it are ignored. The parameters are a `FrozenDict` then, as in T5X, whatever they were.

        Raises:
          ValueError: entries are missing.
        """
        if "target" not in state_dict or "step" not in state_dict.get("state", {}):
            raise ValueError(
                f"A state dict with 'target' and 'state/step' is needed to restore an InferenceState; this one has "
                f"{sorted(state_dict)}."
            )
        params = _restore_tree(self.params, state_dict["target"], "params")
        return self.replace(
            params=freeze(params) if isinstance(params, Mapping) else params,
            step=state_dict["state"]["step"],
            flax_mutables=_restore_mutables(self.flax_mutables, state_dict),
        )

    def replace_params(self, params: Any) -> Self:
        """Returns the state with other parameters."""
        return self.replace(params=params)

    def replace_flax_mutables(self, flax_mutables: Any) -> Self:
        """Returns the state with other mutable variables."""
        return self.replace(flax_mutables=flax_mutables)

    def replace_step(self, step: Any) -> Self:
        """Returns the state at another step."""
        return self.replace(step=step)

    def as_logical_axes(self) -> Self:
        """Returns the state with `PartitionSpec`s in place of its leaves.

        They hold logical axis names; a leaf without them has None.

        Raises:
          ValueError: the model named no axes.
        """
        return type(self)(
            step=None,
            params=params_axis_names(self.params_axes),
            flax_mutables=mutables_axis_names(self.flax_mutables_axes),
        )


def _validate_params_axes(params_axes: Any, params: Any) -> None:
    """Checks that all parameters have axis names.

    Under T5X's name.

    Raises:
      ValueError: some lack them; the text lists them.
    """
    check_axes(params_axes, params)


def _split_variables_and_axes(
    variables_and_axes: Mapping[str, Any],
) -> tuple[FrozenDict[str, Any], FrozenDict[str, Any]]:
    """Separates the collections from their axes.

    They are by the names of their collections. Under T5X's name.
    """
    variables, axes = split_collections(variables_and_axes)
    return freeze(variables), freeze(axes)


def _with_mutables(state_dict: dict[str, Any], mutables: Any) -> dict[str, Any]:
    if _holds_leaves(mutables):
        state_dict["flax_mutables"] = to_state_dict(mutables)
    return state_dict


def _restore_mutables(current: Any, state_dict: Mapping[str, Any]) -> Any:
    if "flax_mutables" in state_dict or _holds_leaves(current):
        return _restore_tree(current, state_dict.get("flax_mutables", {}), "flax_mutables")
    return current


def _restore_tree(current: Any, restored: Any, what: str) -> Any:
    """Returns the restored leaves in the current tree's structure.

    A tree without leaves takes any.
    """
    if _holds_leaves(current):
        return from_state_dict(current, restored, what=what)
    return _contained(current, restored)


def _holds_leaves(tree: Any) -> bool:
    return bool(jax.tree_util.tree_leaves(tree, is_leaf=lambda node: node is None))


def _contained(current: Any, tree: Any) -> Any:
    """Returns the tree as a FrozenDict if the current tree is.

    So the structure of the state stays the same.
    """
    return freeze(tree) if isinstance(current, FrozenDict) and isinstance(tree, Mapping) else tree
