"""Five compiled steps of Adafactor equal T5X's arithmetic bit for bit, and five eager ones too."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_t5x.adafactor import HEURISTIC_RULE, Adafactor, FactorDim, HParamMap, standard_logical_factor_rules
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import adafactor_oracle as oracle
from tests.support import t5_model

pytestmark = pytest.mark.slow

STEPS = 5
# Matrices by size, with the larger dimension first and last; a whole moment; a rule with BATCH and groups.
SHAPES = {"encoder/embedding": (40, 16), "encoder/wi": (16, 48), "encoder/bias": (7,), "decoder/scanned": (16, 3, 4, 8)}
FACTORED = {"encoder/embedding": ((1,), (0,)), "encoder/wi": ((0,), (1,)), "decoder/scanned": ((0,), (2, 3))}
AVERAGING = {"decoder/scanned": (0, 2, 3)}
RULES = HParamMap(
    [("scanned", (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN, FactorDim.COLUMN)), (".*", HEURISTIC_RULE)]
)
CASES = {
    "plain": {},
    "momentum": {"beta1": 0.9},
    "bfloat16_momentum": {"beta1": 0.9, "dtype_momentum": jnp.bfloat16},
    "float16_momentum": {"beta1": 0.7, "dtype_momentum": jnp.float16},
    "global_norm": {"global_norm_clip_threshold": 1.0},
    "loose_global_norm": {"global_norm_clip_threshold": 3.0, "beta1": 0.5},
    "never_reached_global_norm": {"global_norm_clip_threshold": 1e6},
    "decay": {"weight_decay_rate": 0.01},
    "decay_by_rate": {"weight_decay_rate_lr_exponent": 1.5, "max_parameter_scale": 0.5},
    "no_scale": {"multiply_by_parameter_scale": False, "clipping_threshold": None},
    "scale_by_name": {"multiply_by_parameter_scale": HParamMap([("encoder/", False), ("", True)])},
    "nan": {"skip_nan_updates": True, "beta1": 0.9},
    "everything": {
        "beta1": 0.9,
        "dtype_momentum": jnp.bfloat16,
        "weight_decay_rate": 0.3,
        "weight_decay_rate_lr_exponent": 1.0,
        "global_norm_clip_threshold": 1.0,
        "max_parameter_scale": 0.7,
        "skip_nan_updates": True,
        "clipping_threshold": 0.5,
        "decay_rate": 0.7,
        "step_offset": -10,
        "epsilon1": 1e-10,
        "epsilon2": 1e-2,
    },
}


def values(seed, dtype, *, holes=False):
    random = np.random.default_rng(seed)
    found = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    if holes:
        for value in found.values():
            value[random.random(value.shape) < 0.1] = np.nan
    return {name: jnp.asarray(value, dtype) for name, value in found.items()}


def nested(flat):
    tree = {}
    for name, value in flat.items():
        tower, rest = name.split("/")
        tree.setdefault(tower, {})[rest] = value
    return tree


def assert_same_bits(got, wanted, where):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, where
    got, wanted = np.asarray(got), np.asarray(wanted)
    differ = np.count_nonzero(got.view(f"u{got.itemsize}") != wanted.view(f"u{wanted.itemsize}"))
    assert differ == 0, f"{where}: {differ} of {got.size} elements differ"


def run_both(case, dtype, wrap, *, rate=0.05):
    """Yields our optimizer, and the oracle's parameters and slots, after each step."""
    options = dict(CASES[case])
    definition = Adafactor(rate, min_dim_size_to_factor=8, factor_map=RULES, **options)
    scale = options.pop("multiply_by_parameter_scale", True)
    options["scaled"] = {name: scale[name] if isinstance(scale, HParamMap) else scale for name in SHAPES}
    momentum_dtype = options.pop("dtype_momentum", jnp.float32)

    def ours(optimizer, grads, rate):
        return optimizer.apply_gradient(grads, learning_rate=rate)

    def theirs(params, slots, grads, t, rate):
        return oracle.step(params, slots, grads, t, {**options, "learning_rate": rate}, FACTORED, AVERAGING)

    ours, theirs = wrap(ours), wrap(theirs)
    # In the order in which a tree's leaves come: a sum of floats depends on it.
    params = {name: values(0, dtype)[name] for name in sorted(SHAPES)}
    slots = oracle.init(params, FACTORED, beta1=options.get("beta1"), dtype_momentum=momentum_dtype)
    optimizer = definition.create(nested(params))
    for t in range(STEPS):
        flat = values(t + 1, dtype, holes=options.get("skip_nan_updates", False))
        grads = {name: flat[name] for name in params}
        now = jnp.float32(rate / (t + 1))
        optimizer = ours(optimizer, nested(grads), now)
        params, slots = theirs(params, slots, grads, jnp.int32(t), now)
        yield t, optimizer, params, slots


# Compiling takes all the time here.
COMPILED = ("plain", "bfloat16_momentum", "global_norm", "loose_global_norm", "decay_by_rate", "nan", "everything")


@pytest.mark.parametrize(
    ("case", "dtype", "mode"),
    [
        *((case, jnp.float32, "eager") for case in CASES),
        *((case, jnp.float32, "compiled") for case in COMPILED),
        *(("plain", jnp.bfloat16, mode) for mode in ("eager", "compiled")),
    ],
)
def test_five_steps_are_t5xs_bit_for_bit(case, dtype, mode):
    wrap = jax.jit if mode == "compiled" else lambda function: function
    for t, optimizer, params, slots in run_both(case, dtype, wrap):
        for name, value in params.items():
            tower, rest = name.split("/")
            assert_same_bits(optimizer.target[tower][rest], value, f"step {t}, {name}")
            for slot, wanted in slots[name].items():
                got = getattr(optimizer.state.param_states[tower][rest], slot)
                assert_same_bits(got, wanted, f"step {t}, {name}/{slot}")


def by_size(shape):
    """(row dims, column dims) of a matrix that is factored: of the two the larger, or the later, is the column."""
    if len(shape) != 2 or min(shape) < 8:
        return None
    return ((1,), (0,)) if shape[0] > shape[1] else ((0,), (1,))


def test_five_steps_of_a_trainer_are_t5xs_bit_for_bit():
    """Loss, gradients and update in one compiled function, as T5X's trainer has them, optimized as users' are."""
    compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    options = {"beta1": 0.9, "global_norm_clip_threshold": 0.5, "weight_decay_rate": 0.01}
    config = t5_model.T5Config(encoder_layers=1, decoder_layers=0)  # compiling takes all the time
    model, variables = t5_model.init(config)
    definition = Adafactor(
        min_dim_size_to_factor=8,
        logical_factor_rules=standard_logical_factor_rules(),
        dtype_momentum=jnp.bfloat16,
        **options,
    )
    state = FlaxOptimTrainState.create(definition, variables)
    loss_and_grads = jax.value_and_grad(partial(t5_model.loss, model))
    factored = {name: dims for name, param in flatten(state.params).items() if (dims := by_size(param.shape))}

    @compiled
    def ours(state, rate, *batch):
        loss, grads = loss_and_grads(state.params, *batch)
        return state.apply_gradient(grads, rate), loss

    @compiled
    def theirs(params, slots, t, rate, *batch):
        loss, grads = loss_and_grads(unflatten(params), *batch)
        grads = {name: flatten(grads)[name] for name in params}
        return *oracle.step(params, slots, grads, t, {**options, "learning_rate": rate}, factored, {}), loss

    params = dict(sorted(flatten(state.params).items(), key=lambda item: item[0].split("/")))
    slots = oracle.init(params, factored, beta1=0.9, dtype_momentum=jnp.bfloat16)
    for t in range(STEPS):
        rate, batch = jnp.float32(0.01 / (t + 1)), t5_model.batch(t, config)
        state, loss = ours(state, rate, *batch)
        params, slots, expected_loss = theirs(params, slots, jnp.int32(t), rate, *batch)
        assert_same_bits(loss, expected_loss, f"step {t}, loss")
    got = flatten(state.state_dict())
    for name, value in params.items():
        assert_same_bits(got[f"target/{name}"], value, name)
        for slot, wanted in slots[name].items():
            assert_same_bits(got[f"state/param_states/{name}/{slot}"], wanted, f"{name}/{slot}")
