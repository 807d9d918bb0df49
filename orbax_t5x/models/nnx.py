"""A T5 in Flax NNX: the function of `models.linen`, NNX's names.

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

_DEFAULT = T5Config()


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int = 1) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)
    return nnx.Param(value, out_sharding=axes)


class NnxKernel(nnx.Module):
    """A projection without a bias."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.dtype = dtype
        self.kernel = _param(rngs, shape, axes, fan_in=shape[0])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) @ jnp.asarray(self.kernel[...], self.dtype)


class NnxRMSNorm(nnx.Module):
    """T5's layer norm: no mean is subtracted, and no bias added."""

    def __init__(self, config: T5Config):
        self.config = config
        self.scale = nnx.Param(jnp.ones(config.embed), out_sharding=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        return attention.normed(self.config, x, self.scale[...])


class NnxRelativeBias(nnx.Module):
    """Bias of attention by the distance of two positions: (1, H, queries, keys)."""

    def __init__(self, config: T5Config, *, bidirectional: bool, rngs: nnx.Rngs):
        self.config, self.bidirectional = config, bidirectional
        self.rel_embedding = _param(rngs, (config.heads, config.buckets), ("heads", "relpos_buckets"), config.embed)

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        buckets = attention.position_buckets(self.config, queries, keys, bidirectional=self.bidirectional)
        return jnp.asarray(self.rel_embedding[...], jnp.float32)[None, :, buckets]


class NnxAttention(nnx.Module):
    """Dot-product attention of `x` to `memory` and to the cache."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.heads = config.heads
        joined, dtype = config.heads * config.head_dim, config.dtype
        self.query, self.key, self.value = (
            NnxKernel((config.embed, joined), ("embed", "joined_kv"), rngs=rngs, dtype=dtype) for _ in range(3)
        )
        self.out = NnxKernel((joined, config.embed), ("joined_kv", "embed"), rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        bias: jax.Array,
        drop: attention.Dropout,
        cache: Any = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, Any]:
        query, key, value = (
            projected.reshape(*projected.shape[:-1], self.heads, -1)
            for projected in (self.query(x), self.key(memory), self.value(memory))
        )
        key, value, cache = attention.extended(cache, key, value, start)
        mixed = attention.attend(query, key, value, bias, drop)
        return drop(self.out(mixed.reshape(*x.shape[:-1], -1))), cache


class NnxMlp(nnx.Module):
    """The feed-forward layer, gated or not."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config

        def wide() -> NnxKernel:
            return NnxKernel((config.embed, config.mlp), ("embed", "mlp"), rngs=rngs, dtype=config.dtype)

        if config.gated:
            self.wi_0, self.wi_1 = wide(), wide()
        else:
            self.wi = wide()
        self.wo = NnxKernel((config.mlp, config.embed), ("mlp", "embed"), rngs=rngs, dtype=config.dtype)

    def __call__(self, x: jax.Array, drop: attention.Dropout) -> jax.Array:
        hidden = attention.activate(self.config, (self.wi_0 if self.config.gated else self.wi)(x))
        if self.config.gated:
            hidden = hidden * self.wi_1(x)
        return drop(self.wo(drop(hidden)))


class NnxEncoderLayer(nnx.Module):
    """Self-attention and a feed-forward layer."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        if config.has_per_layer_bias:
            self.relpos_bias = NnxRelativeBias(config, bidirectional=True, rngs=rngs)
        self.pre_attention_layer_norm = NnxRMSNorm(config)
        self.attention = NnxAttention(config, rngs=rngs)
        self.pre_mlp_layer_norm = NnxRMSNorm(config)
        self.mlp = NnxMlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, bias: jax.Array, drop: attention.Dropout) -> jax.Array:
        if self.config.has_per_layer_bias:
            bias = bias + self.relpos_bias(positions, positions)
        normed = self.pre_attention_layer_norm(x)
        x = x + self.attention(normed, normed, bias, drop)[0]
        return x + self.mlp(self.pre_mlp_layer_norm(x), drop)


class NnxDecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward layer."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        if config.has_per_layer_bias:
            self.relpos_bias = NnxRelativeBias(config, bidirectional=False, rngs=rngs)
        self.pre_self_attention_layer_norm = NnxRMSNorm(config)
        self.self_attention = NnxAttention(config, rngs=rngs)
        self.pre_cross_attention_layer_norm = NnxRMSNorm(config)
        self.encoder_decoder_attention = NnxAttention(config, rngs=rngs)
        self.pre_mlp_layer_norm = NnxRMSNorm(config)
        self.mlp = NnxMlp(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        encoded: jax.Array,
        positions: tuple[jax.Array, jax.Array],
        bias: jax.Array,
        cross_mask: jax.Array,
        drop: attention.Dropout,
        cache: Any,
        start: jax.Array | int,
    ) -> tuple[jax.Array, Any]:
        if self.config.has_per_layer_bias:
            bias = bias + self.relpos_bias(*positions)
        normed = self.pre_self_attention_layer_norm(x)
        mixed, cache = self.self_attention(normed, normed, bias, drop, cache, start)
        x = x + mixed
        x = x + self.encoder_decoder_attention(self.pre_cross_attention_layer_norm(x), encoded, cross_mask, drop)[0]
        return x + self.mlp(self.pre_mlp_layer_norm(x), drop), cache


class NnxEmbedder(nnx.Module):
    """The table of token embeddings."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.embedding = _param(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    def __call__(self) -> jax.Array:
        return jnp.asarray(self.embedding[...], jnp.float32)


class NnxEncoder(nnx.Module):
    """The encoder's layers and the norm after them."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        if not config.has_per_layer_bias:
            self.relpos_bias = NnxRelativeBias(config, bidirectional=True, rngs=rngs)
        self.layers = nnx.List([NnxEncoderLayer(config, rngs=rngs) for _ in range(config.encoder_layers)])
        self.encoder_norm = NnxRMSNorm(config)

    def __call__(self, x: jax.Array, mask: jax.Array, drop: attention.Dropout) -> jax.Array:
        positions = jnp.arange(x.shape[1])
        bias = mask if self.config.has_per_layer_bias else mask + self.relpos_bias(positions, positions)
        x = drop(x)
        for layer in self.layers:
            x = layer(x, positions, bias, drop)
        return drop(self.encoder_norm(x))


class NnxDecoder(nnx.Module):
    """The decoder's layers, their norm, and logits that are not tied."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        if not config.has_per_layer_bias:
            self.relpos_bias = NnxRelativeBias(config, bidirectional=False, rngs=rngs)
        self.layers = nnx.List([NnxDecoderLayer(config, rngs=rngs) for _ in range(config.decoder_layers)])
        self.decoder_norm = NnxRMSNorm(config)
        if not config.tied:
            self.logits_dense = NnxKernel((config.embed, config.vocab), ("embed", "vocab"), rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        encoded: jax.Array,
        cross_mask: jax.Array,
        cache: attention.Cache | None,
        drop: attention.Dropout,
    ) -> tuple[jax.Array, attention.Cache | None]:
        start: jax.Array | int = 0
        positions = keys = jnp.arange(x.shape[1])
        if cache is not None:
            start = cache["index"]
            positions, keys = start + positions, jnp.arange(cache["layers"][0]["key"].shape[1])
        bias = attention.causal_mask(positions, keys)
        if not self.config.has_per_layer_bias:
            bias = bias + self.relpos_bias(positions, keys)
        made, x = [], drop(x)
        for index, layer in enumerate(self.layers):
            of_layer = None if cache is None else cache["layers"][index]
            x, of_layer = layer(x, encoded, (positions, keys), bias, cross_mask, drop, of_layer, start)
            made.append(of_layer)
        x = drop(self.decoder_norm(x))
        return x, None if cache is None else {"index": start + x.shape[1], "layers": tuple(made)}


class NnxT5(nnx.Module):
    """Token ids in, logits out; id 0 is padding. It is `orbax_t5x.models.nnx.T5`.

    Calls with `rngs=nnx.Rngs(dropout=…)` drop by `config.dropout_rate`; calls without are evaluation.
    """

    def __init__(self, config: T5Config = _DEFAULT, *, rngs: nnx.Rngs):
        if config.scan_layers or config.has_split_heads:
            raise ValueError("the NNX T5 has unrolled layers and joined heads")
        self.config = config
        # Axes are logical names: Flax would look for a mesh that has them, at once.
        with nnx.use_eager_sharding(False):
            self.token_embedder = NnxEmbedder(config, rngs=rngs)
            self.encoder = NnxEncoder(config, rngs=rngs)
            if not config.encoder_only:
                self.decoder = NnxDecoder(config, rngs=rngs)

    def __call__(
        self, inputs: jax.Array, targets: jax.Array | None = None, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Computes the logits of each target from inputs and earlier targets.

        Their shape is [batch, targets, vocab]. An encoder takes no targets, and returns its output, [batch, inputs,
        embed].

        Raises:
          TypeError: an encoder gets targets, or another T5 gets none.
        """
        attention.require_targets(self.config, targets)
        if targets is None:
            return self.encode(inputs, rngs=rngs)
        return self.decode(attention.shifted_right(targets), self.encode(inputs, rngs=rngs), inputs, rngs=rngs)[0]

    def encode(self, inputs: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns the encoder's output, [batch, inputs, embed]."""
        table = self.token_embedder().astype(self.config.dtype)
        return self.encoder(table[inputs], attention.padding_mask(inputs), self._dropout(rngs))

    def decode(
        self,
        tokens: jax.Array,
        encoded: jax.Array,
        inputs: jax.Array,
        cache: attention.Cache | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, attention.Cache | None]:
        """Returns the logits after each token, and the cache with the tokens.

        Args:
          tokens: what the decoder sees, [batch, tokens]; with a cache, those that follow what it holds.
          encoded: of `encode`.
          inputs: of `encode`, for their padding.
          cache: of `orbax_t5x.models.attention.empty_cache`, or of the call before.
          rngs: with a `dropout` stream, in training.
        """
        table = self.token_embedder()
        start, mask = table.astype(self.config.dtype)[tokens], attention.padding_mask(inputs)
        out, cache = self.decoder(start, encoded, mask, cache, self._dropout(rngs))
        if self.config.tied:
            return attention.logits_of_embedding(self.config, out, table), cache
        return self.decoder.logits_dense(attention.scaled_output(self.config, out)), cache

    def _dropout(self, rngs: nnx.Rngs | None) -> attention.Dropout:
        rate = self.config.dropout_rate
        if rngs is None or not rate:
            return attention.keep_all
        return lambda x: attention.dropped(x, rate, rngs.dropout())


def decode_greedily(model: NnxT5, inputs: jax.Array, steps: int) -> jax.Array:
    """Decodes the most likely tokens, [batch, steps].

    Tokens after the end, id 1, are padding; each step computes a single position.
    """
    encoded = model.encode(inputs)
    cache = attention.empty_cache(model.config, len(inputs), steps)
    return attention.greedy(
        lambda tokens, cache: model.decode(tokens, encoded, inputs, cache), cache, len(inputs), steps
    )


T5 = NnxT5
