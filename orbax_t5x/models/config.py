"""Sizes and function of a T5, found in its checkpoint.

Leaves show sizes and layout. The activation, the scale of the logits, the largest distance of the position bias and the
kind of attention are in `config.json` only, and what its keys mean depends on the version of Transformers that wrote
it. A function that the models do not compute is refused by the key that asks for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.rules.inference import to_minimal
from orbax_t5x.transforms.diagnostics import Diagnostics

_PREFIX = re.compile(r"(?:target|params)/(?:params/)?")
_EMBEDDING = "token_embedder/embedding"
_HEAD = "decoder/logits_dense/kernel"
# Hugging Face's PyTorch and Flax, and GGUF; T5X's trees have a projection of their own or none.
_THEIR_HEAD = re.compile(r"(?:.*[./])?lm_head[./](?:weight|kernel)|output\.weight")
_COMPUTED = "the models of this package compute T5, T5.1.1, mT5, umT5 and their encoders"
_MODEL_TYPES = ("t5", "mt5", "umt5")
# The heads of other classes (labels, answers, a bare decoder) are no logits of tokens.
_LOGITS = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "T5WithLMHeadModel",
)
_ENCODERS = ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
"""As Transformers names them: `gelu` by the error function, `gelu_new` by tanh; `swish` is `silu`."""
# Rows of both matrices that one comparison reads.
_COMPARED_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes, layout and function of a T5.

    The defaults are a tiny T5.1.1's.

    Attributes:
      vocab, embed, heads, head_dim, mlp: sizes; Hugging Face calls them vocab_size, d_model, num_heads, d_kv, d_ff.
      encoder_layers, decoder_layers: depths.
      buckets, max_distance: of the relative position bias.
      gated: two projections `wi_0` and `wi_1` (T5.1.1) instead of `wi` (T5.1.0).
      tied: the logits are the embedding's (T5.1.0) instead of a `logits_dense` (T5.1.1).
      scan_layers: linen only: the layers of a tower are stacked on axis 1 (T5X's scalable T5).
      split_heads: linen only: attention kernels (embed, heads, head_dim), not joined; None: as `scan_layers`.
      per_layer_bias: a relative position bias in each layer (umT5), not one per tower; None: as `scan_layers`.
      activation: one of `ACTIVATIONS`; None: T5.1.1's `gelu_new` if gated, else T5.1.0's `relu`.
      scale_decoder_outputs: the decoder's output is divided by the root of `embed`; None: as `tied`.
      encoder_only: the encoder's output instead of logits, and no parameter of a decoder.
      layer_norm_epsilon: added to the mean square.
      dtype: of activations; parameters, norms and logits stay float32.
      dropout_rate: in calls with a `dropout` key; calls without are evaluation.
    """

    vocab: int = 128
    embed: int = 16
    heads: int = 4
    head_dim: int = 4
    mlp: int = 32
    encoder_layers: int = 2
    decoder_layers: int = 2
    buckets: int = 32
    max_distance: int = 128
    gated: bool = True
    tied: bool = False
    scan_layers: bool = False
    split_heads: bool | None = None
    per_layer_bias: bool | None = None
    activation: str | None = None
    scale_decoder_outputs: bool | None = None
    encoder_only: bool = False
    layer_norm_epsilon: float = 1e-6
    dtype: Any = jnp.float32
    dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}")

    @property
    def has_split_heads(self) -> bool:
        """True if attention kernels have a dimension of heads."""
        return self.scan_layers if self.split_heads is None else self.split_heads

    @property
    def has_per_layer_bias(self) -> bool:
        """True if each layer has a relative position bias."""
        return self.scan_layers if self.per_layer_bias is None else self.per_layer_bias

    @property
    def activation_name(self) -> str:
        """The activation, found by `gated` if not given."""
        return self.activation or ("gelu_new" if self.gated else "relu")

    @property
    def scales_decoder_outputs(self) -> bool:
        """True if the decoder's output is divided by the root of `embed`."""
        return self.tied if self.scale_decoder_outputs is None else self.scale_decoder_outputs


def config_of(checkpoint: Any) -> T5Config:
    """Finds the config of the T5 in a checkpoint.

    The layout may be any that a rule pack knows. Sizes come from the leaves. `config.json`, if the checkpoint has it
    (`checkpoint.metadata["config"]`), decides the function, by the meaning of its keys in the version of Transformers
    that wrote it. Without it a gated T5 has T5.1.1's `gelu_new`, another one T5.1.0's `relu`. Only one question reads
    values: whether an `lm_head` in a foreign layout equals the embedding.

    Args:
      checkpoint: a path, or an opened checkpoint.

    Returns:
      The config of an unrolled model of that function.

    Raises:
      UnsupportedCheckpointError: (a ValueError) no T5 has such names; or config.json contradicts the leaves, or asks
        for a function that the models do not compute: the text names the key and its value.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint) as opened:
            return config_of(opened)
    pack = to_minimal(checkpoint.leaves)
    leaves: Mapping[str, Any] = checkpoint.leaves
    path = str(checkpoint.path)
    theirs = _TheirConfig(checkpoint.metadata.get("config"), path)
    if error := checkpoint.metadata.get("config_error"):
        raise UnsupportedCheckpointError(
            f"config.json decides what the model computes, and is no JSON: {error}", path=path
        )
    theirs.check_kind()
    if pack is not None:
        leaves = pack.apply(leaves, {}, Diagnostics())
    parameters = {_PREFIX.sub("", name, count=1): leaf for name, leaf in leaves.items()}
    try:
        found = _config_of_leaves(parameters)
    except (KeyError, StopIteration, ValueError) as error:
        message = f"no T5 is found by the names of the leaves: {error}"
        raise UnsupportedCheckpointError(message, path=path) from error
    if theirs.is_given:
        return theirs.completed(found, parameters)
    architecture = checkpoint.metadata.get("general.architecture")
    epsilon = checkpoint.metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon")
    if isinstance(epsilon, float):  # GGUF's is a float32
        found = dataclasses.replace(found, layer_norm_epsilon=float(f"{epsilon:.7g}"))
    if any(map(_THEIR_HEAD.fullmatch, checkpoint.leaves)) and _has_equal_head(parameters):
        found = dataclasses.replace(found, tied=True, scale_decoder_outputs=True)
    return found


def _config_of_leaves(leaves: Mapping[str, Any]) -> T5Config:
    """Returns the config of parameters with T5X's minimal names."""
    shapes: dict[str, tuple[int, ...]] = {name: tuple(getattr(leaf, "shape", ())) for name, leaf in leaves.items()}
    vocab, embed = shapes[_EMBEDDING]
    # A tower of one layer looks alike with a bias in each layer; the other tower tells.
    biases = {name: shape for name, shape in shapes.items() if name.endswith("/relpos_bias/rel_embedding")}
    per_layer_bias = any("/layers_" in name for name in biases)
    heads, buckets = next(shape for name, shape in biases.items() if name.startswith("encoder/"))
    query = shapes["encoder/layers_0/attention/query/kernel"]
    gated = "encoder/layers_0/mlp/wi_0/kernel" in shapes
    encoder_only = not any(name.startswith("decoder/") for name in shapes)
    tied = not encoder_only and _HEAD not in shapes
    return T5Config(
        vocab=vocab,
        embed=embed,
        heads=heads,
        head_dim=query[-1] if len(query) == 3 else query[1] // heads,
        mlp=shapes[f"encoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel"][1],
        encoder_layers=_tower_depth(shapes, "encoder"),
        decoder_layers=0 if encoder_only else _tower_depth(shapes, "decoder"),
        buckets=buckets,
        gated=gated,
        tied=tied,
        split_heads=len(query) == 3 or None,
        per_layer_bias=per_layer_bias or None,
        activation="gelu_new" if gated else "relu",
        scale_decoder_outputs=tied,
        encoder_only=encoder_only,
    )


def _tower_depth(shapes: Mapping[str, Any], tower: str) -> int:
    pattern = re.compile(rf"{tower}/layers_(\d+)/")
    return 1 + max((int(found[1]) for name in shapes if (found := pattern.match(name))), default=-1)


def _has_equal_head(leaves: Mapping[str, Any]) -> bool:
    """Compares an output projection with the embedding.

    It stops at the second difference.
    """
    head, embedding = leaves.get(_HEAD), leaves.get(_EMBEDDING)
    if head is None or embedding is None or tuple(head.shape) != tuple(embedding.shape)[::-1]:
        return False
    rows = max(1, _COMPARED_BYTES // max(1, embedding.nbytes // max(1, embedding.shape[0])))
    return all(
        np.array_equal(np.asarray(head[:, start : start + rows]).T, np.asarray(embedding[start : start + rows]))
        for start in range(0, embedding.shape[0], rows)
    )


class _TheirConfig:
    """A config.json of Transformers, and the meaning of absent keys."""

    def __init__(self, given: Any, path: str):
        self.is_given: bool = isinstance(given, Mapping) and "d_model" in given
        self._given: Mapping[str, Any] = given if self.is_given else {}
        self._path = path
        # Before version 4 no config named it.
        version = re.match(r"(\d+)\.(\d+)", str(self._given.get("transformers_version", "")))
        self._version: tuple[int, int] = (int(version[1]), int(version[2])) if version else (4, 0)
        if not version and "scale_decoder_outputs" in self._given:
            self._version = (5, 24)  # no older one wrote this key of all types
        self._type = str(self._given.get("model_type", "t5"))

    def _refuse(self, key: str, reason: str) -> NoReturn:
        value = f"{key}: {self._given[key]!r}" if key in self._given else f"without {key}"
        raise UnsupportedCheckpointError(f"config.json has {value}, {reason}", path=self._path)

    def check_kind(self) -> None:
        """Refuses a kind of model that the models do not compute."""
        if not self.is_given:
            return
        for key in ("encoder_attention_type", "num_experts"):
            if key in self._given:
                self._refuse(key, f"an attention or a feed-forward layer that is not computed; {_COMPUTED}")
        if self._type not in _MODEL_TYPES:
            self._refuse("model_type", f"another model; {_COMPUTED}")
        architectures = self._given.get("architectures") or _LOGITS
        if not isinstance(architectures, list | tuple) or not {*architectures} <= {*_LOGITS, *_ENCODERS}:
            self._refuse(
                "architectures", "other outputs than logits of tokens or the encoder's; give a T5Config by hand"
            )

    def completed(self, found: T5Config, leaves: Mapping[str, Any]) -> T5Config:
        """Returns the config with the function that config.json decides.

        Raises:
          UnsupportedCheckpointError: a key contradicts the leaves, or asks for a function that is not computed.
        """
        encoder_only = (self._given.get("architectures") or [""])[0] in _ENCODERS
        if encoder_only != found.encoder_only:
            there = "no decoder" if found.encoder_only else "a decoder"
            self._refuse("architectures", f"and the checkpoint has {there}")
        for key in ("pad_token_id",) if encoder_only else ("pad_token_id", "decoder_start_token_id"):
            if self._given.get(key) not in (0, None):
                self._refuse(key, "and the models take id 0 for padding and for the decoder's first token")
        self._compare(found)
        activation, gated = self._feed_forward()
        if gated != found.gated:
            self._refuse("feed_forward_proj", f"and the checkpoint has {'wi_0 and wi_1' if found.gated else 'wi'}")
        distance = self._number("relative_attention_max_distance", 128, int)
        if distance <= (exact := found.buckets // (4 if found.encoder_only else 2)):
            self._refuse("relative_attention_max_distance", f"and T5's buckets have no order up to {exact}")
        tied, scaled = (False, False) if found.encoder_only else self._logits(found, leaves)
        return dataclasses.replace(
            found,
            activation=activation,
            tied=tied,
            scale_decoder_outputs=scaled,
            max_distance=distance,
            layer_norm_epsilon=self._number("layer_norm_epsilon", 1e-6, float),
            dropout_rate=self._number("dropout_rate", 0.1, float),
        )

    def _number(self, key: str, absent: Any, kind: type) -> Any:
        value = self._given.get(key, absent)
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value or value < 0:
            self._refuse(key, f"which is no {kind.__name__} of at least 0")
        return kind(value)

    def _compare(self, found: T5Config) -> None:
        """Refuses sizes that contradict the leaves."""
        sizes = {
            "vocab_size": found.vocab,
            "d_model": found.embed,
            "num_heads": found.heads,
            "d_kv": found.head_dim,
            "d_ff": found.mlp,
            "num_layers": found.encoder_layers,
            "relative_attention_num_buckets": found.buckets,
        }
        if not found.encoder_only:
            depth = "num_layers" if self._given.get("num_decoder_layers") is None else "num_decoder_layers"
            sizes[depth] = found.decoder_layers
            if depth == "num_layers" and found.encoder_layers != found.decoder_layers:
                self._refuse("num_decoder_layers", f"and the checkpoint has {found.decoder_layers} decoder layers")
        for key, size in sizes.items():
            if key in self._given and self._given[key] != size:
                self._refuse(key, f"and the checkpoint's leaves have {size}")
        has_layer_bias = self._type == "umt5"
        if max(found.encoder_layers, found.decoder_layers) > 1 and has_layer_bias != found.has_per_layer_bias:
            self._refuse("model_type", f"and the position bias is in {'one' if has_layer_bias else 'each'} layer")

    def _feed_forward(self) -> tuple[str, bool]:
        """Returns the activation, and whether the layer is gated.

        `gated-gelu` means gelu_new; `dense_act_fn` and `is_gated_act`, if given, must agree.
        """
        projection = str(self._given.get("feed_forward_proj", "relu" if self._type == "t5" else "gated-gelu"))
        *gate, name = projection.split("-")
        if gate not in ([], ["gated"]):
            self._refuse("feed_forward_proj", "which is no activation, gated or not")
        activation = "gelu_new" if projection == "gated-gelu" else {"swish": "silu"}.get(name, name)
        if activation not in ACTIVATIONS:
            self._refuse("feed_forward_proj", f"an activation that is not computed; it may be {', '.join(ACTIVATIONS)}")
        named = self._given.get("dense_act_fn", activation)
        if {"swish": "silu"}.get(named, named) != activation:
            self._refuse("dense_act_fn", f"and feed_forward_proj: {projection!r}, which is {activation}")
        if self._given.get("is_gated_act", bool(gate)) != bool(gate):
            self._refuse("is_gated_act", f"and feed_forward_proj: {projection!r}")
        return activation, bool(gate)

    def _logits(self, found: T5Config, leaves: Mapping[str, Any]) -> tuple[bool, bool]:
        """Decides if logits are tied and the decoder's output is scaled.

        Version 4 ties by `tie_word_embeddings`, and scales what is tied. Version 5 ties what the file lacks; T5 scales
        by `scale_decoder_outputs`, mT5 never, umT5 always before 5.24.
        """
        has_head = not found.tied
        if self._version >= (5, 0):
            scaled = self._given.get("scale_decoder_outputs", self._given.get("tie_word_embeddings") is not False)
            if self._type == "mt5" or (self._type == "umt5" and self._version < (5, 24)):
                scaled = self._type == "umt5"
            return not has_head or _has_equal_head(leaves), bool(scaled)
        tied = bool(self._given.get("tie_word_embeddings", self._type != "mt5"))
        if not tied and not has_head:
            self._refuse("tie_word_embeddings", "and the checkpoint has no lm_head")
        if tied and has_head and not _has_equal_head(leaves):
            self._refuse("tie_word_embeddings", "and the checkpoint has an lm_head that is not the embedding")
        return tied, tied
