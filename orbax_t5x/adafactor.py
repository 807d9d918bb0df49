"""T5X's Adafactor (Shazeer and Stern, 2018, arXiv 1804.04235), to T5X's numbers and with its state layout.

Each parameter has four slots: `v_row` and `v_col` (the factored second moment), `v` (the whole one) and `m` (momentum);
those that a parameter does not use are zeros((1,)) and never change. Second moments and all arithmetic are float32,
whatever the parameters are; results have the parameters' dtype. Everything is `jax.numpy` on the parameters where they
are: a step moves nothing to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp

from orbax_t5x._factor_rules import (
    HEURISTIC_RULE,
    STANDARD_LOGICAL_FACTOR_RULES,
    FactorDim,
    FactorDims,
    FactorRule,
    HeuristicRule,
    HParamMap,
    LogicalFactorRules,
    factor_name_to_factordim,
    resolve_rule,
    rules_from_axes,
)
from orbax_t5x._optax_axes import align_axes
from orbax_t5x._optax_state import named_leaves
from orbax_t5x._optimizer_base import Optimizer, OptimizerDef, OptimizerState, first_step

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


def standard_logical_factor_rules() -> flax.core.FrozenDict:
    """T5X's logical axis names and the part of each in the factored second moment."""
    return flax.core.freeze(dict(STANDARD_LOGICAL_FACTOR_RULES))


class _AdafactorHyperParams(flax.struct.PyTreeNode):
    """The arguments of `Adafactor`, but for the dtype of the momentum, which a step cannot change."""

    learning_rate: Any
    factored: bool
    multiply_by_parameter_scale: bool | HParamMap
    beta1: Any
    decay_rate: Any
    step_offset: Any
    clipping_threshold: Any
    weight_decay_rate: Any
    min_dim_size_to_factor: int
    epsilon1: Any
    epsilon2: Any
    factor_map: HParamMap | None
    logical_factor_rules: Mapping[str, FactorDim] | None
    weight_decay_rate_lr_exponent: Any
    global_norm_clip_threshold: Any
    max_parameter_scale: Any
    skip_nan_updates: bool


class _AdafactorParamState(flax.struct.PyTreeNode):
    """The slots of one parameter.

    Attributes:
      v_row: mean of the squared gradient over the COLUMN dimensions, or zeros((1,)).
      v_col: mean over the ROW dimensions, or zeros((1,)).
      v: the whole second moment where it is not factored, else zeros((1,)).
      m: momentum, or zeros((1,)).
    """

    v_row: Any
    v_col: Any
    v: Any
    m: Any


class Adafactor(OptimizerDef):
    """T5X's Adafactor.

    Args:
      learning_rate: may also be given to each step.
      factored: whether second moments are factored at all.
      multiply_by_parameter_scale: whether the learning rate is relative to the RMS of the parameter; a bool, or an
      `HParamMap` of
        bools.
      beta1: momentum; None: none is kept.
      decay_rate: the second moments' decay at step t (from 1) is 1 - t ** -decay_rate.
      step_offset: subtracted from the step, for fine-tuning.
      clipping_threshold: the RMS to which updates are clipped; None or 0: no clipping.
      weight_decay_rate: what a step takes off the parameter, as a fraction.
      min_dim_size_to_factor: matrices with a smaller dimension are not factored, where size decides.
      epsilon1: added to squared gradients.
      epsilon2: the least parameter scale.
      dtype_momentum: of `m`.
      factor_map: a rule for each parameter; a parameter without one is factored by size.
      logical_factor_rules: the part of each logical axis name (`standard_logical_factor_rules()`), from which
        `set_param_axes` makes the factor map.
      weight_decay_rate_lr_exponent: the weight decay is multiplied by learning_rate to this power; a rate of None then
        counts as 1.
      global_norm_clip_threshold: the norm of all gradients together is clipped to it; None or 0: no clipping.
      max_parameter_scale: the largest parameter scale.
      skip_nan_updates: whether elements of parameters and state that would become NaN keep their old value.
    """

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
        factor_map: HParamMap | None = None,
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
            _AdafactorHyperParams(
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
        self.dtype_momentum = jax.dtypes.canonicalize_dtype(dtype_momentum)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        assert isinstance(other, Adafactor)
        return self.hyper_params == other.hyper_params and self.dtype_momentum == other.dtype_momentum

    def __hash__(self) -> int:
        # Hyper-parameters may be arrays, and `set_param_axes` changes them: only equality tells definitions apart.
        return hash((type(self), self.dtype_momentum))

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Makes the factor map from the logical axes of the parameters; does nothing without `logical_factor_rules`.

        It changes this definition, as T5X's does: call it before `create`.

        Args:
          param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s of axis names.

        Raises:
          ValueError: an axis name without a rule, or an incomplete set of them.
        """
        rules = self.hyper_params.logical_factor_rules
        if rules is not None:
            self.hyper_params = self.hyper_params.replace(factor_map=rules_from_axes(param_logical_axes, rules))

    def init_state(self, params: Any) -> OptimizerState:
        """A new state: a tree like the parameters with the slots of each."""
        names, leaves, treedef = named_leaves(params)
        states = [self._init_slots(name, param) for name, param in zip(names, leaves, strict=True)]
        return OptimizerState(step=first_step(), param_states=treedef.unflatten(states))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """One step; see the base class."""
        if hyper_params.learning_rate is None:
            raise ValueError("Adafactor needs a learning_rate, when it is made or at each step.")
        names, leaves, treedef = named_leaves(params)
        grad_leaves = _in_order(names, grads, "gradients")
        slots = _in_order(names, state.param_states, "optimizer state")
        if hyper_params.global_norm_clip_threshold:
            grad_leaves = _clip_by_global_norm(grad_leaves, hyper_params.global_norm_clip_threshold)
        new_leaves, new_slots = [], []
        for name, param, param_slots, grad in zip(names, leaves, slots, grad_leaves, strict=True):
            new_param, new_param_slots = self._step(hyper_params, name, param, param_slots, grad, state.step)
            new_leaves.append(new_param)
            new_slots.append(new_param_slots)
        _, state_treedef = jax.tree.flatten(state.param_states, is_leaf=_is_slots)
        slots_by_name = dict(zip(names, new_slots, strict=True))
        state_names = named_leaves(state.param_states, is_leaf=_is_slots)[0]
        param_states = state_treedef.unflatten([slots_by_name[name] for name in state_names])
        return treedef.unflatten(new_leaves), OptimizerState(step=state.step + 1, param_states=param_states)

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """See the base class. `v` and `m` have the parameter's axes where in use; `v_row` and `v_col` have none."""
        target = align_axes(optimizer.target, param_logical_axes)
        keeps_momentum = self.hyper_params.beta1 is not None
        names, specs, _ = named_leaves(target, is_leaf=lambda x: x is None)
        axes = dict(zip(names, specs, strict=True))
        state_names, slots, treedef = named_leaves(optimizer.state.param_states, is_leaf=_is_slots)
        param_states = treedef.unflatten(
            [
                _AdafactorParamState(
                    v_row=None,
                    v_col=None,
                    v=None if jnp.shape(slot.v) == (1,) else axes[name],
                    m=axes[name] if keeps_momentum else None,
                )
                for name, slot in zip(state_names, slots, strict=True)
            ]
        )
        return optimizer.replace(state=OptimizerState(step=None, param_states=param_states), target=target)

    def _dims(self, hyper_params: Any, name: str, shape: Sequence[int]) -> FactorDims:
        rule: FactorRule = HEURISTIC_RULE
        if not hyper_params.factored:
            rule = None
        elif hyper_params.factor_map is not None:
            try:
                rule = hyper_params.factor_map[name]
            except KeyError:
                rule = HEURISTIC_RULE
        return resolve_rule(rule, shape, name, hyper_params.min_dim_size_to_factor)

    def _init_slots(self, name: str, param: Any) -> _AdafactorParamState:
        shape = jnp.shape(param)
        dims = self._dims(self.hyper_params, name, shape)
        # An array for each: a buffer that stands in several places cannot be donated to a step.
        slots = _AdafactorParamState(*(jnp.zeros((1,), jnp.float32) for _ in range(4)))
        if dims.factored:
            slots = slots.replace(
                v_row=jnp.zeros(_without(shape, dims.column), jnp.float32),
                v_col=jnp.zeros(_without(shape, dims.row), jnp.float32),
            )
        else:
            slots = slots.replace(v=jnp.zeros_like(param, dtype=jnp.float32))
        if self.hyper_params.beta1 is not None:
            slots = slots.replace(m=jnp.zeros_like(param, dtype=self.dtype_momentum))
        return slots

    def _step(self, hyper_params: Any, name: str, param: Any, slots: Any, grad: Any, step: Any) -> tuple[Any, Any]:
        """One parameter's step: its new value and slots."""
        dims = self._dims(hyper_params, name, param.shape)
        grad = grad.astype(jnp.float32)
        value = param.astype(jnp.promote_types(param.dtype, jnp.float32))
        learning_rate = jnp.asarray(hyper_params.learning_rate, jnp.float32)
        update, moments = _normalize(hyper_params, dims, slots, grad, step)
        if hyper_params.clipping_threshold:
            update = update / jnp.maximum(1.0, _rms(update, dims.averaging) / hyper_params.clipping_threshold)
        update = update * (learning_rate * _param_scale(hyper_params, name, value, dims.averaging))
        if hyper_params.beta1 is not None:
            update = _decayed_momentum(slots.m, hyper_params.beta1) + (1.0 - hyper_params.beta1) * update
            moments["m"] = update.astype(slots.m.dtype)
        decay = hyper_params.weight_decay_rate
        if hyper_params.weight_decay_rate_lr_exponent:
            decay = (1.0 if decay is None else decay) * learning_rate**hyper_params.weight_decay_rate_lr_exponent
        decayed = value if decay is None else (1.0 - decay) * value
        new_param = decayed - update.astype(value.dtype)
        if hyper_params.skip_nan_updates:
            new_param = jnp.where(jnp.isnan(new_param), value, new_param)
            moments = {key: jnp.where(jnp.isnan(new), getattr(slots, key), new) for key, new in moments.items()}
        return new_param.astype(param.dtype), slots.replace(**moments)


def _clip_by_global_norm(grads: list[Any], threshold: Any) -> list[Any]:
    grads = [grad.astype(jnp.float32) for grad in grads]
    norm = jnp.sqrt(sum((jnp.sum(grad * grad) for grad in grads), start=jnp.float32(0)))
    return [jnp.where(norm < threshold, grad, grad / norm * threshold) for grad in grads]


def _normalize(hyper_params: Any, dims: FactorDims, slots: Any, grad: Any, step: Any) -> tuple[Any, dict[str, Any]]:
    """The gradient divided by the root of its second moment, and the new moments."""
    steps = jnp.asarray(step - hyper_params.step_offset + 1, jnp.float32)
    beta2 = 1.0 - steps ** (-hyper_params.decay_rate)
    square = grad * grad + hyper_params.epsilon1
    if not dims.factored:
        v = beta2 * slots.v + (1.0 - beta2) * square
        return grad * v**-0.5, {"v": v}
    v_row = beta2 * slots.v_row + (1.0 - beta2) * jnp.mean(square, axis=dims.column)
    v_col = beta2 * slots.v_col + (1.0 - beta2) * jnp.mean(square, axis=dims.row)
    # The ROW dimensions as they are numbered in v_row, which lacks the COLUMN ones.
    row_in_v_row = tuple(dim - sum(other < dim for other in dims.column) for dim in dims.row)
    row_factor = (v_row / jnp.mean(v_row, axis=row_in_v_row, keepdims=True)) ** -0.5
    col_factor = v_col**-0.5
    update = grad * jnp.expand_dims(row_factor, dims.column) * jnp.expand_dims(col_factor, dims.row)
    return update, {"v_row": v_row, "v_col": v_col}


def _decayed_momentum(momentum: Any, beta1: Any) -> Any:
    """beta1 * momentum in the momentum's own dtype, as T5X has it, then float32.

    The rounding is spelled out: XLA leaves it out where it only sees casts, and a compiled step would differ.
    """
    dtype = momentum.dtype
    product = jnp.asarray(beta1, dtype).astype(jnp.float32) * momentum.astype(jnp.float32)
    if dtype == jnp.float32:
        return product
    limits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(product, exponent_bits=limits.nexp, mantissa_bits=limits.nmant)


def _param_scale(hyper_params: Any, name: str, value: Any, averaging: tuple[int, ...]) -> Any:
    """What the learning rate of a parameter is multiplied by: a scalar 1, or an array that broadcasts against it."""
    scaled = hyper_params.multiply_by_parameter_scale
    if not (scaled[name] if isinstance(scaled, HParamMap) else scaled):
        return jnp.float32(1)
    scale = jnp.maximum(_rms(value, averaging).astype(jnp.float32), hyper_params.epsilon2)
    if hyper_params.max_parameter_scale is not None:
        scale = jnp.minimum(scale, hyper_params.max_parameter_scale)
    return scale


def _rms(array: Any, axis: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(array * array, axis=axis, keepdims=True))


def _without(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def _is_slots(node: Any) -> bool:
    return isinstance(node, _AdafactorParamState)


def _in_order(names: list[str], tree: Any, what: str) -> list[Any]:
    """The leaves (or slots) of a tree in the order of the parameters' names; a dict and a FrozenDict may meet here."""
    found, leaves, _ = named_leaves(tree, is_leaf=_is_slots)
    if found == names:
        return leaves
    by_name = dict(zip(found, leaves, strict=True))
    if by_name.keys() != set(names):
        different = sorted(by_name.keys() ^ set(names))
        raise ValueError(f"Parameters and {what} have not the same leaves; they differ in {different}.")
    return [by_name[name] for name in names]
