"""The sizes of a T5, and how they are found in a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.rules.inference import to_minimal
from orbax_t5x.transforms.diagnostics import Diagnostics

_PREFIX = re.compile(r"(?:target|params)/(?:params/)?")


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and layout of a T5; the defaults are a tiny model's.

    Attributes:
      vocab, embed, heads, head_dim, mlp: sizes; Hugging Face calls them vocab_size, d_model, num_heads, d_kv, d_ff.
      encoder_layers, decoder_layers: depths.
      buckets, max_distance: of the relative position bias.
      gated: T5.1.1's feed-forward layer, `wi_0` with gelu times `wi_1`; False: T5.1.0's, `wi` with relu.
      tied: T5.1.0's logits, from the embedding; False: T5.1.1's, from `logits_dense`.
      scan_layers: linen only: the layers of a tower are one, stacked on axis 1 (T5X's scalable T5).
      split_heads: linen only: attention kernels (embed, heads, head_dim), not joined; None: as `scan_layers`.
      per_layer_bias: linen only: a relative position bias in each layer, not one per tower; None: as `scan_layers`.
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

    @property
    def has_split_heads(self) -> bool:
        """True if attention kernels have a dimension of heads."""
        return self.scan_layers if self.split_heads is None else self.split_heads

    @property
    def has_per_layer_bias(self) -> bool:
        """True if each layer has a relative position bias."""
        return self.scan_layers if self.per_layer_bias is None else self.per_layer_bias


def config_of(checkpoint: Any) -> T5Config:
    """Finds the sizes of the T5 in a checkpoint, in any layout that a rule pack knows; reads metadata only.

    Args:
      checkpoint: a path, or an opened checkpoint.

    Returns:
      The config of an unrolled model with those sizes. The activation is not recorded in a checkpoint: a gated
      feed-forward layer counts as T5.1.1's gelu.

    Raises:
      UnsupportedCheckpointError: it is no encoder-decoder T5, or its names are unknown.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint) as opened:
            return config_of(opened)
    pack = to_minimal(checkpoint.leaves)
    leaves: Mapping[str, Any] = checkpoint.leaves
    if pack is not None:
        leaves = pack.apply(leaves, {}, Diagnostics())
    shapes = {_PREFIX.sub("", name, count=1): tuple(getattr(leaf, "shape", ())) for name, leaf in leaves.items()}
    try:
        return _config_of_shapes(shapes)
    except (KeyError, StopIteration, ValueError) as error:
        message = f"no T5 with an encoder and a decoder is found by its names: {error}"
        raise UnsupportedCheckpointError(message, path=str(checkpoint.path)) from error


def _config_of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> T5Config:
    """Returns the config of parameters with the names of T5X's minimal T5."""
    vocab, embed = shapes["token_embedder/embedding"]
    per_layer_bias = "encoder/relpos_bias/rel_embedding" not in shapes
    heads, buckets = shapes[f"encoder/{'layers_0/' if per_layer_bias else ''}relpos_bias/rel_embedding"]
    query = shapes["encoder/layers_0/attention/query/kernel"]
    gated = "encoder/layers_0/mlp/wi_0/kernel" in shapes
    return T5Config(
        vocab=vocab,
        embed=embed,
        heads=heads,
        head_dim=query[-1] if len(query) == 3 else query[1] // heads,
        mlp=shapes[f"encoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel"][1],
        encoder_layers=_tower_depth(shapes, "encoder"),
        decoder_layers=_tower_depth(shapes, "decoder"),
        buckets=buckets,
        gated=gated,
        tied="decoder/logits_dense/kernel" not in shapes,
        split_heads=len(query) == 3 or None,
        per_layer_bias=per_layer_bias or None,
    )


def _tower_depth(shapes: Mapping[str, Any], tower: str) -> int:
    pattern = re.compile(rf"{tower}/layers_(\d+)/")
    return 1 + max(int(found[1]) for name in shapes if (found := pattern.match(name)))
