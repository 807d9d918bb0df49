"""Every option of Adafactor against a slow float64 oracle written from the paper, and against optax.adafactor."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orbax_t5x.adafactor import Adafactor, FactorDim, HParamMap

_ROW, _COLUMN, _BATCH, _NONE = FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH, FactorDim.NONE
_RULES = {"qkv": (_ROW, _BATCH, _COLUMN, _COLUMN), "out": (_COLUMN, _COLUMN, _ROW), "cube": (_BATCH, _NONE, _NONE)}
_SHAPES = {"qkv": (6, 2, 3, 4), "out": (3, 4, 6), "cube": (2, 3, 4), "tall": (9, 7), "scalar": ()}
_PLAIN_SHAPES = {"tall": (9, 7), "square": (8, 8), "bias": (5,)}


def _values(seed, scale=1.0, shapes=_PLAIN_SHAPES):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def _batches(array, batch_dims):
    """The index of every independent matrix of an array."""
    ranges = [range(size) if dim in batch_dims else [slice(None)] for dim, size in enumerate(array.shape)]
    return itertools.product(*ranges)


class _Oracle:
    """One parameter in float64, one batch entry after another; slots keep the rank of the parameter."""

    def __init__(self, name, value, options):
        self.options = options
        self.value = np.asarray(value, np.float64)
        self.moment = None
        self.row, self.column, self.batch = self._dims(name, value.shape)
        self.row_moment = self.column_moment = None
        self.momentum = np.zeros_like(self.value)

    def _dims(self, name, shape):
        if not self.options.get("factored", True):
            return (), (), ()
        rule = _RULES.get(name) if self.options.get("use_rules", True) else None
        if rule is not None:
            row, column, batch = (tuple(i for i, part in enumerate(rule) if part is p) for p in (_ROW, _COLUMN, _BATCH))
            return row, column, batch
        if len(shape) == 2 and min(shape) >= self.options.get("min_dim_size_to_factor", 128):
            return ((0,), (1,), ()) if shape[0] <= shape[1] else ((1,), (0,), ())
        return (), (), ()

    def step(self, grad, t, learning_rate):
        o = self.options
        grad = np.asarray(grad, np.float64)
        decay = 1 - (t + 1 - o.get("step_offset", 0)) ** -o.get("decay_rate", 0.8)
        square = grad**2 + o.get("epsilon1", 1e-30)

        def running(old, new):
            return (1 - decay) * new if old is None else decay * old + (1 - decay) * new

        if self.row:
            self.row_moment = running(self.row_moment, square.mean(self.column, keepdims=True))
            self.column_moment = running(self.column_moment, square.mean(self.row, keepdims=True))
            total = self.row_moment.mean(self.row, keepdims=True)
            update = grad / np.sqrt(self.row_moment * self.column_moment / total)
        else:
            self.moment = running(self.moment, square)
            update = np.asarray(grad / np.sqrt(self.moment))
        scale = np.ones_like(self.value)
        for index in _batches(self.value, self.batch):
            threshold = o.get("clipping_threshold", 1.0)
            if threshold:
                update[index] = update[index] / max(1.0, np.sqrt(np.mean(update[index] ** 2)) / threshold)
            if o.get("scaled", True):
                rms = max(np.sqrt(np.mean(self.value[index] ** 2)), o.get("epsilon2", 1e-3))
                scale[index] = min(rms, o.get("max_parameter_scale") or np.inf)
        update = update * scale * learning_rate
        beta1 = o.get("beta1")
        if beta1 is not None:
            self.momentum = beta1 * self.momentum + (1 - beta1) * update
            update = self.momentum
        rate, exponent = o.get("weight_decay_rate"), o.get("weight_decay_rate_lr_exponent")
        if exponent:
            rate = (1.0 if rate is None else rate) * learning_rate**exponent
        self.value = self.value * (1 - (rate or 0)) - update


# Options that have nothing to do with each other share a case: compiling takes all the time here.
_CASES = {
    "plain": {},
    "no_clipping": {"clipping_threshold": None, "epsilon2": 3.0},
    "clipping_zero": {"clipping_threshold": 0, "decay_rate": 0.5},
    "tight_clipping": {"clipping_threshold": 0.3, "step_offset": -10},
    "no_scale": {"multiply_by_parameter_scale": False, "min_dim_size_to_factor": 8},
    "max_scale": {"max_parameter_scale": 0.05, "beta1": 0.7},
    "whole": {"factored": False},
    "exponent_alone": {"weight_decay_rate_lr_exponent": 2.0, "beta1": 0.0},
    "exponent_zero": {"weight_decay_rate": 0.02, "weight_decay_rate_lr_exponent": 0, "epsilon1": 0.01},
    "everything": {
        "beta1": 0.9,
        "weight_decay_rate": 0.5,
        "weight_decay_rate_lr_exponent": 0.5,
        "clipping_threshold": 0.7,
        "max_parameter_scale": 0.5,
        "decay_rate": 0.7,
        "step_offset": -3,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_every_option_equals_the_oracle(case):
    options = _CASES[case]
    rules = (
        None if options.get("factored") is False else HParamMap([(f"^{name}$", rule) for name, rule in _RULES.items()])
    )
    definition = Adafactor(0.1, factor_map=rules, **({"min_dim_size_to_factor": 2} | options))
    oracle_options = {
        "min_dim_size_to_factor": 2,
        "scaled": options.get("multiply_by_parameter_scale", True),
        **options,
    }
    params = _values(0, shapes=_SHAPES)
    oracles = {name: _Oracle(name, value, oracle_options) for name, value in params.items()}
    optimizer = definition.create(params)
    step = jax.jit(lambda optimizer, grads, rate: optimizer.apply_gradient(grads, learning_rate=rate))
    for t, rate in enumerate((0.1, 0.03, 0.2)):
        grads = _values(t + 1, scale=10.0**-t, shapes=_SHAPES)
        optimizer = step(optimizer, grads, rate)
        for name, oracle in oracles.items():
            oracle.step(grads[name], t, rate)
            np.testing.assert_allclose(optimizer.target[name], oracle.value, rtol=3e-6, atol=3e-6, err_msg=name)
    slots = optimizer.state.param_states
    for name, oracle in oracles.items():
        if oracle.row:
            squeezed = oracle.row_moment.squeeze(oracle.column), oracle.column_moment.squeeze(oracle.row)
            np.testing.assert_allclose(slots[name].v_row, squeezed[0], rtol=2e-6, err_msg=name)
            np.testing.assert_allclose(slots[name].v_col, squeezed[1], rtol=2e-6, err_msg=name)
            assert slots[name].v.shape == (1,)
        else:
            np.testing.assert_allclose(slots[name].v, oracle.moment, rtol=2e-6, err_msg=name)
        if options.get("beta1") is not None:
            np.testing.assert_allclose(slots[name].m, oracle.momentum, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"beta1": 0.9}, {"weight_decay_rate": 0.1}, {"multiply_by_parameter_scale": False}]
)
def test_matrices_step_as_in_optax(options):
    """So does weight decay: what Optax subtracts beside the update, T5X takes off the parameter first."""
    momentum = options.get("beta1")
    reference = optax.adafactor(
        0.1,
        min_dim_size_to_factor=2,
        momentum=momentum,
        multiply_by_parameter_scale=options.get("multiply_by_parameter_scale", True),
        weight_decay_rate=options.get("weight_decay_rate"),
    )
    params = _values(0)
    optimizer, state = Adafactor(0.1, min_dim_size_to_factor=2, **options).create(params), reference.init(params)

    @jax.jit
    def both(optimizer, params, state, grads):
        updates, state = reference.update(grads, state, params)
        return optimizer.apply_gradient(grads), optax.apply_updates(params, updates), state

    for seed in (1, 2, 3):
        optimizer, params, state = both(optimizer, params, state, _values(seed))
        for name in params:
            np.testing.assert_allclose(optimizer.target[name], params[name], rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_clipping_by_global_norm_comes_first():
    grads = _values(1)
    norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads.values()))
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    options = {"factored": False, "epsilon1": 1.0}
    for threshold, factor in ((norm / 3, 1 / 3), (norm * 2, 1.0), (0, 1.0)):
        clipped = step(Adafactor(0.1, global_norm_clip_threshold=threshold, **options).create(_values(0)), grads)
        scaled = jax.tree.map(lambda grad, factor=factor: grad * factor, grads)
        plain = step(Adafactor(0.1, **options).create(_values(0)), scaled)
        for name, value in plain.target.items():
            np.testing.assert_allclose(clipped.target[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_scale_by_name():
    scaled = HParamMap([("tall|bias", True), ("", False)])
    params, grads = _values(0), _values(1)
    step = jax.jit(lambda optimizer: optimizer.apply_gradient(grads))
    targets = {
        choice: step(Adafactor(0.1, multiply_by_parameter_scale=choice).create(params)).target
        for choice in (scaled, True, False)
    }
    for name in params:
        expected = targets[name in ("tall", "bias")][name]
        np.testing.assert_allclose(targets[scaled][name], expected, rtol=1e-6)
        assert not np.allclose(targets[True][name], targets[False][name])


@pytest.mark.slow
def test_nan_elements_keep_their_old_values():
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    params = {"tall": jnp.ones((9, 7)), "bias": jnp.ones(5)}
    grads = {"tall": jnp.ones((9, 7)).at[2, 3].set(jnp.nan), "bias": jnp.arange(5.0).at[1].set(jnp.nan)}
    # Without clipping and scale nothing is averaged over, so that one NaN stays one.
    options = {"clipping_threshold": None, "multiply_by_parameter_scale": False, "beta1": 0.5, "factored": False}
    kept = step(Adafactor(0.1, skip_nan_updates=True, **options).create(params), grads)
    spread = step(Adafactor(0.1, skip_nan_updates=False, **options).create(params), grads)
    for name in params:
        holes = np.isnan(grads[name])
        assert np.isnan(np.asarray(spread.target[name]))[holes].all()
        np.testing.assert_array_equal(np.asarray(kept.target[name])[holes], 1.0)
        np.testing.assert_array_equal(np.asarray(kept.target[name])[~holes], np.asarray(spread.target[name])[~holes])
        for slot in ("v", "m"):
            np.testing.assert_array_equal(np.asarray(getattr(kept.state.param_states[name], slot))[holes], 0.0)
    factored = step(Adafactor(0.1, min_dim_size_to_factor=2, skip_nan_updates=True).create(params), grads)
    for leaf in jax.tree.leaves(factored):
        assert not np.isnan(leaf).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_have_the_parameters_dtype_and_slots_are_float32(dtype):
    params = {"tall": jnp.asarray(_values(0)["tall"], dtype), "bias": jnp.asarray(_values(0)["bias"], dtype)}
    grads = {name: jnp.asarray(_values(1)[name], dtype) for name in params}
    definition = Adafactor(0.1, min_dim_size_to_factor=2, beta1=0.9)
    step = jax.jit(lambda params, grads: definition.create(params).apply_gradient(grads))
    optimizer = step(params, grads)
    wide = step(*jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads)))
    for name in params:
        assert optimizer.target[name].dtype == dtype
        np.testing.assert_allclose(
            optimizer.target[name].astype(jnp.float32), wide.target[name], rtol=2.0**-8, atol=2.0**-10
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(optimizer.state.param_states)} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype_momentum", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_strict_promotion_and_no_drift_of_dtypes(dtype_momentum):
    """A step mixes dtypes as T5X's does, by JAX's default promotion, also where the caller's is strict."""
    definition = Adafactor(
        0.1,
        min_dim_size_to_factor=2,
        beta1=0.9,
        dtype_momentum=dtype_momentum,
        weight_decay_rate=0.1,
        weight_decay_rate_lr_exponent=1.0,
        global_norm_clip_threshold=1.0,
        max_parameter_scale=1.0,
        skip_nan_updates=True,
        factor_map=HParamMap([(f"^{name}$", rule) for name, rule in _RULES.items()]),
    )
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        params = _values(0, shapes=_SHAPES)
        before = jax.eval_shape(definition.create, params)
        after = jax.eval_shape(lambda o, g: o.apply_gradient(g, learning_rate=jnp.float32(0.2)), before, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), before) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), after
    )


@pytest.mark.slow
def test_sequences_of_parameters():
    params = [jnp.asarray(_values(0)["tall"]), (jnp.asarray(_values(0)["bias"]), None)]
    definition = Adafactor(
        0.1, min_dim_size_to_factor=2, multiply_by_parameter_scale=HParamMap([("^1/0$", False), ("", True)])
    )
    optimizer = jax.jit(lambda params: definition.create(params).apply_gradient(params))(params)
    assert isinstance(optimizer.target, list)
    assert isinstance(optimizer.target[1], tuple)
    assert set(optimizer.state_dict()["state"]["param_states"]) == {"0", "1"}
    restored = optimizer.restore_state(optimizer.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)
