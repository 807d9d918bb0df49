"""Optimizers of Optax, and parameters for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

MASK = {"enc": {"w": True, "b": False}, "dec": {"w": True}}
LABELS = {"enc": {"w": "x", "b": "y"}, "dec": {"w": "x"}}


def small_params(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"enc": {"w": (4, 8), "b": (8,)}, "dec": {"w": (8, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def zero_schedule(_):
    return 0.1


def new_key():
    return jax.random.key(7)


# All of Optax that keeps a state of its own kind. Values: a factory, and keyword arguments for each update.
OPTAX = {
    "adam": lambda: optax.adam(0.1),
    "adam_schedule": lambda: optax.adam(zero_schedule),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.1), lambda step: step > 1),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=zero_schedule, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(0.1), MASK),
    "masked_by_function": lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "masked_subtree": lambda: optax.masked(optax.adam(0.1), {"enc": False, "dec": True}),
    "multi_transform": lambda: optax.multi_transform({"x": optax.adam(0.1), "y": optax.sgd(0.1, 0.9)}, LABELS),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "named_chain": lambda: optax.named_chain(("first", optax.scale_by_adam()), ("then", optax.scale(-0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=new_key()),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "rprop": lambda: optax.rprop(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "contrib.acprop": lambda: optax.contrib.acprop(0.1),
    "contrib.ademamix": lambda: optax.contrib.ademamix(0.1),
    "contrib.adopt": lambda: optax.contrib.adopt(0.1),
    "contrib.cocob": lambda: optax.contrib.cocob(0.1),
    "contrib.dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "contrib.dog": lambda: optax.contrib.dog(0.1),
    "contrib.galore": lambda: optax.contrib.galore(0.1, rank=2),
    "contrib.madgrad": lambda: optax.contrib.madgrad(0.1),
    "contrib.mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
    "contrib.momo": lambda: optax.contrib.momo(),
    "contrib.muon": lambda: optax.contrib.muon(0.1),
    "contrib.plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "contrib.prodigy": lambda: optax.contrib.prodigy(),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "contrib.split_complex": lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
}


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, value), wanted in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, wanted = jax.random.key_data(value), jax.random.key_data(wanted)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))
