"""T5X's decoder-only model to MaxText's decoder, if shapes agree.

MaxText (Linen layout on disk) keeps parameters below `params/params/`, kernels as (E, H, D) and (H, D, E), layers
scanned on an axis or as `layers_3`. The norm before the MLP is named after the sublayer before it. MaxText's models
have no encoder, and its decoder has no relative bias: a checkpoint with either is a problem, because what MaxText
computes from the rest is not what the model computed.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.rules.leaf_table import maxtext_tables
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.steps import HeadsCheck
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.arrays import Reshape
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow_optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.prefix import PrefixChange, parameter_prefixes, rename_leaves
from orbax_t5x.transforms.run import Chain
from orbax_t5x.trees.flat import FlatState

_T5X = r"(?:target/|params/)?"
_MAXTEXT = "params/params/"
_NORMS = (("pre_mlp_layer_norm", "post_self_attention_layer_norm"), ("pre_self_attention_layer_norm",) * 2)


def _layer_rules() -> tuple[tuple[str, str], ...]:
    layer = rf"{_T5X}decoder/layers_(\d+)"
    to = rf"{_MAXTEXT}decoder/layers_\1"
    return (
        (rf"{layer}/(self_attention|mlp)/(.*)", rf"{to}/\2/\3"),
        *((rf"{layer}/{ours}/scale", rf"{to}/{theirs}/scale") for ours, theirs in _NORMS),
        (rf"{_T5X}decoder/(decoder_norm/scale|logits_dense/kernel)", rf"{_MAXTEXT}decoder/\1"),
        (rf"{_T5X}(?:decoder/)?token_embedder/embedding", rf"{_MAXTEXT}token_embedder/embedding"),
    )


def _back_rules() -> tuple[tuple[str, str], ...]:
    layer, to = rf"{_MAXTEXT}decoder/layers_(\d+)", r"target/decoder/layers_\1"
    return (
        (rf"{layer}/(self_attention|mlp)/(.*)", rf"{to}/\2/\3"),
        *((rf"{layer}/{theirs}/scale", rf"{to}/{ours}/scale") for ours, theirs in _NORMS),
        (rf"{_MAXTEXT}decoder/(decoder_norm/scale|logits_dense/kernel)", r"target/decoder/\1"),
        (rf"{_MAXTEXT}token_embedder/embedding", r"target/decoder/token_embedder/embedding"),
    )


# What MaxText has no place for: a pattern of the names, and why.
_WITHOUT_PLACE = (
    (
        r"(?:.*/)?decoder/(?:layers_\d+/)?relpos_bias/.*",
        "MaxText's decoder has no T5 relative bias: without it the model computes other logits",
    ),
    (
        r"(?:.*/)?(?:encoder/.*|decoder/layers_\d+/(?:encoder_decoder_attention|pre_cross_attention_layer_norm)/.*)",
        "MaxText's models have no encoder: the decoder of an encoder-decoder model is no language model",
    ),
)


@dataclasses.dataclass(frozen=True)
class _MaxTextCheck(Transform):
    """Check for leaves without a counterpart in MaxText."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        result = dict(state)
        for pattern, reason in _WITHOUT_PLACE:
            found = [name for name in result if re.fullmatch(pattern, name)]
            if found:
                diagnostics.problem(
                    "rule",
                    found[0] if len(found) == 1 else None,
                    f"{reason}. The checkpoint has {listed(found, 2)}",
                    Fix.in_program(
                        f"to leave them out all the same, put ot.transforms.Drop([{pattern!r}]) before the pack"
                    ),
                )
                result = {name: value for name, value in result.items() if name not in found}
        return result


@dataclasses.dataclass(frozen=True)
class _KnownPrefix(Transform):
    """Move of the model to the prefix of the pack's rules."""

    known: tuple[str, ...]

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        found = parameter_prefixes(state)
        if len(found) != 1 or found[0] in self.known:
            return dict(state)
        change = PrefixChange(found[0], self.known[0])
        return rename_leaves(state, change.renames(state), f"below {change.new!r}", diagnostics)


def t5x_decoder_to_maxtext(num_heads: int, head_dim: int, *, scanned: bool = True, scan_axis: int = 1) -> RulePack:
    """Maps a T5X decoder-only model to MaxText.

    Relative biases, and the encoder of an encoder-decoder model, are a problem; `Drop` before the pack permits to leave
    them out.

    Args:
      num_heads: H.
      head_dim: D; T5X's kernels are (E, H*D).
      scanned: whether MaxText's layers are stacked on one axis; otherwise as `layers_3`.
      scan_axis: the position of that axis: MaxText's `param_scan_axis`.

    Example:
      >>> state = {"target": {"decoder": {"layers_0": {"mlp": {"wo": {"kernel": np.ones((32, 16))}}}}}}
      >>> jax.tree.map(np.shape, ot.rules.t5x_decoder_to_maxtext(num_heads=2, head_dim=8)(state, {}))
      {'params': {'params': {'decoder': {'layers': {'mlp': {'wo': {'kernel': (32, 1, 16)}}}}}}}
    """
    heads, dim, axis = operator.index(num_heads), operator.index(head_dim), operator.index(scan_axis)
    attention = rf"{_MAXTEXT}decoder/layers_\d+/self_attention"
    ours = rf"{_T5X}decoder/layers_\d+/self_attention"
    theirs = rf"{_MAXTEXT}decoder/layers/self_attention" if scanned else attention
    steps: list[Transform] = [
        Rename(_layer_rules(), require_match=False),
        Reshape(rf"{attention}/(?:query|key|value)/kernel", (-1, heads, dim), require_match=False),
        Reshape(rf"{attention}/out/kernel", (heads, dim, -1), require_match=False),
    ]
    back: list[Transform] = [
        Reshape(rf"{attention}/(?:query|key|value)/kernel", (-1, heads * dim), require_match=False),
        Reshape(rf"{attention}/out/kernel", (heads * dim, -1), require_match=False),
        Rename(_back_rules(), require_match=False),
    ]
    if scanned:
        layers = f"{_MAXTEXT}decoder/layers"
        steps.append(StackLayers(rf"{layers}_(\d+)/(.*)", rf"{layers}/\2", axis, require_match=False))
        back.insert(0, UnstackLayers(rf"{layers}/(.*)", rf"{layers}_{{i}}/\1", axis, require_match=False))
    leaves, leaves_back = maxtext_tables(axis if scanned else None)
    given: list[tuple[str, Any]] = [("num_heads", heads), ("head_dim", dim)]
    given += [] if scanned else [("scanned", False)]
    given += [] if axis == 1 else [("scan_axis", axis)]
    return pack_of(
        PackCall("t5x_decoder_to_maxtext", tuple(given)),
        (FollowOptimizer(Chain(tuple(steps))),),
        (FollowOptimizer(Chain(tuple(back))),),
        example="target/decoder/layers_0/self_attention/query/kernel",
        back_example=f"{_MAXTEXT}decoder/layers/self_attention/query/kernel",
        _before=(_MaxTextCheck(), _KnownPrefix(("target/", "params/", "")), HeadsCheck(ours, heads, dim)),
        _before_back=(_KnownPrefix((_MAXTEXT,)), HeadsCheck(theirs, heads, dim, axis if scanned else None)),
        _leaves=leaves,
        _leaves_back=leaves_back,
    )
