"""Adafactor's update of a parameter, as pure functions.

The hyper-parameters and the slots of a parameter are Flax structs. What a parameter does not use stays as it is, so
that shapes, dtypes and shardings of a state never change. The operations, their order and the dtypes that they have are
T5X's, and so its roundings: a compiled step equals T5X's compiled step bit for bit, and an eager one its eager one. The
two differ, because XLA leaves out roundings within a fused step, such as that of `beta1 * m` to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp

from orbax_t5x.optim.factor_rules import FactorDim, FactorRule, HParamMap
from orbax_t5x.optim.factored_dims import FactorDims


class AdafactorHyperParams(flax.struct.PyTreeNode):
    """Arguments of `Adafactor` that a step may change.

    Only the dtype of the momentum is fixed.
    """

    learning_rate: Any
    factored: bool
    multiply_by_parameter_scale: bool | HParamMap
    beta1: Any
    decay_rate: Any
    step_offset: Any = 0
    clipping_threshold: Any = 1.0
    weight_decay_rate: Any = None
    min_dim_size_to_factor: int = 128
    epsilon1: Any = 1e-30
    epsilon2: Any = 1e-3
    factor_map: HParamMap | Mapping[str, FactorRule] | None = None
    logical_factor_rules: Mapping[str, FactorDim] | None = None
    weight_decay_rate_lr_exponent: Any = None
    global_norm_clip_threshold: Any = None
    max_parameter_scale: Any = None
    skip_nan_updates: bool = False


class AdafactorParamState(flax.struct.PyTreeNode):
    """The slots of a parameter.

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


def init_slots(dims: FactorDims, param: Any, dtype_momentum: Any) -> AdafactorParamState:
    """Makes the slots of a parameter before the first step.

    `dtype_momentum` is None if no momentum is kept.
    """
    # An array for each: a buffer that a state has twice cannot be donated to a step.
    slots = AdafactorParamState(*(jnp.zeros((1,), jnp.float32) for _ in range(4)))
    if dims.factored:
        v_row, v_col = dims.slot_shapes(jnp.shape(param))
        slots = slots.replace(v_row=jnp.zeros(v_row, jnp.float32), v_col=jnp.zeros(v_col, jnp.float32))
    else:
        slots = slots.replace(v=jnp.zeros_like(param, dtype=jnp.float32))
    if dtype_momentum is not None:
        slots = slots.replace(m=jnp.zeros_like(param, dtype=dtype_momentum))
    return slots


def clip_by_global_norm(grads: Sequence[Any], threshold: Any) -> list[Any]:
    """Scales all gradients to a common norm of at most the threshold.

    See Pascanu et al., 2013.
    """
    squares = jnp.array([jnp.sum(jnp.square(grad)) for grad in grads])
    norm = jnp.sqrt(jnp.sum(squares))
    scale = threshold * jnp.minimum(1.0 / threshold, 1.0 / norm)
    return [grad * scale for grad in grads]


def second_moment_decay(step: Any, decay_rate: Any) -> Any:
    """Computes 1 - t ** -decay_rate for t = step + 1."""
    t = jnp.array(step, jnp.float32) + 1.0
    return 1.0 - t ** (-decay_rate)


def step_param(
    hyper_params: AdafactorHyperParams, path: str, dims: FactorDims, beta2: Any, param: Any, slots: Any, grad: Any
) -> tuple[Any, Any]:
    """Computes a parameter's new value and slots of the same class.

    `beta2` is the second moment's decay at this step; hyper-parameters may be given by name (`path`).
    """
    learning_rate = hyper_params.learning_rate
    update, moments = _normalize(hyper_params.epsilon1, dims, beta2, slots, grad.astype(jnp.float32))
    if hyper_params.clipping_threshold:
        update = update / jnp.maximum(1.0, _rms(update, dims.averaging) / hyper_params.clipping_threshold)
    update = update * (learning_rate * _param_scale(hyper_params, path, param, dims.averaging))
    if hyper_params.beta1 is not None:
        update = hyper_params.beta1 * slots.m + (1.0 - hyper_params.beta1) * update
        moments["m"] = update.astype(slots.m.dtype)
    decay = hyper_params.weight_decay_rate
    if hyper_params.weight_decay_rate_lr_exponent:
        decay = (1.0 if decay is None else decay) * learning_rate**hyper_params.weight_decay_rate_lr_exponent
    new_param = (param if decay is None else (1.0 - decay) * param) - update
    if hyper_params.skip_nan_updates:
        new_param = jnp.where(jnp.isnan(new_param), param, new_param)
        moments = {key: jnp.where(jnp.isnan(new), getattr(slots, key), new) for key, new in moments.items()}
    return new_param.astype(param.dtype), slots.replace(**moments)


def _normalize(epsilon: Any, dims: FactorDims, beta2: Any, slots: Any, grad: Any) -> tuple[Any, dict[str, Any]]:
    """Divides the gradient by the root of its second moment.

    Returns it and the new moments.
    """
    mixing_rate = 1.0 - beta2
    square = grad * grad + epsilon
    if not dims.factored:
        v = beta2 * slots.v + mixing_rate * square
        return grad * v**-0.5, {"v": v}
    v_row = beta2 * slots.v_row + mixing_rate * jnp.mean(square, axis=dims.column)
    v_col = beta2 * slots.v_col + mixing_rate * jnp.mean(square, axis=dims.row)
    # The ROW dimensions as they are numbered in v_row, which lacks the COLUMN ones.
    row_in_v_row = tuple(dim - sum(other < dim for other in dims.column) for dim in dims.row)
    row_factor = (v_row / jnp.mean(v_row, axis=row_in_v_row, keepdims=True)) ** -0.5
    col_factor = v_col**-0.5
    update = grad * jnp.expand_dims(row_factor, dims.column) * jnp.expand_dims(col_factor, dims.row)
    return update, {"v_row": v_row, "v_col": v_col}


def _param_scale(hyper_params: AdafactorHyperParams, path: str, param: Any, averaging: tuple[int, ...]) -> Any:
    """Returns the factor of a parameter's learning rate.

    It is 1, or an array that broadcasts against the parameter.
    """
    scaled = hyper_params.multiply_by_parameter_scale
    if not (scaled[path] if isinstance(scaled, HParamMap) else scaled):
        return 1
    scale = jnp.maximum(_rms(param, averaging), hyper_params.epsilon2)
    if hyper_params.max_parameter_scale is not None:
        scale = jnp.minimum(scale, hyper_params.max_parameter_scale)
    return scale


def _rms(array: Any, axis: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(array * array, axis=axis, keepdims=True))
