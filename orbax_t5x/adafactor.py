"""T5X's Adafactor, to T5X's numbers and with its state layout.

It is that of Shazeer and Stern, 2018 (arXiv 1804.04235).

Each parameter has four slots: `v_row` and `v_col` (the factored second moment), `v` (the whole one) and `m` (momentum);
those that a parameter does not use are zeros((1,)) and never change. Second moments are float32, whatever the
parameters are; results have the parameters' dtype. A subclass may say what happens to one parameter, as in T5X:
`init_param_state` and `apply_param_gradient`. Everything is `jax.numpy` on the parameters where they
are: a step moves nothing to the host.

Example:
  >>> optimizer = ot.adafactor.Adafactor(learning_rate=1e-3).create({"w": jnp.ones((256, 128))})
  >>> jax.tree.map(np.shape, optimizer.state_dict()["state"]["param_states"])
  {'w': {'m': (1,), 'v': (1,), 'v_col': (256,), 'v_row': (128,)}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from orbax_t5x.optim.adafactor_step import (
    AdafactorHyperParams,
    AdafactorParamState,
    clip_by_global_norm,
    init_slots,
    second_moment_decay,
    step_param,
)
from orbax_t5x.optim.base import Optimizer, OptimizerDef, OptimizerState, first_step
from orbax_t5x.optim.factor_rules import (
    HEURISTIC_RULE,
    STANDARD_LOGICAL_FACTOR_RULES,
    FactorDim,
    FactorRule,
    HeuristicRule,
    HParamMap,
    LogicalFactorRules,
    factor_name_to_factordim,
    rules_from_axes,
)
from orbax_t5x.optim.factored_dims import FactorDims, FactoredPair, dims_by_size, parse_rule
from orbax_t5x.optim.optax_axes import align_axes
from orbax_t5x.optim.optax_state import flatten_by_name

__all__ = [
    "HEURISTIC_RULE",
    "Adafactor",
    "FactorDim",
    "FactorRule",
    "HParamMap",
    "HeuristicRule",
    "LogicalFactorRules",
    "factor_name_to_factordim",
    "standard_logical_factor_rules",
]

# T5X's names, which subclasses of its Adafactor use.
_AdafactorHyperParams = AdafactorHyperParams
_AdafactorParamState = AdafactorParamState


def standard_logical_factor_rules() -> flax.core.FrozenDict[str, FactorDim]:
    """Returns T5X's logical axis names and their roles.

    The role is that in the factored second moment.
    """
    return flax.core.freeze(dict(STANDARD_LOGICAL_FACTOR_RULES))


class Adafactor(OptimizerDef):
    """T5X's Adafactor.

    Args:
      learning_rate: may also be given to each step.
      factored: whether second moments are factored at all.
      multiply_by_parameter_scale: whether the learning rate is relative to the RMS of the parameter; a bool, or an
        `HParamMap` of bools.
      beta1: momentum; None: none is kept.
      decay_rate: the second moments' decay at step t (from 1) is 1 - t ** -decay_rate.
      step_offset: subtracted from the step, for fine-tuning.
      clipping_threshold: the RMS to which updates are clipped; None or 0: no clipping.
      weight_decay_rate: what a step takes off the parameter, as a fraction.
      min_dim_size_to_factor: matrices with a smaller dimension are not factored, where size decides.
      epsilon1: added to squared gradients.
      epsilon2: the least parameter scale.
      dtype_momentum: of `m`.
      factor_map: a rule for each parameter, by name (`HParamMap`, or a dict); one without a rule is factored by size.
      logical_factor_rules: the role of each logical axis name (`standard_logical_factor_rules()`), from which
        `set_param_axes` makes the factor map.
      weight_decay_rate_lr_exponent: the weight decay is multiplied by learning_rate to this power; a rate of None then
        counts as 1.
      global_norm_clip_threshold: the norm of all gradients together is clipped to it; None or 0: no clipping.
      max_parameter_scale: the largest parameter scale.
      skip_nan_updates: whether elements of parameters and state that would become NaN keep their old value.
    """

    hyper_params: Any

    def __init__(
        self,
        learning_rate: Any = None,
        factored: bool = True,
        multiply_by_parameter_scale: bool | HParamMap = True,
        beta1: Any = None,
        decay_rate: Any = 0.8,
        step_offset: Any = 0,
        clipping_threshold: Any = 1.0,
        weight_decay_rate: Any = None,
        min_dim_size_to_factor: int = 128,
        epsilon1: Any = 1e-30,
        epsilon2: Any = 1e-3,
        dtype_momentum: Any = jnp.float32,
        factor_map: HParamMap | Mapping[str, FactorRule] | None = None,
        logical_factor_rules: LogicalFactorRules | None = None,
        weight_decay_rate_lr_exponent: Any = None,
        global_norm_clip_threshold: Any = None,
        max_parameter_scale: Any = None,
        skip_nan_updates: bool = False,
    ):
        if not factored and factor_map is not None:
            raise ValueError("Adafactor factored is False but factorization rules have been provided.")
        if not isinstance(multiply_by_parameter_scale, (bool, HParamMap)):
            raise TypeError("`multiply_by_parameter_scale` must be either bool or `HParamMap` type.")
        if logical_factor_rules is not None:
            rules = {axis: factor_name_to_factordim(part) for axis, part in logical_factor_rules.items()}
            logical_factor_rules = flax.core.freeze(rules)
        super().__init__(
            AdafactorHyperParams(
                learning_rate=learning_rate,
                factored=factored,
                multiply_by_parameter_scale=multiply_by_parameter_scale,
                beta1=beta1,
                decay_rate=decay_rate,
                step_offset=step_offset,
                clipping_threshold=clipping_threshold,
                weight_decay_rate=weight_decay_rate,
                min_dim_size_to_factor=min_dim_size_to_factor,
                epsilon1=epsilon1,
                epsilon2=epsilon2,
                factor_map=factor_map,
                logical_factor_rules=logical_factor_rules,
                weight_decay_rate_lr_exponent=weight_decay_rate_lr_exponent,
                global_norm_clip_threshold=global_norm_clip_threshold,
                max_parameter_scale=max_parameter_scale,
                skip_nan_updates=skip_nan_updates,
            )
        )
        self.dtype_momentum: np.dtype[Any] = jax.dtypes.canonicalize_dtype(dtype_momentum)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        assert isinstance(other, Adafactor)
        return self.hyper_params == other.hyper_params and self.dtype_momentum == other.dtype_momentum

    def __hash__(self) -> int:
        # Hyper-parameters may be arrays, and `set_param_axes` changes them: only equality distinguishes definitions.
        return hash((type(self), self.dtype_momentum))

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Makes the factor map from the parameters' logical axes.

        It does nothing without `logical_factor_rules`. It changes this definition, as T5X's does: call it before
        `create`.

        Args:
          param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s of axis names.

        Raises:
          ValueError: an axis name without a rule, or an incomplete set of them.
        """
        rules = self.hyper_params.logical_factor_rules
        if rules is not None:
            self.hyper_params = self.hyper_params.replace(factor_map=rules_from_axes(param_logical_axes, rules))

    def init_state(self, params: Any) -> OptimizerState:
        """Makes a new state, with slots by `init_param_state`.

        It is a tree like the parameters.
        """
        names, leaves, treedef = flatten_by_name(params)
        states = [self.init_param_state(param, name) for name, param in zip(names, leaves, strict=True)]
        return OptimizerState(step=first_step(), param_states=treedef.unflatten(states))

    def init_param_state(self, param: Any, path: str) -> AdafactorParamState:
        """Makes a parameter's slots before the first step.

        Subclasses may override it.

        Args:
          param: the parameter, abstract or not.
          path: its '/'-joined name.
        """
        keeps_momentum = self.hyper_params.beta1 is not None
        dims = self._factoring(path, jnp.shape(param))
        return init_slots(dims, param, self.dtype_momentum if keeps_momentum else None)

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Applies gradients once, by `apply_param_gradient` on each parameter; see the base class."""
        if hyper_params.learning_rate is None:
            raise ValueError("Adafactor needs a learning_rate, when it is made or at each step.")
        names, leaves, treedef = flatten_by_name(params)
        grad_leaves = _in_order(names, grads, "gradients")
        slots = _in_order(names, state.param_states, "optimizer state")
        # T5X's numbers are those of JAX's own promotion, whatever the caller has set.
        with jax.numpy_dtype_promotion("standard"):
            if hyper_params.global_norm_clip_threshold:
                grad_leaves = clip_by_global_norm(grad_leaves, hyper_params.global_norm_clip_threshold)
            stepped = [
                self.apply_param_gradient(state.step, hyper_params, param, param_slots, grad, name)
                for name, param, param_slots, grad in zip(names, leaves, slots, grad_leaves, strict=True)
            ]
        slots_by_name = {name: new_slots for name, (_, new_slots) in zip(names, stepped, strict=True)}
        state_names, _, state_treedef = flatten_by_name(state.param_states, is_leaf=_is_slots)
        param_states = state_treedef.unflatten([slots_by_name[name] for name in state_names])
        new_params = treedef.unflatten([new_param for new_param, _ in stepped])
        return new_params, OptimizerState(step=state.step + 1, param_states=param_states)

    def apply_param_gradient(
        self, step: Any, hyper_params: Any, param: Any, state: AdafactorParamState, grad: Any, path: str
    ) -> tuple[Any, AdafactorParamState]:
        """Computes a parameter's new value and slots.

        Subclasses may override it.

        Args:
          step: how many times gradients were applied before.
          hyper_params: of this step.
          param: the parameter.
          state: its slots.
          grad: its gradient.
          path: its '/'-joined name.
        """
        beta2 = self._decay_rate_pow(step - hyper_params.step_offset, exponent=hyper_params.decay_rate)
        return step_param(hyper_params, path, self._factoring(path, param.shape), beta2, param, state, grad)

    @staticmethod
    def _decay_rate_pow(i: Any, exponent: Any = 0.8) -> Any:
        return second_moment_decay(i, exponent)

    _parse_rule = staticmethod(parse_rule)

    def _factored_dims(self, shape: Sequence[int]) -> FactoredPair | None:
        """Returns the ROW and COLUMN dimensions by size, or None.

        None: the shape is not factored.
        """
        if not self.hyper_params.factored:
            return None
        dims = dims_by_size(shape, self.hyper_params.min_dim_size_to_factor)
        return None if dims is None else (dims.row, dims.column)

    def _factoring(self, path: str, shape: Sequence[int]) -> FactorDims:
        """Decides how the second moment of a parameter is factored."""
        rule: FactorRule = HEURISTIC_RULE
        if not self.hyper_params.factored:
            rule = None
        elif self.hyper_params.factor_map is not None:
            try:
                rule = self.hyper_params.factor_map[path]
            except KeyError:
                rule = HEURISTIC_RULE
        averaging, factored = self._parse_rule(rule, shape, path)
        if isinstance(factored, HeuristicRule):
            factored = self._factored_dims(shape)
        return FactorDims(averaging, *(factored or ()))

    def derive_logical_axes(self, optimizer_state: Optimizer, param_logical_axes: Any) -> Optimizer:
        """See the base class.

        `v` and `m` have the parameter's axes if in use; `v_row` and `v_col` have no axes.

        Args:
          optimizer_state: the whole optimizer, parameters and state, as in T5X.
          param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s.
        """
        target = align_axes(optimizer_state.target, param_logical_axes)
        keeps_momentum = self.hyper_params.beta1 is not None
        names, specs, _ = flatten_by_name(target, is_leaf=lambda x: x is None)
        axes = dict(zip(names, specs, strict=True))
        state_names, slots, treedef = flatten_by_name(optimizer_state.state.param_states, is_leaf=_is_slots)
        param_states = treedef.unflatten(
            [
                # A subclass may have slots of its own: they have no axes.
                jax.tree.map(lambda _: None, slot).replace(
                    v=None if jnp.shape(slot.v) == (1,) else axes[name], m=axes[name] if keeps_momentum else None
                )
                for name, slot in zip(state_names, slots, strict=True)
            ]
        )
        return optimizer_state.replace(state=OptimizerState(step=None, param_states=param_states), target=target)


def _is_slots(node: Any) -> bool:
    return isinstance(node, AdafactorParamState)


def _in_order(names: list[str], tree: Any, what: str) -> list[Any]:
    """Lists a tree's leaves in the order of the parameters' names.

    Leaves are slots, too; the tree is a dict or a FrozenDict.
    """
    found, leaves, _ = flatten_by_name(tree, is_leaf=_is_slots)
    if found == names:
        return leaves
    by_name = dict(zip(found, leaves, strict=True))
    if by_name.keys() != set(names):
        different = sorted(by_name.keys() ^ set(names))
        raise ValueError(f"Parameters and {what} have not the same leaves; they differ in {different}.")
    return [by_name[name] for name in names]
