"""The linen T5 of `orbax_t5x.models` with reproducible values, for tests; as the networks of T5X have them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from orbax_t5x.models.config import T5Config
from orbax_t5x.models.linen import T5
from orbax_t5x.trees.flat import flatten, unflatten

_DEFAULT = T5Config()


def loss(model: T5, params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy over the targets that are not padding."""
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, inputs, targets))
    picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    weights = (targets > 0).astype(jnp.float32)
    return -jnp.sum(picked * weights) / jnp.sum(weights)


def batch(seed: int, config: T5Config = _DEFAULT, *, size: int = 8, length: int = 12) -> tuple[jax.Array, jax.Array]:
    """Reproducible inputs and targets, with padding in the second half of each row's last tokens."""
    keys = jax.random.split(jax.random.key(seed), 2)
    inputs, targets = (jax.random.randint(key, (size, length), 1, config.vocab) for key in keys)
    lengths = length - jnp.arange(size) % (length // 2)
    keep = (jnp.arange(length)[None] < lengths[:, None]).astype(inputs.dtype)
    return inputs * keep, targets * keep


def init(config: T5Config = _DEFAULT, seed: int = 0):
    """The model and its variables: `params` and `params_axes`.

    Values come from NumPy: compiling the initializers takes longer than most tests.
    """
    model = T5(config)
    variables = abstract(config)
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        if path[-1].key == "scale":
            return jnp.asarray(1 + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return model, {**variables, "params": jax.tree_util.tree_map_with_path(value, variables["params"])}


@functools.cache
def abstract(config: T5Config):
    """The abstract variables; a trace of a model takes a second, and many tests begin with the same one."""
    ids = jnp.ones((1, 4), jnp.int32)
    return jax.eval_shape(T5(config).init, jax.random.key(0), ids, ids)


def scanned_from(params, config: T5Config):
    """The parameters of a scanned model, by the table of T5X's two networks, from those of an unrolled one."""
    source, result = flatten(params), {}
    for name, leaf in flatten(init(config)[1]["params"]).items():
        side, _, rest = name.partition("/")
        if rest.split("/")[0] != side:
            result[name] = source[name]
            continue
        rest = rest.removeprefix(f"{side}/")
        layers = config.encoder_layers if side == "encoder" else config.decoder_layers
        if rest.startswith("relpos_bias"):
            blocks = [source[f"{side}/{rest}"]] * layers
        else:
            blocks = [source[f"{side}/layers_{i}/{rest}"] for i in range(layers)]
        one_layer = (*leaf.shape[:1], *leaf.shape[2:])
        result[name] = np.stack([np.asarray(block).reshape(one_layer) for block in blocks], axis=1)
    return unflatten(result)
