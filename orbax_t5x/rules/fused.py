"""Flaxformer's fused kernels of keys and values, and of gates.

Fused: `attention/kv_fused/kernel` (E, 2, H, D), keys first, and `mlp/wi_fused/kernel` (E, 2, F), `wi_0` first.
"""

from __future__ import annotations

from orbax_t5x.rules.leaf_table import LeafTable, fused_leaves, t5x_table
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.transforms.follow_optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.run import Chain

_LAYER = r"(.*(?:encoder|decoder)/layers_\d+/"
_ATTENTION = rf"{_LAYER}(?:attention|self_attention|encoder_decoder_attention))"
_MLP = rf"{_LAYER}mlp)"
# Keys and values under names with numbers, as gates have them.
_NUMBERED = (("key", "kv_0"), ("value", "kv_1"))
_FACTORS = (
    (r".*/kv_fused/kernel", ("ROW", "BATCH", "COLUMN", "COLUMN")),
    (r".*/wi_fused/kernel", ("ROW", "COLUMN", "COLUMN")),
    (r".*/(?:key|value)/kernel", ("ROW", "COLUMN", "COLUMN")),
)


def t5_fused_to_unscanned() -> RulePack:
    """Maps Flaxformer's fused kernels to T5X's unscanned T5.

    Heads are split where keys and values are fused. Adafactor's factored moments of gates are reset, because the
    rows of fused ones are one mean over both.

    Example:
      >>> state = {"target": {"encoder": {"layers_0": {"mlp": {"wi_fused": {"kernel": np.ones((8, 2, 16))}}}}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_fused_to_unscanned()(state, {}))
      {'target': {'encoder': {'layers_0': {'mlp': {'wi_0': {'kernel': (8, 16)}, 'wi_1': {'kernel': (8, 16)}}}}}}
    """
    apart = (
        UnstackLayers(rf"{_ATTENTION}/kv_fused/kernel", r"\1/kv_{i}/kernel", 1, require_match=False),
        UnstackLayers(rf"{_MLP}/wi_fused/kernel", r"\1/wi_{i}/kernel", 1, require_match=False),
        Rename(
            tuple((f"{_ATTENTION}/{old}/kernel", rf"\1/{new}/kernel") for new, old in _NUMBERED), require_match=False
        ),
    )
    together = (
        Rename(
            tuple((f"{_ATTENTION}/{old}/kernel", rf"\1/{new}/kernel") for old, new in _NUMBERED), require_match=False
        ),
        StackLayers(rf"{_ATTENTION}/kv_(?P<i>\d)/kernel", r"\1/kv_fused/kernel", 1, require_match=False),
        StackLayers(rf"{_MLP}/wi_(?P<i>\d)/kernel", r"\1/wi_fused/kernel", 1, require_match=False),
    )
    ours = t5x_table("T5X's unscanned T5", heads=("split",), experts=False).leaves
    others = {name: letters for name, letters in ours.items() if not name.endswith(("/key/kernel", "/value/kernel"))}
    others = {name: letters for name, letters in others.items() if "/mlp/wi_" not in name}
    return pack_of(
        PackCall("t5_fused_to_unscanned"),
        (FollowOptimizer(Chain(apart), factors=_FACTORS),),
        (FollowOptimizer(Chain(together), factors=_FACTORS),),
        example="target/encoder/layers_0/attention/kv_fused/kernel",
        back_example="target/encoder/layers_0/attention/key/kernel",
        _leaves=LeafTable("Flaxformer's fused T5", {**others, **fused_leaves()}),
        _leaves_back=LeafTable("T5X's unscanned T5", ours),
    )
