"""Base of T5X's optimizers: definition, state, and both as a pytree.

An `OptimizerDef` holds hyper-parameters and pure functions; an `Optimizer` is the pytree that is trained, sharded,
saved and restored. Nothing here makes a copy on the host: states hold `jax.Array`s, also the step, or whatever abstract
leaves `jax.eval_shape` puts in their place.
"""

from __future__ import annotations

from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp

from orbax_t5x.optim.optax_axes import align_axes, state_axes
from orbax_t5x.optim.optax_state import from_state_dict, to_state_dict


class OptimizerState(flax.struct.PyTreeNode):
    """The state of an optimizer.

    Attributes:
      step: int32, how many times gradients were applied.
      param_states: what the optimizer keeps; its structure is the optimizer's own.
    """

    step: Any
    param_states: Any


def first_step() -> jax.Array:
    """Returns step 0 as an array.

    So a jitted step is compiled once, and an abstract state has its dtype.
    """
    return jnp.zeros((), jnp.int32)


class OptimizerDef:
    """Base class of definitions, which make states and apply gradients.

    Attributes:
      hyper_params: a Flax struct (anything with `replace`), or a list of them.
      keeps_param_tree: whether `param_states` is a tree like the parameters with one entry in the place of each.
      needs_param_axes: whether the logical axes of the parameters must be given (`set_param_axes`) before a state is
        made.
    """

    hyper_params: Any
    keeps_param_tree: bool = True

    def __init__(self, hyper_params: Any):
        self.hyper_params = hyper_params

    @property
    def needs_param_axes(self) -> bool:
        """True if the definition wants the logical axes of its parameters."""
        return hasattr(self, "set_param_axes")

    def init_state(self, params: Any) -> OptimizerState:
        """Makes a new state for the parameters."""
        raise NotImplementedError

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Applies gradients once.

        Args:
          hyper_params: what `update_hyper_params` returned.
          params: the parameters.
          state: the state.
          grads: a tree like the parameters.

        Returns:
          The new parameters and the new state.
        """
        raise NotImplementedError

    def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
        """Returns the hyper-parameters with some replaced.

        `hyper_params=` replaces all. The definition stays.
        """
        hyper_params = hyper_param_overrides.pop("hyper_params", self.hyper_params)
        if hyper_param_overrides:
            hyper_params = hyper_params.replace(**hyper_param_overrides)
        return hyper_params

    def create(self, target: Any) -> Optimizer:
        """Makes an optimizer for the parameters `target`, with a new state."""
        return Optimizer(optimizer_def=self, state=self.init_state(target), target=target)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{"target": …, "state": {"step": …, "param_states": …}}`; leaves may be abstract."""
        return {"target": to_state_dict(target), "state": to_state_dict(state)}

    def restore_state(
        self, opt_target: Any, opt_state: OptimizerState, state_dict: dict[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns parameters and state with the leaves of a state dict.

        Their structures are the given trees'.

        Raises:
          ValueError: an entry of the structure is not in the state dict.
        """
        for part in ("target", "state"):
            if part not in state_dict:
                raise ValueError(
                    f"Failed to restore optimizer: {part!r} is not in the state dict, which has {sorted(state_dict)}."
                )
        target = from_state_dict(opt_target, state_dict["target"], what="optimizer target")
        state = from_state_dict(opt_state, state_dict["state"], what="optimizer state")
        return target, state

    def derive_logical_axes(self, optimizer: Optimizer, /, param_logical_axes: Any) -> Optimizer:
        """Returns the optimizer with partition specs for leaves.

        A leaf without logical axes has None.

        Args:
          optimizer: of this definition; its leaves may be abstract.
          param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s.
        """
        target = align_axes(optimizer.target, param_logical_axes)
        param_states = state_axes(optimizer.state.param_states, param_logical_axes, optimizer.target)
        return optimizer.replace(state=OptimizerState(step=None, param_states=param_states), target=target)


class Optimizer(flax.struct.PyTreeNode):
    """Parameters and optimizer state as a pytree with a static definition.

    Attributes:
      optimizer_def: how to step.
      state: an `OptimizerState`.
      target: the parameters.
    """

    optimizer_def: OptimizerDef = flax.struct.field(pytree_node=False)
    state: Any
    target: Any

    def apply_gradient(self, grads: Any, **hyper_param_overrides: Any) -> Self:
        """Applies `grads`, a tree like `target`.

        Hyper-parameters may be replaced for this step.
        """
        hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
        target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
        return self.replace(target=target, state=state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict in T5X's layout."""
        return self.optimizer_def.state_dict(self.target, self.state)

    def restore_state(self, state: dict[str, Any]) -> Self:
        """Returns the same optimizer with the leaves of a state dict."""
        target, new_state = self.optimizer_def.restore_state(self.target, self.state, state)
        return self.replace(target=target, state=new_state)
