"""One parameter's part of an Adafactor step: pure functions of `jax.numpy`, all arithmetic in float32.

The hyper-parameters and the slots of a parameter are Flax structs. What a parameter does not use stays as it is, so
that shapes, dtypes and shardings of a state never change. The order of operations is T5X's, so that its
roundings are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from orbax_t5x.optim.factor_rules import HEURISTIC_RULE, FactorDim, FactorRule, HParamMap
from orbax_t5x.optim.factored_dims import FactorDims, resolve_rule


class AdafactorHyperParams(flax.struct.PyTreeNode):
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


class AdafactorParamState(flax.struct.PyTreeNode):
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


def _factor_dims(hyper_params: Any, name: str, shape: Sequence[int]) -> FactorDims:
    rule: FactorRule = HEURISTIC_RULE
    if not hyper_params.factored:
        rule = None
    elif hyper_params.factor_map is not None:
        try:
            rule = hyper_params.factor_map[name]
        except KeyError:
            rule = HEURISTIC_RULE
    return resolve_rule(rule, shape, name, hyper_params.min_dim_size_to_factor)


def init_slots(hyper_params: Any, dtype_momentum: Any, name: str, param: Any) -> AdafactorParamState:
    """The slots of a parameter before the first step."""
    shape = jnp.shape(param)
    dims = _factor_dims(hyper_params, name, shape)
    # An array for each: a buffer that stands in several places cannot be donated to a step.
    slots = AdafactorParamState(*(jnp.zeros((1,), jnp.float32) for _ in range(4)))
    if dims.factored:
        v_row, v_col = dims.slot_shapes(shape)
        slots = slots.replace(v_row=jnp.zeros(v_row, jnp.float32), v_col=jnp.zeros(v_col, jnp.float32))
    else:
        slots = slots.replace(v=jnp.zeros_like(param, dtype=jnp.float32))
    if hyper_params.beta1 is not None:
        slots = slots.replace(m=jnp.zeros_like(param, dtype=dtype_momentum))
    return slots


def clip_by_global_norm(grads: list[Any], threshold: Any) -> list[Any]:
    """Scales all gradients together so that their common norm is at most the threshold."""
    grads = [grad.astype(jnp.float32) for grad in grads]
    norm = jnp.sqrt(sum((jnp.sum(grad * grad) for grad in grads), start=jnp.float32(0)))
    return [jnp.where(norm < threshold, grad, grad / norm * threshold) for grad in grads]


def step_param(hyper_params: Any, name: str, param: Any, slots: Any, grad: Any, step: Any) -> tuple[Any, Any]:
    """One parameter's step: its new value and slots."""
    dims = _factor_dims(hyper_params, name, param.shape)
    grad = grad.astype(jnp.float32)
    # NumPy's promotion: JAX has none where its promotion is set to strict.
    value = param.astype(np.promote_types(param.dtype, np.float32))
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
