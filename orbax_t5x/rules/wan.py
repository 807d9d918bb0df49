"""Between the names that Wan's video models give their umT5 text encoder and Hugging Face's: the arrays are the same.

Read in the model's source: an encoder alone, gated, with a relative bias in every block or, in its variant with shared
positions, one for all.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orbax_t5x.rules.leaf_table import Dimensions, LeafTable
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.scaled_fp8 import with_scales
from orbax_t5x.rules.steps import FirstName, WithoutPrefix
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.prefix import renamed
from orbax_t5x.trees.flat import FlatState

_BLOCK = "encoder.block.*.layer"
_BIAS, _SHARED_BIAS = "blocks.*.pos_embedding.embedding.weight", "pos_embedding.embedding.weight"
_THEIR_BIAS = f"{_BLOCK}.0.SelfAttention.relative_attention_bias.weight"
# Wan's name, Hugging Face's and the dimensions, with `*` for the number of a layer.
_LEAVES = (
    ("token_embedding.weight", "shared.weight", "VE"),
    *((f"blocks.*.attn.{one}.weight", f"{_BLOCK}.0.SelfAttention.{one}.weight", "JE") for one in "qkv"),
    ("blocks.*.attn.o.weight", f"{_BLOCK}.0.SelfAttention.o.weight", "EJ"),
    (_BIAS, _THEIR_BIAS, "*H"),
    ("blocks.*.norm1.weight", f"{_BLOCK}.0.layer_norm.weight", "E"),
    ("blocks.*.ffn.gate.0.weight", f"{_BLOCK}.1.DenseReluDense.wi_0.weight", "FE"),
    ("blocks.*.ffn.fc1.weight", f"{_BLOCK}.1.DenseReluDense.wi_1.weight", "FE"),
    ("blocks.*.ffn.fc2.weight", f"{_BLOCK}.1.DenseReluDense.wo.weight", "EF"),
    ("blocks.*.norm2.weight", f"{_BLOCK}.1.layer_norm.weight", "E"),
    ("norm.weight", "encoder.final_layer_norm.weight", "E"),
)
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")


def _renaming(pairs: list[tuple[str, str]]) -> Rename:
    """Returns the rules for names with `*`; a weight's scale is renamed as the weight."""
    rules: list[tuple[str, str]] = []
    for old, new in pairs:
        pattern = re.escape(old.removesuffix("weight")).replace(r"\*", r"(?P<i>\d+)")
        rules.append((rf"{pattern}(?P<kind>(?:scale_)?weight)", new.replace("*", r"\g<i>")[:-6] + r"\g<kind>"))
    return Rename(tuple(rules), require_match=False)


@dataclasses.dataclass(frozen=True)
class _SharedBias(Transform):
    """The bias of block 0 is all blocks', where the others have none and the target does not have it in the block."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        first = _BIAS.replace("*", "0")
        biases, wanted = ([name for name in side if name.endswith(_SHARED_BIAS)] for side in (state, target))
        is_of_block = any(name.endswith(first) for name in wanted) if wanted else "blocks.1.norm1.weight" not in state
        shared = {} if biases != [first] or is_of_block else {first: _SHARED_BIAS}
        return renamed(state, shared, "of all blocks", diagnostics)


def wan_t5_to_hf_t5() -> RulePack:
    """Maps the names of Wan's text encoder, a umT5, to Hugging Face's: `blocks.0.attn.q.weight` and the like.

    `hf_t5_to_t5x()` after it leads to T5X's; `transforms="auto"` joins both.

    Example:
      >>> ot.rules.wan_t5_to_hf_t5()({"token_embedding.weight": 1, "blocks.0.ffn.gate.0.weight": 2}, {})
      {'shared.weight': 1, 'encoder.block.0.layer.1.DenseReluDense.wi_0.weight': 2}
    """
    ours: dict[str, Dimensions] = {name: (letters,) for name, _, letters in _LEAVES} | {_SHARED_BIAS: ("*H",)}
    theirs: dict[str, Dimensions] = {name: (letters,) for _, name, letters in _LEAVES} | {_EMBEDDINGS[1]: ("VE",)}
    leaves = LeafTable("Wan's text encoder", with_scales(ours), has_dots=True)
    leaves_back = LeafTable("Wan's text encoder, by Hugging Face's names,", with_scales(theirs), has_dots=True)
    pairs = [(name, theirs) for name, theirs, _ in _LEAVES]
    return pack_of(
        PackCall("wan_t5_to_hf_t5"),
        (_renaming([*pairs, (_SHARED_BIAS, _THEIR_BIAS.replace("*", "0"))]),),
        (FirstName(_EMBEDDINGS, _EMBEDDINGS[0]), _renaming([(theirs, name) for name, theirs in pairs]), _SharedBias()),
        example="blocks.0.attn.q.weight",
        back_example="encoder.block.0.layer.0.SelfAttention.q.weight",
        _before=(WithoutPrefix(leaves),),
        _before_back=(WithoutPrefix(leaves_back),),
        _leaves=leaves,
        _leaves_back=leaves_back,
    )
