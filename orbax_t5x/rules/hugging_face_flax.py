"""Names of Hugging Face's Flax models, and T5X's minimal T5."""

from __future__ import annotations

from collections.abc import Iterable

from orbax_t5x.rules.hugging_face import FIXED_NAMES, ROOT, our_pattern, pack_of_hugging_face
from orbax_t5x.rules.leaf_table import BIAS, SUBLAYERS, Dimensions, LeafTable, dimensions_of, layer_names
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.relatives import relatives_table
from orbax_t5x.transforms.arrays import Transpose
from orbax_t5x.transforms.names import Rename


def _names_of_flax(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Converts pairs to '/'-joined names with kernels and embeddings."""
    kinds = {"kernel": "kernel", "embedding": "embedding", "rel_embedding": "embedding", "scale": "weight"}
    return [
        (theirs.removesuffix("weight").replace(".", "/") + kinds[ours.rpartition("/")[2]], ours)
        for theirs, ours in pairs
    ]


def _flax_leaves() -> LeafTable:
    """Makes the table of the names of Hugging Face's Flax models."""
    names = _names_of_flax([*layer_names(), *FIXED_NAMES])
    bias = "block/*/layer/0/SelfAttention/relative_attention_bias/embedding"
    found: dict[str, Dimensions] = {theirs: (dimensions_of(ours),) for theirs, ours in names}
    found.update({f"{tower}/{bias}": ("*H",) for tower in SUBLAYERS})
    return LeafTable("Hugging Face's Flax T5", {**found, **relatives_table(found)})


def hf_flax_t5_to_t5x(
    *,
    tie_word_embeddings: bool | None = None,
    scale_decoder_outputs: bool | None = None,
    encoder_attention_type: str | None = None,
    prefix: str = "target/",
) -> RulePack:
    """Maps Hugging Face's Flax models of T5 to T5X's.

    As `hf_t5_to_t5x`, whose arguments it has; of the arrays, only relative biases are transposed.

    Example:
      >>> ot.rules.hf_flax_t5_to_t5x()({"shared": {"embedding": 1}, "lm_head": {"kernel": 2}}, {})
      {'target': {'token_embedder': {'embedding': 1}, 'decoder': {'logits_dense': {'kernel': 2}}}}
    """
    pairs = _names_of_flax([*layer_names(), *FIXED_NAMES])
    bias = "block/{}/layer/0/SelfAttention/relative_attention_bias/embedding"
    biases = rf"(?:encoder|decoder)/(?:layers_\d+/)?{BIAS}"
    renamed = (
        *((theirs.replace("*", r"(\d+)"), ours.replace("*", r"\1")) for theirs, ours in pairs),
        (r"(encoder|decoder)/" + bias.format(r"(\d+)"), rf"\1/layers_\2/{BIAS}"),
    )
    renamed_back = (
        *((our_pattern(ours), theirs.replace("*", r"\1")) for theirs, ours in pairs),
        (rf"{ROOT}(encoder|decoder)/{BIAS}", r"\1/" + bias.format("0")),
        (rf"{ROOT}(encoder|decoder)/layers_(\d+)/{BIAS}", r"\1/" + bias.format(r"\2")),
    )
    forwards = (Rename(renamed, require_match=False), Transpose(biases, require_match=False))
    back = (Transpose(ROOT + biases, require_match=False), Rename(renamed_back, require_match=False))
    arguments = {
        "tie_word_embeddings": tie_word_embeddings,
        "scale_decoder_outputs": scale_decoder_outputs,
        "encoder_attention_type": encoder_attention_type,
        "prefix": prefix,
    }
    example = "encoder/block/0/layer/0/SelfAttention/q/kernel"
    return pack_of_hugging_face("hf_flax_t5_to_t5x", _flax_leaves(), (), forwards, back, example, arguments)
