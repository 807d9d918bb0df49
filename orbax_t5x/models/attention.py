"""Attention with relative positions and a cache, and greedy decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from orbax_t5x.models.config import T5Config

MASKED = -1e9
Cache = dict[str, Any]
"""`index`: how many positions were decoded; `layers`: the `key` and `value` of each layer, [batch, length, heads, head
dim], stacked on axis 0 where layers are."""


def position_buckets(config: T5Config, queries: jax.Array, keys: jax.Array, *, bidirectional: bool) -> jax.Array:
    """Returns the bucket of each pair of positions, by arXiv 1910.10683.

    Buckets are exact near zero, then logarithmic up to the largest distance.
    """
    buckets = config.buckets
    distance = keys[None, :] - queries[:, None]
    offset = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    far = jnp.full_like(distance, buckets - 1)
    if config.max_distance > exact > 0:  # else all far distances are in the last bucket
        growth = (buckets - exact) / math.log(config.max_distance / exact)
        far = exact + (jnp.log(jnp.maximum(distance, 1) / exact) * growth).astype(distance.dtype)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


def padding_mask(inputs: jax.Array) -> jax.Array:
    """Makes the mask [batch, 1, 1, length] that hides padding, id 0.

    It is added to the attention weights.
    """
    return jnp.where(inputs > 0, 0.0, MASKED)[:, None, None, :]


def causal_mask(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Makes the mask [1, 1, queries, keys] that hides later positions."""
    return jnp.where(keys[None, :] <= queries[:, None], 0.0, MASKED)[None, None]


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


def activate(config: T5Config, x: jax.Array) -> jax.Array:
    """Applies the activation of the feed-forward layer."""
    return _ACTIVATIONS[config.activation_name](x)


def normed(config: T5Config, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square in float32; no mean is subtracted."""
    x = jnp.asarray(x, jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.expand_dims(jnp.asarray(scale, jnp.float32), range(x.ndim - 1))
    return (x * jax.lax.rsqrt(mean_square + config.layer_norm_epsilon) * scale).astype(config.dtype)


Dropout = Callable[[jax.Array], jax.Array]
"""Drops entries of [batch, length, embed] or of attention weights [batch, heads, queries, keys], as T5X: the same ones
along axis -2."""


def keep_all(x: jax.Array) -> jax.Array:
    """Drops nothing: evaluation."""
    return x


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Sets random entries to 0 and scales the rest.

    Along axis -2 the choice is equal.
    """
    shape = (*x.shape[:-2], 1, x.shape[-1])
    keep = jax.random.bernoulli(key, 1 - rate, shape)
    return jnp.where(jnp.broadcast_to(keep, x.shape), x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, dropout: Dropout = keep_all
) -> jax.Array:
    """Mixes values [batch, length, heads, head dim] by attention.

    T5 does not scale: its initializer does.
    """
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias.astype(query.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", dropout(weights.astype(query.dtype)), value)


def logits_of_embedding(config: T5Config, x: jax.Array, table: jax.Array) -> jax.Array:
    """Computes the logits of a tied model in float32."""
    return scaled_output(config, x) @ table.T


def scaled_output(config: T5Config, x: jax.Array) -> jax.Array:
    """Returns the decoder's output in float32, scaled if the config says so."""
    x = jnp.asarray(x, jnp.float32)
    return x / math.sqrt(config.embed) if config.scales_decoder_outputs else x


def require_targets(config: T5Config, targets: Any) -> None:
    """Refuses targets of an encoder, and a decoder without targets.

    Raises:
      TypeError: the config and the arguments disagree.
    """
    if config.encoder_only != (targets is None):
        takes = "(inputs)" if config.encoder_only else "(inputs, targets)"
        raise TypeError(f"a T5 with encoder_only={config.encoder_only} is called with {takes}")


def extended(cache: Cache | None, key: jax.Array, value: jax.Array, start: jax.Array | int) -> tuple[Any, Any, Any]:
    """Puts new keys and values into the cache of a layer.

    Returns all keys, all values, and the cache.
    """
    if cache is None:
        return key, value, None
    new = {
        name: jax.lax.dynamic_update_slice_in_dim(cache[name], array, start, axis=1)
        for name, array in (("key", key), ("value", value))
    }
    return new["key"], new["value"], new


def shifted_right(targets: jax.Array) -> jax.Array:
    """Returns the decoder's inputs: id 0, then all targets but the last."""
    return jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def empty_cache(config: T5Config, batch: int, length: int) -> Cache:
    """Makes the cache for the beginning of decoding.

    Args:
      config: of the model.
      batch: how many sequences are decoded.
      length: how many positions at most.
    """
    shape, dtype, names = (batch, length, config.heads, config.head_dim), config.dtype, ("key", "value")
    if config.scan_layers:
        layers: Any = {name: jnp.zeros((config.decoder_layers, *shape), dtype) for name in names}
    else:
        layers = tuple({name: jnp.zeros(shape, dtype) for name in names} for _ in range(config.decoder_layers))
    return {"index": jnp.zeros((), jnp.int32), "layers": layers}


def greedy(
    decode: Callable[[jax.Array, Cache], tuple[jax.Array, Any]], cache: Cache, batch: int, steps: int, end: int = 1
) -> jax.Array:
    """Decodes the most likely token at each position.

    Args:
      decode: takes one token per sequence, [batch, 1], and the cache; returns logits and the new cache.
      cache: `empty_cache(config, batch, steps)`.
      batch: how many sequences.
      steps: how many tokens.
      end: the id after which a sequence is padded.

    Returns:
      Token ids, [batch, steps].
    """

    def step(carry: Any, _: None) -> Any:
        tokens, ended, cache = carry
        logits, cache = decode(tokens[:, None], cache)
        tokens = jnp.where(ended, 0, jnp.argmax(logits[:, -1], axis=-1).astype(tokens.dtype))
        return (tokens, ended | (tokens == end), cache), tokens

    first = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), cache
    _, tokens = jax.lax.scan(step, first, length=steps)
    return tokens.T
