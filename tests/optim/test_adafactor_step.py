"""One step of Adafactor in NumPy beside ours, and the pieces that it is made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from orbax_t5x.optim.adafactor_step import (
    AdafactorHyperParams,
    clip_by_global_norm,
    init_slots,
    second_moment_decay,
    step_param,
)
from orbax_t5x.optim.factored_dims import FactorDims

WHOLE = FactorDims((0, 1))
MATRIX = FactorDims((0, 1), (0,), (1,))
HYPER_PARAMS = AdafactorHyperParams(
    learning_rate=0.1, factored=True, multiply_by_parameter_scale=True, beta1=0.9, decay_rate=0.8
)


def test_the_decay_is_that_of_the_paper():
    assert float(second_moment_decay(0, 0.8)) == 0.0
    assert float(second_moment_decay(9, 0.8)) == pytest.approx(1 - 10**-0.8)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.5, 100.0])
def test_gradients_are_scaled_together_to_the_norm(threshold):
    grads = [np.array([3.0, 0.0], np.float32), np.array([[4.0]], np.float32)]
    scale = min(1.0, threshold / 5.0)
    for ours, grad in zip(clip_by_global_norm(grads, threshold), grads, strict=True):
        np.testing.assert_allclose(ours, grad * scale, rtol=1e-6)


def test_slots_are_those_that_the_step_uses_and_placeholders():
    def shapes(dims, momentum):
        slots = init_slots(dims, np.ones((3, 4), np.float32), momentum)
        return slots.v_row.shape, slots.v_col.shape, slots.v.shape, slots.m.shape

    assert shapes(MATRIX, None) == ((3,), (4,), (1,), (1,))
    assert shapes(WHOLE, jnp.bfloat16) == ((1,), (1,), (3, 4), (3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [WHOLE, MATRIX])
def test_a_step_is_that_of_the_paper(dims):
    """Shazeer and Stern, algorithms 2 and 4, with momentum, in float64."""
    rng = np.random.default_rng(0)
    param, grad = rng.normal(size=(2, 3, 4)).astype(np.float32)
    slots = init_slots(dims, param, jnp.float32)
    ours, new_slots = step_param(HYPER_PARAMS, "w", dims, 0.25, param, slots, jnp.asarray(grad))
    square = grad.astype(np.float64) ** 2 + HYPER_PARAMS.epsilon1
    if dims.factored:
        row, column = 0.75 * square.mean(1), 0.75 * square.mean(0)
        moment = np.outer(row, column) / row.mean()
        np.testing.assert_allclose(new_slots.v_row, row, rtol=1e-5)
        np.testing.assert_allclose(new_slots.v_col, column, rtol=1e-5)
    else:
        moment = 0.75 * square
        np.testing.assert_allclose(new_slots.v, moment, rtol=1e-5)
    update = grad / np.sqrt(moment)
    update /= max(1.0, np.sqrt((update**2).mean()))
    momentum = 0.1 * 0.1 * update * max(np.sqrt((param.astype(np.float64) ** 2).mean()), HYPER_PARAMS.epsilon2)
    np.testing.assert_allclose(new_slots.m, momentum, rtol=1e-4)
    np.testing.assert_allclose(ours, param - momentum, rtol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_no_number_changes_nothing_where_that_is_asked_for():
    param = np.ones((3, 4), np.float32)
    slots = init_slots(WHOLE, param, jnp.float32)
    hyper_params = HYPER_PARAMS.replace(skip_nan_updates=True)
    grad = jnp.full((3, 4), jnp.nan)
    ours, new_slots = step_param(hyper_params, "w", WHOLE, 0.25, param, slots, grad)
    assert np.array_equal(ours, param) and not np.asarray(new_slots.v).any()
    assert np.isnan(step_param(HYPER_PARAMS, "w", WHOLE, 0.25, param, slots, grad)[0]).all()
