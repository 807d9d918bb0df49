"""A small T5.1.1 encoder-decoder in linen, with the names, shapes and logical axes of T5X's two networks.

Two layouts of one function. Unrolled ("minimal T5"): attention kernels (E,J), blocks under `layers_i`, one
relative-position bias per tower. Scanned ("scalable T5", `scan_layers=True`): kernels (E,H,D), every block of a tower
stacked on axis 1 under a doubled `encoder/encoder`, a bias in every layer. E embed, H heads, D head_dim, J = H*D,
F mlp, V vocab, B buckets.
"""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning

from orbax_t5x.trees.flat import flatten, unflatten

# For jax.jit: compiling takes most of the time of what tests do with a model this small.
COMPILE_FAST = {"xla_backend_optimization_level": 0}
_MASKED = -1e9
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and layout; the defaults are those of the bundles in `goldens`."""

    vocab: int = 128
    embed: int = 16
    heads: int = 4
    head_dim: int = 4
    mlp: int = 32
    encoder_layers: int = 2
    decoder_layers: int = 2
    buckets: int = 32
    max_distance: int = 128
    gated: bool = True  # T5.1.1: wi_0, wi_1 with gelu. False: T5.1.0, wi with relu.
    tied: bool = False  # T5.1.0: logits from the embedding, no logits_dense.
    scan_layers: bool = False
    split_heads: bool | None = None  # (E,H,D) kernels; None: as scan_layers.
    per_layer_bias: bool | None = None  # None: as scan_layers.

    @property
    def has_split_heads(self) -> bool:
        return self.scan_layers if self.split_heads is None else self.split_heads

    @property
    def has_per_layer_bias(self) -> bool:
        return self.scan_layers if self.per_layer_bias is None else self.per_layer_bias


def _fan_in(fan_in: int):
    return nn.initializers.normal(stddev=1 / math.sqrt(fan_in))


class Kernel(nn.Module):
    """A bias-free projection; `contract` trailing axes of the input meet the leading axes of the kernel."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = math.prod(self.shape[: self.contract])
        kernel = partitioning.param_with_axes("kernel", _fan_in(fan_in), self.shape, axes=self.axes)
        return jnp.tensordot(x, jnp.asarray(kernel, jnp.float32), axes=self.contract)


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = partitioning.param_with_axes("scale", nn.initializers.ones, (x.shape[-1],), axes=("embed",))
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scale = jnp.expand_dims(jnp.asarray(scale, jnp.float32), range(x.ndim - 1))
        return x * jax.lax.rsqrt(mean_square + _EPSILON) * scale


def _bucket(distance: jax.Array, *, bidirectional: bool, buckets: int, max_distance: int) -> jax.Array:
    """Relative-position buckets of arXiv 1910.10683: exact near zero, then logarithmic up to max_distance."""
    offset = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    growth = (buckets - exact) / math.log(max_distance / exact)
    far = exact + (jnp.log(jnp.maximum(distance, 1) / exact) * growth).astype(distance.dtype)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        c = self.config
        table = partitioning.param_with_axes(
            "rel_embedding", _fan_in(c.embed), (c.heads, c.buckets), axes=("heads", "relpos_buckets")
        )
        distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        bucket = _bucket(distance, bidirectional=self.bidirectional, buckets=c.buckets, max_distance=c.max_distance)
        return jnp.asarray(table, jnp.float32)[None, :, bucket]  # (1, H, queries, keys)


class Attention(nn.Module):
    """Dot-product attention without scaling: T5 puts the scale into the initializer."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array) -> jax.Array:
        c = self.config
        split = c.has_split_heads
        into = (c.embed, c.heads, c.head_dim) if split else (c.embed, c.heads * c.head_dim)
        into_axes = ("embed", "heads", "kv") if split else ("embed", "joined_kv")

        def project(name: str, value: jax.Array) -> jax.Array:
            projected = Kernel(into, into_axes, name=name)(value)
            return projected.reshape(*value.shape[:-1], c.heads, c.head_dim)

        query, key, value = project("query", x), project("key", memory), project("value", memory)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        if split:
            return Kernel((*into[1:], c.embed), ("heads", "kv", "embed"), contract=2, name="out")(mixed)
        mixed = mixed.reshape(*x.shape[:-1], into[1])
        return Kernel((into[1], c.embed), ("joined_kv", "embed"), name="out")(mixed)


class Mlp(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        if c.gated:
            gate = jax.nn.gelu(Kernel((c.embed, c.mlp), ("embed", "mlp"), name="wi_0")(x), approximate=True)
            hidden = gate * Kernel((c.embed, c.mlp), ("embed", "mlp"), name="wi_1")(x)
        else:
            hidden = jax.nn.relu(Kernel((c.embed, c.mlp), ("embed", "mlp"), name="wi")(x))
        return Kernel((c.mlp, c.embed), ("mlp", "embed"), name="wo")(hidden)


class EncoderLayer(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, shared_bias: jax.Array) -> tuple[jax.Array, None]:
        if self.config.has_per_layer_bias:
            shared_bias = RelativeBias(self.config, bidirectional=True, name="relpos_bias")(x.shape[1], x.shape[1])
        normed = RMSNorm(name="pre_attention_layer_norm")(x)
        x = x + Attention(self.config, name="attention")(normed, normed, mask + shared_bias)
        x = x + Mlp(self.config, name="mlp")(RMSNorm(name="pre_mlp_layer_norm")(x))
        return x, None


class DecoderLayer(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(
        self, x: jax.Array, encoded: jax.Array, mask: jax.Array, cross_mask: jax.Array, shared_bias: jax.Array
    ) -> tuple[jax.Array, None]:
        if self.config.has_per_layer_bias:
            shared_bias = RelativeBias(self.config, bidirectional=False, name="relpos_bias")(x.shape[1], x.shape[1])
        normed = RMSNorm(name="pre_self_attention_layer_norm")(x)
        x = x + Attention(self.config, name="self_attention")(normed, normed, mask + shared_bias)
        normed = RMSNorm(name="pre_cross_attention_layer_norm")(x)
        x = x + Attention(self.config, name="encoder_decoder_attention")(normed, encoded, cross_mask)
        x = x + Mlp(self.config, name="mlp")(RMSNorm(name="pre_mlp_layer_norm")(x))
        return x, None


class Tower(nn.Module):
    """The blocks of one side, unrolled or scanned, and the norm after them."""

    config: T5Config
    layer: type[nn.Module]
    layers: int
    side: str  # "encoder" or "decoder"

    @nn.compact
    def __call__(self, x: jax.Array, *broadcast: jax.Array) -> jax.Array:
        c = self.config
        bias = jnp.zeros(())
        if not c.has_per_layer_bias:
            both = self.side == "encoder"
            bias = RelativeBias(c, bidirectional=both, name="relpos_bias")(x.shape[1], x.shape[1])
        if c.scan_layers:
            scanned = partitioning.scan_with_axes(
                self.layer,
                variable_axes={"params": 1},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
                axis_name="layers",
            )
            x, _ = scanned(c, name=self.side)(x, *broadcast, bias)
        else:
            for i in range(self.layers):
                x, _ = self.layer(c, name=f"layers_{i}")(x, *broadcast, bias)
        x = RMSNorm(name=f"{self.side}_norm")(x)
        if self.side == "encoder" or c.tied:
            return x
        return Kernel((c.embed, c.vocab), ("embed", "vocab"), name="logits_dense")(x)


class Embedder(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self) -> jax.Array:
        c = self.config
        shape = (c.vocab, c.embed)
        return partitioning.param_with_axes("embedding", nn.initializers.normal(1.0), shape, axes=("vocab", "embed"))


class T5(nn.Module):
    """Token ids in, logits out; id 0 is padding."""

    config: T5Config = T5Config()

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        c = self.config
        table = jnp.asarray(Embedder(c, name="token_embedder")(), jnp.float32)
        padding = jnp.where(inputs > 0, 0.0, _MASKED)[:, None, None, :]
        encoded = Tower(c, EncoderLayer, c.encoder_layers, "encoder", name="encoder")(table[inputs], padding)
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        causal = jnp.where(jnp.tril(jnp.ones((targets.shape[1],) * 2)) > 0, 0.0, _MASKED)[None, None]
        decoder = Tower(c, DecoderLayer, c.decoder_layers, "decoder", name="decoder")
        out = decoder(table[shifted], encoded, causal, padding)
        return out / math.sqrt(c.embed) @ table.T if c.tied else out


def loss(model: T5, params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy over the targets that are not padding."""
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, inputs, targets))
    picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    weights = (targets > 0).astype(jnp.float32)
    return -jnp.sum(picked * weights) / jnp.sum(weights)


def batch(seed: int, config: T5Config = T5Config(), *, size: int = 8, length: int = 12) -> tuple[jax.Array, jax.Array]:
    """Reproducible inputs and targets, with padding in the second half of each row's last tokens."""
    keys = jax.random.split(jax.random.key(seed), 2)
    inputs, targets = (jax.random.randint(key, (size, length), 1, config.vocab) for key in keys)
    lengths = length - jnp.arange(size) % (length // 2)
    keep = (jnp.arange(length)[None] < lengths[:, None]).astype(inputs.dtype)
    return inputs * keep, targets * keep


def init(config: T5Config = T5Config(), seed: int = 0):
    """The model and its variables: `params` and `params_axes`.

    Values come from NumPy: compiling the initializers takes longer than most tests.
    """
    model = T5(config)
    ids = jnp.ones((1, 4), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(seed), ids, ids)
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        if path[-1].key == "scale":
            return jnp.asarray(1 + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return model, {**variables, "params": jax.tree_util.tree_map_with_path(value, variables["params"])}


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
