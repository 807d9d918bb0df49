"""T5X's Adafactor step written once more, for comparisons bit for bit: plain `jax.numpy` in T5X's order of operations.

Nothing here is shared with the package. What a parameter's second moment is averaged over is given by hand
(`factored=(row dims, column dims)`), so that this is arithmetic alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def init(params, factored, *, beta1=None, dtype_momentum=jnp.float32):
    """The slots of every parameter, by name."""
    slots = {}
    for name, param in params.items():
        kept = {slot: jnp.zeros((1,)) for slot in ("v_row", "v_col", "v", "m")}
        if factored.get(name):
            row, column = factored[name]
            shape = param.shape
            kept["v_row"] = jnp.zeros([size for dim, size in enumerate(shape) if dim not in column])
            kept["v_col"] = jnp.zeros([size for dim, size in enumerate(shape) if dim not in row])
        else:
            kept["v"] = jnp.zeros(param.shape)
        if beta1 is not None:
            kept["m"] = jnp.zeros(param.shape, dtype_momentum)
        slots[name] = kept
    return slots


def step(params, slots, grads, t, options, factored, averaging):
    """One step on flat dicts: the new parameters and slots.

    Args:
      params: by name.
      slots: by name, then by slot.
      grads: by name.
      t: how many steps were made before.
      options: Adafactor's arguments by T5X's names; `scaled` (by name) in place of `multiply_by_parameter_scale`.
      factored: (row dims, column dims) by name; absent where the second moment is whole.
      averaging: the dimensions over which scale and clipping average, by name; absent for all.
    """
    with jax.numpy_dtype_promotion("standard"):
        threshold = options.get("global_norm_clip_threshold")
        if threshold:
            squares = [jnp.sum(jnp.square(grad)) for grad in grads.values()]
            norm = jnp.sqrt(jnp.sum(jnp.array(squares)))
            scale = threshold * jnp.minimum(1.0 / threshold, 1.0 / norm)
            grads = {name: grad * scale for name, grad in grads.items()}
        new_params, new_slots = {}, {}
        for name, param in params.items():
            dims = averaging.get(name, tuple(range(param.ndim)))
            new_params[name], new_slots[name] = _step_param(
                name, param, slots[name], grads[name], t, options, factored.get(name), dims
            )
    return new_params, new_slots


def _step_param(name, param, slots, grad, t, options, factored, dims):
    rate, beta1 = options["learning_rate"], options.get("beta1")
    decay = options.get("weight_decay_rate")
    exponent = options.get("weight_decay_rate_lr_exponent")
    if exponent:
        decay = (1.0 if decay is None else decay) * rate**exponent
    grad = grad.astype(jnp.float32)
    beta2 = 1.0 - (jnp.array(t - options.get("step_offset", 0), jnp.float32) + 1.0) ** (-options.get("decay_rate", 0.8))
    update_scale = rate
    if options.get("scaled", {}).get(name, True):
        param_scale = jnp.sqrt(jnp.mean(param * param, axis=dims, keepdims=True))
        param_scale = jnp.maximum(param_scale, options.get("epsilon2", 1e-3))
        if options.get("max_parameter_scale") is not None:
            param_scale = jnp.minimum(param_scale, options["max_parameter_scale"])
        update_scale = update_scale * param_scale
    mixing = 1.0 - beta2
    squared = grad * grad + options.get("epsilon1", 1e-30)
    new = dict(slots)
    if factored:
        row, column = factored
        new["v_row"] = beta2 * slots["v_row"] + mixing * jnp.mean(squared, axis=column)
        new["v_col"] = beta2 * slots["v_col"] + mixing * jnp.mean(squared, axis=row)
        row_in_v_row = tuple(dim - len([other for other in column if other < dim]) for dim in row)
        row_mean = jnp.mean(new["v_row"], axis=row_in_v_row, keepdims=True)
        row_factor = (new["v_row"] / row_mean) ** -0.5
        column_factor = new["v_col"] ** -0.5
        y = grad * jnp.expand_dims(row_factor, axis=column) * jnp.expand_dims(column_factor, axis=row)
    else:
        new["v"] = beta2 * slots["v"] + mixing * squared
        y = grad * new["v"] ** -0.5
    clipping = options.get("clipping_threshold", 1.0)
    if clipping is not None:
        y = y / jnp.maximum(1.0, jnp.sqrt(jnp.mean(y * y, axis=dims, keepdims=True)) / clipping)
    subtrahend = update_scale * y
    if beta1 is not None:
        momentum = beta1 * slots["m"] + (1.0 - beta1) * subtrahend
        subtrahend = momentum
        new["m"] = momentum.astype(slots["m"].dtype)
    new_param = param - subtrahend if decay is None else (1.0 - decay) * param - subtrahend
    if options.get("skip_nan_updates"):
        new = {slot: jnp.where(jnp.isnan(value), slots[slot], value) for slot, value in new.items()}
        new_param = jnp.where(jnp.isnan(new_param), param, new_param)
    return new_param.astype(param.dtype), new
