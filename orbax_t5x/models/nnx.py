"""A T5 encoder-decoder in Flax NNX: the same function as `models.linen`, with the names that NNX gives.

Layers are in an `nnx.List` (`encoder/layers/0/attention/query/kernel`), everything else has T5X's names; kernels are
(E,J), and logical axes are the variables' metadata, for `orbax_t5x.with_shardings`.

Example:
  >>> from orbax_t5x.models import T5Config
  >>> from orbax_t5x.models.nnx import T5
  >>> abstract = nnx.eval_shape(lambda: T5(T5Config(), rngs=nnx.Rngs(0)))
  >>> abstract.encoder.layers[0].attention.query.kernel.shape
  (16, 16)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from orbax_t5x.models import attention
from orbax_t5x.models.config import T5Config

_EPSILON = 1e-6
_DEFAULT = T5Config()


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int = 1) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)
    return nnx.Param(value, out_sharding=axes)


class NnxKernel(nnx.Module):
    """A projection without a bias."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], *, rngs: nnx.Rngs):
        self.kernel = _param(rngs, shape, axes, fan_in=shape[0])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ jnp.asarray(self.kernel[...], jnp.float32)


class NnxRMSNorm(nnx.Module):
    """T5's layer norm: no mean is subtracted, and no bias added."""

    def __init__(self, embed: int):
        self.scale = nnx.Param(jnp.ones(embed), out_sharding=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scale = jnp.expand_dims(jnp.asarray(self.scale[...], jnp.float32), range(x.ndim - 1))
        return x * jax.lax.rsqrt(mean_square + _EPSILON) * scale


class NnxRelativeBias(nnx.Module):
    """Bias of attention by the distance of two positions: (1, H, queries, keys)."""

    def __init__(self, config: T5Config, *, bidirectional: bool, rngs: nnx.Rngs):
        self.config, self.bidirectional = config, bidirectional
        self.rel_embedding = _param(rngs, (config.heads, config.buckets), ("heads", "relpos_buckets"), config.embed)

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        buckets = attention.position_buckets(self.config, queries, keys, bidirectional=self.bidirectional)
        return jnp.asarray(self.rel_embedding[...], jnp.float32)[None, :, buckets]


class NnxAttention(nnx.Module):
    """Dot-product attention of `x` to `memory`; with a cache, of what it holds as well."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.heads = config.heads
        joined = config.heads * config.head_dim
        self.query, self.key, self.value = (
            NnxKernel((config.embed, joined), ("embed", "joined_kv"), rngs=rngs) for _ in range(3)
        )
        self.out = NnxKernel((joined, config.embed), ("joined_kv", "embed"), rngs=rngs)

    def __call__(
        self, x: jax.Array, memory: jax.Array, bias: jax.Array, cache: Any = None, start: jax.Array | int = 0
    ) -> tuple[jax.Array, Any]:
        query, key, value = (
            projected.reshape(*projected.shape[:-1], self.heads, -1)
            for projected in (self.query(x), self.key(memory), self.value(memory))
        )
        key, value, cache = attention.extended(cache, key, value, start)
        return self.out(attention.attend(query, key, value, bias).reshape(*x.shape[:-1], -1)), cache


class NnxMlp(nnx.Module):
    """The feed-forward layer, gated or not."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        into, axes = (config.embed, config.mlp), ("embed", "mlp")
        self.gated = config.gated
        if config.gated:
            self.wi_0, self.wi_1 = NnxKernel(into, axes, rngs=rngs), NnxKernel(into, axes, rngs=rngs)
        else:
            self.wi = NnxKernel(into, axes, rngs=rngs)
        self.wo = NnxKernel((config.mlp, config.embed), ("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gated:
            return self.wo(jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x))
        return self.wo(jax.nn.relu(self.wi(x)))


class NnxEncoderLayer(nnx.Module):
    """Self-attention and a feed-forward layer."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.pre_attention_layer_norm = NnxRMSNorm(config.embed)
        self.attention = NnxAttention(config, rngs=rngs)
        self.pre_mlp_layer_norm = NnxRMSNorm(config.embed)
        self.mlp = NnxMlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        normed = self.pre_attention_layer_norm(x)
        x = x + self.attention(normed, normed, bias)[0]
        return x + self.mlp(self.pre_mlp_layer_norm(x))


class NnxDecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward layer."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.pre_self_attention_layer_norm = NnxRMSNorm(config.embed)
        self.self_attention = NnxAttention(config, rngs=rngs)
        self.pre_cross_attention_layer_norm = NnxRMSNorm(config.embed)
        self.encoder_decoder_attention = NnxAttention(config, rngs=rngs)
        self.pre_mlp_layer_norm = NnxRMSNorm(config.embed)
        self.mlp = NnxMlp(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        encoded: jax.Array,
        bias: jax.Array,
        cross_mask: jax.Array,
        cache: Any,
        start: jax.Array | int,
    ) -> tuple[jax.Array, Any]:
        normed = self.pre_self_attention_layer_norm(x)
        mixed, cache = self.self_attention(normed, normed, bias, cache, start)
        x = x + mixed
        x = x + self.encoder_decoder_attention(self.pre_cross_attention_layer_norm(x), encoded, cross_mask)[0]
        return x + self.mlp(self.pre_mlp_layer_norm(x)), cache


class NnxEmbedder(nnx.Module):
    """The table of token embeddings."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.embedding = _param(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    def __call__(self) -> jax.Array:
        return jnp.asarray(self.embedding[...], jnp.float32)


class NnxEncoder(nnx.Module):
    """The encoder's layers and the norm after them."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.relpos_bias = NnxRelativeBias(config, bidirectional=True, rngs=rngs)
        self.layers = nnx.List([NnxEncoderLayer(config, rngs=rngs) for _ in range(config.encoder_layers)])
        self.encoder_norm = NnxRMSNorm(config.embed)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        positions = jnp.arange(x.shape[1])
        bias = mask + self.relpos_bias(positions, positions)
        for layer in self.layers:
            x = layer(x, bias)
        return self.encoder_norm(x)


class NnxDecoder(nnx.Module):
    """The decoder's layers, the norm after them, and the logits where they are not tied."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.relpos_bias = NnxRelativeBias(config, bidirectional=False, rngs=rngs)
        self.layers = nnx.List([NnxDecoderLayer(config, rngs=rngs) for _ in range(config.decoder_layers)])
        self.decoder_norm = NnxRMSNorm(config.embed)
        if not config.tied:
            self.logits_dense = NnxKernel((config.embed, config.vocab), ("embed", "vocab"), rngs=rngs)

    def __call__(
        self, x: jax.Array, encoded: jax.Array, cross_mask: jax.Array, cache: attention.Cache | None
    ) -> tuple[jax.Array, attention.Cache | None]:
        start: jax.Array | int = 0
        positions = keys = jnp.arange(x.shape[1])
        if cache is not None:
            start = cache["index"]
            positions, keys = start + positions, jnp.arange(cache["layers"][0]["key"].shape[1])
        bias = attention.causal_mask(positions, keys) + self.relpos_bias(positions, keys)
        made = []
        for index, layer in enumerate(self.layers):
            x, of_layer = layer(x, encoded, bias, cross_mask, None if cache is None else cache["layers"][index], start)
            made.append(of_layer)
        return self.decoder_norm(x), None if cache is None else {"index": start + x.shape[1], "layers": tuple(made)}


class NnxT5(nnx.Module):
    """Token ids in, logits out; id 0 is padding. It is `orbax_t5x.models.nnx.T5`."""

    def __init__(self, config: T5Config = _DEFAULT, *, rngs: nnx.Rngs):
        if config.scan_layers or config.has_split_heads or config.has_per_layer_bias:
            raise ValueError("the NNX T5 has unrolled layers, joined heads and one bias per tower")
        self.config = config
        # Axes are logical names: Flax would look for a mesh that has them, at once.
        with nnx.use_eager_sharding(False):
            self.token_embedder = NnxEmbedder(config, rngs=rngs)
            self.encoder = NnxEncoder(config, rngs=rngs)
            self.decoder = NnxDecoder(config, rngs=rngs)

    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the logits of each target, given the inputs and the targets before it: [batch, targets, vocab]."""
        return self.decode(attention.shifted_right(targets), self.encode(inputs), inputs)[0]

    def encode(self, inputs: jax.Array) -> jax.Array:
        """Returns the encoder's output, [batch, inputs, embed]."""
        return self.encoder(self.token_embedder()[inputs], attention.padding_mask(inputs))

    def decode(
        self, tokens: jax.Array, encoded: jax.Array, inputs: jax.Array, cache: attention.Cache | None = None
    ) -> tuple[jax.Array, attention.Cache | None]:
        """Returns the logits after each token, and the cache with the tokens.

        Args:
          tokens: what the decoder sees, [batch, tokens]; with a cache, those that follow what it holds.
          encoded: of `encode`.
          inputs: of `encode`, for their padding.
          cache: of `orbax_t5x.models.attention.empty_cache`, or of the call before.
        """
        table = self.token_embedder()
        out, cache = self.decoder(table[tokens], encoded, attention.padding_mask(inputs), cache)
        if self.config.tied:
            return out / math.sqrt(self.config.embed) @ table.T, cache
        return self.decoder.logits_dense(out), cache


def decode_greedily(model: NnxT5, inputs: jax.Array, steps: int) -> jax.Array:
    """Decodes the most likely tokens, [batch, steps], padded after the end, id 1; each step computes one position."""
    encoded = model.encode(inputs)
    cache = attention.empty_cache(model.config, len(inputs), steps)
    return attention.greedy(
        lambda tokens, cache: model.decode(tokens, encoded, inputs, cache), cache, len(inputs), steps
    )


T5 = NnxT5
