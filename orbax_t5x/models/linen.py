"""A T5 in linen with T5X's names, shapes and logical axes.

Two layouts of one function. Unrolled ("minimal T5"): attention kernels (E,J), layers under `layers_i`, one relative
position bias per tower. Scanned ("scalable T5", `scan_layers=True`): kernels (E,H,D), all layers of a tower stacked on
axis 1 under a doubled `encoder/encoder`, a bias in every layer. E embed, H heads, D head_dim, J = H*D, F mlp, V vocab,
B buckets.

Example:
  >>> from orbax_t5x.models import T5Config
  >>> from orbax_t5x.models.linen import T5
  >>> ids = jnp.zeros((1, 4), jnp.int32)
  >>> variables = jax.eval_shape(T5(T5Config()).init, jax.random.key(0), ids, ids)
  >>> variables["params"]["encoder"]["layers_0"]["attention"]["query"]["kernel"].shape
  (16, 16)
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning

from orbax_t5x.models import attention
from orbax_t5x.models.config import T5Config


def _fan_in(fan_in: int):
    return nn.initializers.normal(stddev=1 / math.sqrt(fan_in))


class Kernel(nn.Module):
    """A bias-free projection.

    The last `contract` axes of the input meet the first axes of the kernel.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = math.prod(self.shape[: self.contract])
        kernel = partitioning.param_with_axes("kernel", _fan_in(fan_in), self.shape, axes=self.axes)
        return jnp.tensordot(x.astype(self.dtype), jnp.asarray(kernel, self.dtype), axes=self.contract)


class RMSNorm(nn.Module):
    """T5's layer norm: no mean is subtracted, and no bias added."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = partitioning.param_with_axes("scale", nn.initializers.ones, (x.shape[-1],), axes=("embed",))
        return attention.normed(self.config, x, scale)


class Dropout(nn.Module):
    """Dropout in calls with a `dropout` key; evaluation in calls without."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.rate or not self.has_rng("dropout"):
            return x
        return attention.dropped(x, self.rate, self.make_rng("dropout"))


class RelativeBias(nn.Module):
    """Bias of attention by the distance of two positions: (1, H, queries, keys)."""

    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        c = self.config
        table = partitioning.param_with_axes(
            "rel_embedding", _fan_in(c.embed), (c.heads, c.buckets), axes=("heads", "relpos_buckets")
        )
        buckets = attention.position_buckets(c, queries, keys, bidirectional=self.bidirectional)
        return jnp.asarray(table, jnp.float32)[None, :, buckets]


class Attention(nn.Module):
    """Dot-product attention of `x` to `memory` and to the cache."""

    config: T5Config

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array, bias: jax.Array, cache: Any = None, start: jax.Array | int = 0
    ) -> tuple[jax.Array, Any]:
        c = self.config
        split = c.has_split_heads
        into = (c.embed, c.heads, c.head_dim) if split else (c.embed, c.heads * c.head_dim)
        into_axes = ("embed", "heads", "kv") if split else ("embed", "joined_kv")

        def project(name: str, value: jax.Array) -> jax.Array:
            projected = Kernel(into, into_axes, name=name, dtype=c.dtype)(value)
            return projected.reshape(*value.shape[:-1], c.heads, c.head_dim)

        query = project("query", x)
        key, value, cache = attention.extended(cache, project("key", memory), project("value", memory), start)
        mixed = attention.attend(query, key, value, bias, Dropout(c.dropout_rate))
        if split:
            out = Kernel((*into[1:], c.embed), ("heads", "kv", "embed"), contract=2, name="out", dtype=c.dtype)
        else:
            mixed = mixed.reshape(*x.shape[:-1], into[1])
            out = Kernel((into[1], c.embed), ("joined_kv", "embed"), name="out", dtype=c.dtype)
        return Dropout(c.dropout_rate)(out(mixed)), cache


class Mlp(nn.Module):
    """The feed-forward layer, gated or not."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config

        def wide(name: str) -> jax.Array:
            return Kernel((c.embed, c.mlp), ("embed", "mlp"), name=name, dtype=c.dtype)(x)

        hidden = attention.activate(c, wide("wi_0")) * wide("wi_1") if c.gated else attention.activate(c, wide("wi"))
        narrow = Kernel((c.mlp, c.embed), ("mlp", "embed"), name="wo", dtype=c.dtype)
        return Dropout(c.dropout_rate)(narrow(Dropout(c.dropout_rate)(hidden)))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer."""

    config: T5Config

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: None, positions: jax.Array, keys: jax.Array, mask: jax.Array, shared_bias: jax.Array
    ) -> tuple[jax.Array, None]:
        bias = shared_bias
        if self.config.has_per_layer_bias:
            bias = RelativeBias(self.config, bidirectional=True, name="relpos_bias")(positions, keys)
        normed = RMSNorm(self.config, name="pre_attention_layer_norm")(x)
        x = x + Attention(self.config, name="attention")(normed, normed, mask + bias)[0]
        return x + Mlp(self.config, name="mlp")(RMSNorm(self.config, name="pre_mlp_layer_norm")(x)), None


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward layer."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        cache: Any,
        positions: jax.Array,
        keys: jax.Array,
        encoded: jax.Array,
        mask: jax.Array,
        cross_mask: jax.Array,
        shared_bias: jax.Array,
    ) -> tuple[jax.Array, Any]:
        bias = shared_bias
        if self.config.has_per_layer_bias:
            bias = RelativeBias(self.config, bidirectional=False, name="relpos_bias")(positions, keys)
        normed = RMSNorm(self.config, name="pre_self_attention_layer_norm")(x)
        mixed, cache = Attention(self.config, name="self_attention")(normed, normed, mask + bias, cache, positions[0])
        x = x + mixed
        normed = RMSNorm(self.config, name="pre_cross_attention_layer_norm")(x)
        x = x + Attention(self.config, name="encoder_decoder_attention")(normed, encoded, cross_mask)[0]
        return x + Mlp(self.config, name="mlp")(RMSNorm(self.config, name="pre_mlp_layer_norm")(x)), cache


class LayerStack(nn.Module):
    """The layers of a side, their norm, and the decoder's logits.

    Layers are unrolled or scanned; tied logits are elsewhere.
    """

    config: T5Config
    side: str  # "encoder" or "decoder"

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, keys: jax.Array, *rest: jax.Array, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        c, is_encoder = self.config, self.side == "encoder"
        x = Dropout(c.dropout_rate)(x.astype(c.dtype))
        layer: Any = EncoderLayer if is_encoder else DecoderLayer
        depth = c.encoder_layers if is_encoder else c.decoder_layers
        bias = jnp.zeros(())
        if not c.has_per_layer_bias:
            bias = RelativeBias(c, bidirectional=is_encoder, name="relpos_bias")(positions, keys)
        broadcast = (positions, keys, *rest, bias)
        if c.scan_layers:
            in_axes: Any = (0, *[nn.broadcast] * len(broadcast))
            scanned = partitioning.scan_with_axes(
                layer,
                variable_axes={"params": 1},
                split_rngs={"params": True, "dropout": True},
                in_axes=in_axes,
                length=depth,
                axis_name="layers",
            )
            x, cache = scanned(c, name=self.side)(x, cache, *broadcast)
        else:
            made = []
            for i in range(depth):
                x, of_layer = layer(c, name=f"layers_{i}")(x, None if cache is None else cache[i], *broadcast)
                made.append(of_layer)
            cache = tuple(made)
        x = Dropout(c.dropout_rate)(RMSNorm(c, name=f"{self.side}_norm")(x))
        if is_encoder or c.tied:
            return x, cache
        return Kernel((c.embed, c.vocab), ("embed", "vocab"), name="logits_dense")(attention.scaled_output(c, x)), cache


class Embedder(nn.Module):
    """The table of token embeddings."""

    config: T5Config

    @nn.compact
    def __call__(self) -> jax.Array:
        c = self.config
        shape = (c.vocab, c.embed)
        return partitioning.param_with_axes("embedding", nn.initializers.normal(1.0), shape, axes=("vocab", "embed"))


class T5(nn.Module):
    """Token ids in, logits out; id 0 is padding.

    `apply(…, rngs={"dropout": key})` drops by `config.dropout_rate`; without, it is evaluation.
    """

    config: T5Config = T5Config()

    def setup(self) -> None:
        self.token_embedder = Embedder(self.config)
        self.encoder = LayerStack(self.config, "encoder")
        if not self.config.encoder_only:
            self.decoder = LayerStack(self.config, "decoder")

    def __call__(self, inputs: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        """Computes the logits of each target from inputs and earlier targets.

        Args:
          inputs: [batch, inputs].
          targets: [batch, targets]; None for an encoder.

        Returns:
          [batch, targets, vocab], float32; of an encoder its output, [batch, inputs, embed].

        Raises:
          TypeError: an encoder gets targets, or another T5 gets none.
        """
        attention.require_targets(self.config, targets)
        if targets is None:
            return self.encode(inputs)
        return self.decode(attention.shifted_right(targets), self.encode(inputs), inputs)[0]

    def encode(self, inputs: jax.Array) -> jax.Array:
        """Returns the encoder's output, [batch, inputs, embed]."""
        positions = jnp.arange(inputs.shape[1])
        return self.encoder(self._table()[inputs], positions, positions, attention.padding_mask(inputs))[0]

    def decode(
        self, tokens: jax.Array, encoded: jax.Array, inputs: jax.Array, cache: attention.Cache | None = None
    ) -> tuple[jax.Array, attention.Cache | None]:
        """Returns the logits after each token.

        Args:
          tokens: what the decoder sees, [batch, tokens]; with a cache, those that follow what it holds.
          encoded: of `encode`.
          inputs: of `encode`, for their padding.
          cache: of `orbax_t5x.models.attention.empty_cache`, or of the call before.

        Returns:
          The logits, and the cache with the tokens.
        """
        c, table = self.config, self._table()
        count = tokens.shape[1]
        positions = keys = jnp.arange(count)
        layers = None
        if cache is not None:
            layers = cache["layers"]
            positions = cache["index"] + positions
            keys = jnp.arange(jax.tree.leaves(layers)[0].shape[-3])
        masks = attention.causal_mask(positions, keys), attention.padding_mask(inputs)
        out, layers = self.decoder(table[tokens], positions, keys, encoded, *masks, cache=layers)
        logits = attention.logits_of_embedding(c, out, table) if c.tied else out
        return logits, None if cache is None else {"index": cache["index"] + count, "layers": layers}

    def _table(self) -> jax.Array:
        return jnp.asarray(self.token_embedder(), jnp.float32)


def decode_greedily(model: T5, params: Any, inputs: jax.Array, steps: int) -> jax.Array:
    """Decodes the most likely tokens, [batch, steps].

    Tokens after the end, id 1, are padding; each step computes a single position.
    """
    variables = {"params": params}
    encoded = model.apply(variables, inputs, method="encode")
    cache = attention.empty_cache(model.config, len(inputs), steps)

    def decode(tokens: jax.Array, cache: attention.Cache) -> Any:
        return model.apply(variables, tokens, encoded, inputs, cache, method="decode")

    return attention.greedy(decode, cache, len(inputs), steps)
