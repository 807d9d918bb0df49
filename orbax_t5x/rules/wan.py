"""Names of Wan's umT5 text encoder, and Hugging Face's.

An encoder alone, gated, with a relative bias in every block or, in its variant with shared positions, one for all. The
names are as we know them; neither a file nor the model's source was at hand to compare them with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.renaming import RenamedLeaf, renaming_pack
from orbax_t5x.rules.steps import FirstName
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.prefix import rename_leaves
from orbax_t5x.trees.flat import FlatState

_BLOCK = "encoder.block.*.layer"
_SHARED_BIAS = "pos_embedding.embedding.weight"
_BIAS = RenamedLeaf(f"blocks.*.{_SHARED_BIAS}", f"{_BLOCK}.0.SelfAttention.relative_attention_bias.weight", "*H")
_EMBEDDING = RenamedLeaf("token_embedding.weight", "shared.weight", "VE")
_COPY = "encoder.embed_tokens.weight"
_LEAVES = (
    _EMBEDDING,
    *(RenamedLeaf(f"blocks.*.attn.{one}.weight", f"{_BLOCK}.0.SelfAttention.{one}.weight", "JE") for one in "qkv"),
    RenamedLeaf("blocks.*.attn.o.weight", f"{_BLOCK}.0.SelfAttention.o.weight", "EJ"),
    _BIAS,
    RenamedLeaf("blocks.*.norm1.weight", f"{_BLOCK}.0.layer_norm.weight", "E"),
    RenamedLeaf("blocks.*.ffn.gate.0.weight", f"{_BLOCK}.1.DenseReluDense.wi_0.weight", "FE"),
    RenamedLeaf("blocks.*.ffn.fc1.weight", f"{_BLOCK}.1.DenseReluDense.wi_1.weight", "FE"),
    RenamedLeaf("blocks.*.ffn.fc2.weight", f"{_BLOCK}.1.DenseReluDense.wo.weight", "EF"),
    RenamedLeaf("blocks.*.norm2.weight", f"{_BLOCK}.1.layer_norm.weight", "E"),
    RenamedLeaf("norm.weight", "encoder.final_layer_norm.weight", "E"),
)


@dataclasses.dataclass(frozen=True)
class _SharedBias(Transform):
    """Bias of block 0 for all blocks.

    The other blocks have no bias, and the target does not have it in the block.
    """

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        first = _BIAS.ours.replace("*", "0")
        biases, wanted = ([name for name in side if name.endswith(_SHARED_BIAS)] for side in (state, target))
        is_of_block = any(name.endswith(first) for name in wanted) if wanted else "blocks.1.norm1.weight" not in state
        shared = {} if biases != [first] or is_of_block else {first: _SHARED_BIAS}
        return rename_leaves(state, shared, "of all blocks", diagnostics)


def wan_t5_to_hf_t5() -> RulePack:
    """Maps Wan's text encoder, a umT5, to Hugging Face's names.

    `hf_t5_to_t5x()` after it leads to T5X's; `transforms="auto"` joins both.

    Example:
      >>> ot.rules.wan_t5_to_hf_t5()({"token_embedding.weight": 1, "blocks.0.ffn.gate.0.weight": 2}, {})
      {'shared.weight': 1, 'encoder.block.0.layer.1.DenseReluDense.wi_0.weight': 2}
    """
    return renaming_pack(
        "wan_t5_to_hf_t5",
        "Wan's text encoder",
        _LEAVES,
        forwards_only=(RenamedLeaf(_SHARED_BIAS, _BIAS.theirs.replace("*", "0"), "*H"),),
        back_first=(FirstName((_EMBEDDING.theirs, _COPY), _EMBEDDING.theirs),),
        back_last=(_SharedBias(),),
        extra_names=(_EMBEDDING._replace(theirs=_COPY),),
    )
