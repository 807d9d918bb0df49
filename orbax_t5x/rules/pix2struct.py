"""Names of Pix2Struct's decoder, and of Hugging Face's T5.

Read in the source of Transformers 4.56.2. The encoder sees images and is no T5's: its leaves are for `Drop`, or for
`strict=False`.
"""

from __future__ import annotations

from orbax_t5x.rules.embeddings import SHARED
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.renaming import RenamedLeaf, renaming_pack
from orbax_t5x.rules.steps import FirstName

_LAYER, _BLOCK = "decoder.layer.*", "decoder.block.*.layer"
_ATTENTIONS = (
    ("self_attention", f"{_BLOCK}.0.SelfAttention"),
    ("encoder_decoder_attention", f"{_BLOCK}.1.EncDecAttention"),
)
_PROJECTIONS = {"query": ("q", "JE"), "key": ("k", "JE"), "value": ("v", "JE"), "output": ("o", "EJ")}
_EMBEDDING = "decoder.embed_tokens.weight"
_BIAS = "relative_attention_bias.weight"
_LEAVES = (
    RenamedLeaf(_EMBEDDING, _EMBEDDING, "VE"),
    *(
        RenamedLeaf(f"{_LAYER}.{ours}.attention.{one}.weight", f"{theirs}.{other}.weight", letters)
        for ours, theirs in _ATTENTIONS
        for one, (other, letters) in _PROJECTIONS.items()
    ),
    RenamedLeaf(f"{_LAYER}.self_attention.attention.{_BIAS}", f"{_BLOCK}.0.SelfAttention.{_BIAS}", "*H"),
    *(
        RenamedLeaf(f"{_LAYER}.{module}.layer_norm.weight", f"{_BLOCK}.{at}.layer_norm.weight", "E")
        for at, module in enumerate(("self_attention", "encoder_decoder_attention", "mlp"))
    ),
    *(
        RenamedLeaf(f"{_LAYER}.mlp.DenseReluDense.{one}.weight", f"{_BLOCK}.2.DenseReluDense.{one}.weight", letters)
        for one, letters in (("wi_0", "FE"), ("wi_1", "FE"), ("wo", "EF"))
    ),
    RenamedLeaf("decoder.final_layer_norm.weight", "decoder.final_layer_norm.weight", "E"),
    RenamedLeaf("decoder.lm_head.weight", "lm_head.weight", "VE"),
)


def pix2struct_decoder_to_hf_t5() -> RulePack:
    """Maps Pix2Struct's decoder to Hugging Face's T5.

    `hf_t5_to_t5x()` after it leads to T5X's; `transforms="auto"` joins both. The encoder's leaves have no place there.

    Example:
      >>> state = {"decoder.layer.3.mlp.layer_norm.weight": 1, "decoder.lm_head.weight": 2}
      >>> ot.rules.pix2struct_decoder_to_hf_t5()(state, {})
      {'decoder.block.3.layer.2.layer_norm.weight': 1, 'lm_head.weight': 2}
    """
    return renaming_pack(
        "pix2struct_decoder_to_hf_t5",
        "Pix2Struct's decoder",
        _LEAVES,
        back_first=(FirstName((_EMBEDDING, SHARED), _EMBEDDING),),
        extra_names=(RenamedLeaf(_EMBEDDING, SHARED, "VE"),),
    )
