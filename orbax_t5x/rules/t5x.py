r"""Rule packs between T5X's minimal, unscanned and scanned layouts.

Minimal: `encoder/layers_3/attention/query/kernel` (E, H*D), one relative bias per tower. Scalable: (E, H, D), a bias
in every layer. Scanned: `encoder/encoder/attention/query/kernel` (E, L, H, D), all layers on one axis. Encoder and
decoder may differ in depth; either may be missing. Names may be below `target/`, `params/` or any other prefix; the
optimizer's leaves follow.
"""

from __future__ import annotations

import operator
from typing import Any

from orbax_t5x.rules.leaf_table import LeafTable, fused_leaves, t5x_table
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.steps import HeadsCheck, MergeAlone, MergeEqualLayers, MergeWhereWanted, RepeatPerLayer
from orbax_t5x.rules.subblocks import stack_subblocks, unstack_subblocks
from orbax_t5x.transforms.arrays import Reshape
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.follow_optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
from orbax_t5x.transforms.run import Chain

_ROOT = r"((?:.*/)?)"
_TOWER = r"(encoder|decoder)"
_LAYER = rf"{_ROOT}{_TOWER}/layers_(?P<i>\d+)/"
_ATTENTION = r"(?:attention|self_attention|encoder_decoder_attention)"
_BIAS = "relpos_bias/rel_embedding"

_MINIMAL_EXAMPLE = "target/encoder/layers_0/attention/query/kernel"
_SCANNED_EXAMPLE = "target/encoder/encoder/attention/query/kernel"

# The part of each dimension in Adafactor's second moment, from T5X's logical axes, without layers: kernels by their
# last names.
_FACTORS = (
    (r".*/(?:query|key|value)/kernel", ("ROW", "COLUMN", "COLUMN")),
    (r".*/out/kernel", ("COLUMN", "COLUMN", "ROW")),
    (r".*/wi(?:_\d+)?/kernel", ("ROW", "COLUMN")),
    (r".*/wo/kernel", ("COLUMN", "ROW")),
)
# Experts come first in a pack whose kernels have their dimension, and joined heads beside split ones.
_EXPERT_FACTORS = (
    (r".*/expert/wi(?:_\d+)?/kernel", ("BATCH", "ROW", "COLUMN")),
    (r".*/expert/wo/kernel", ("BATCH", "COLUMN", "ROW")),
)
_JOINED_FACTORS = ((r".*/(?:query|key|value)/kernel", ("ROW", "COLUMN")), (r".*/out/kernel", ("COLUMN", "ROW")))


def _follow(steps: tuple[Transform, ...], scan_axis: int | None) -> tuple[Transform, ...]:
    factors: list[tuple[str, tuple[str, ...]]] = [(pattern, parts) for pattern, parts in _FACTORS if len(parts) > 2]
    if scan_axis is not None:
        factors += [(pattern, _below_layers(parts, scan_axis)) for pattern, parts in _FACTORS]
    return (FollowOptimizer(Chain(steps), factors=tuple(factors)),)


def _follow_stacking(steps: tuple[Transform, ...], scan_axis: int) -> tuple[Transform, ...]:
    """Follows joined or split heads, and experts, by names."""
    factors: list[tuple[str, tuple[str, ...]]] = []
    for pattern, parts in (*_EXPERT_FACTORS, *_FACTORS, *_JOINED_FACTORS):
        below = pattern.removeprefix(".*/")
        if len(parts) > 2:
            factors.append((rf".*/layers_\d+/.*{below}", parts))
        factors.append((rf"(?!.*/layers_\d+/).*/{below}", _below_layers(parts, scan_axis)))
    return (FollowOptimizer(Chain(steps), factors=tuple(factors)),)


def _below_layers(parts: tuple[str, ...], scan_axis: int) -> tuple[str, ...]:
    # Below zero the axis counts from the end of the stacked shape.
    at = scan_axis if scan_axis >= 0 else scan_axis + len(parts) + 1
    return (*parts[:at], "BATCH", *parts[at:])


def _split_heads(num_heads: int, head_dim: int) -> tuple[Transform, ...]:
    """Splits the heads of (E, H*D) and (H*D, E) kernels."""
    return (
        Reshape(rf"{_LAYER}{_ATTENTION}/(?:query|key|value)/kernel", (-1, num_heads, head_dim), require_match=False),
        Reshape(rf"{_LAYER}{_ATTENTION}/out/kernel", (num_heads, head_dim, -1), require_match=False),
    )


def _join_heads(num_heads: int, head_dim: int) -> tuple[Transform, ...]:
    joined = num_heads * head_dim
    return (
        Reshape(rf"{_LAYER}{_ATTENTION}/(?:query|key|value)/kernel", (-1, joined), require_match=False),
        Reshape(rf"{_LAYER}{_ATTENTION}/out/kernel", (joined, -1), require_match=False),
    )


def _stack(scan_axis: int) -> StackLayers:
    return StackLayers(rf"{_LAYER}(.*)", r"\1\2/\2/\4", scan_axis, require_match=False)


def _unstack(scan_axis: int) -> UnstackLayers:
    return UnstackLayers(rf"{_ROOT}{_TOWER}/\2/(.*)", r"\1\2/layers_{i}/\3", scan_axis, require_match=False)


def _bias_per_layer(scan_axis: int | None) -> RepeatPerLayer:
    """Gives each layer the tower's bias."""
    into = rf"\1\2/layers_{{i}}/{_BIAS}" if scan_axis is None else rf"\1\2/\2/{_BIAS}"
    layers = r"{1}{2}/layers_(\d+)/.*"
    return RepeatPerLayer(rf"{_ROOT}{_TOWER}/{_BIAS}", layers, into, scan_axis, rf"{{1}}{{2}}/{_BIAS}")


def bias_per_tower(kind: type[MergeEqualLayers] = MergeEqualLayers) -> MergeEqualLayers:
    """Merges the layers' equal biases, unless the target keeps them."""
    return kind(rf"{_LAYER}{_BIAS}", rf"\1\2/{_BIAS}", rf"{{1}}{{2}}/layers_0/{_BIAS}")


def _checked_heads(num_heads: Any, head_dim: Any) -> tuple[int, int]:
    heads, dim = operator.index(num_heads), operator.index(head_dim)
    if heads < 1 or dim < 1:
        raise ValueError(f"num_heads and head_dim are at least 1, not {num_heads} and {head_dim}")
    return heads, dim


def t5_minimal_to_scanned(
    num_heads: int, head_dim: int, *, scan_axis: int = 1, bias_per_layer: bool = False
) -> RulePack:
    """Maps T5X minimal T5 to scanned scalable T5.

    The shared relative bias is repeated for every layer. Backwards, biases become one only if all are equal
    (checked when they are read) and the target, T5X's or Hugging Face's, has one for the tower.

    Args:
      num_heads: H.
      head_dim: D; kernels are (E, H*D) in the minimal layout.
      scan_axis: the position of the layers' axis; T5X's `scan_axis`.
      bias_per_layer: True: the model's layers have biases of their own (umT5), which stay so backwards, without a
        target, too.

    Example:
      >>> layer = {"attention": {"query": {"kernel": np.ones((16, 16))}}}
      >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer, "layers_2": layer}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_minimal_to_scanned(num_heads=2, head_dim=8)(state, {}))
      {'target': {'encoder': {'encoder': {'attention': {'query': {'kernel': (16, 3, 2, 8)}}}}}}
    """
    heads, dim = _checked_heads(num_heads, head_dim)
    axis = operator.index(scan_axis)
    given = (("num_heads", heads), ("head_dim", dim), *_axis_argument(axis), *_bias_argument(bias_per_layer))
    merge = bias_per_tower(MergeAlone if bias_per_layer else MergeEqualLayers)
    return pack_of(
        PackCall("t5_minimal_to_scanned", given),
        _follow((_bias_per_layer(axis), *_split_heads(heads, dim), _stack(axis)), axis),
        _follow((_unstack(axis), *_join_heads(heads, dim), merge), axis),
        example=_MINIMAL_EXAMPLE,
        back_example=_SCANNED_EXAMPLE,
        _before=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _before_back=(HeadsCheck(rf"{_ROOT}{_TOWER}/\2/{_ATTENTION}", heads, dim, axis),),
        _leaves=t5x_table("T5X's minimal T5 with a scanned form", experts=False),
        _leaves_back=t5x_table("T5X's scanned T5", heads=("split",), scan_axis=axis, experts=False),
    )


def t5_minimal_to_unscanned(
    num_heads: int | None = None, head_dim: int | None = None, *, bias_per_layer: bool = False
) -> RulePack:
    """Maps T5X minimal T5 to unscanned scalable T5.

    Args:
      num_heads: H; without H and D heads stay as they are, and only biases change (Flaxformer).
      head_dim: D.
      bias_per_layer: see `t5_minimal_to_scanned`.

    Example:
      >>> state = {"target": {"encoder": {"layers_0": {"attention": {"query": {"kernel": np.ones((16, 16))}}}}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_minimal_to_unscanned(num_heads=2, head_dim=8)(state, {}))
      {'target': {'encoder': {'layers_0': {'attention': {'query': {'kernel': (16, 2, 8)}}}}}}
    """
    merge = bias_per_tower(MergeAlone if bias_per_layer else MergeEqualLayers)
    if num_heads is None and head_dim is None:
        known = t5x_table("", heads=("joined", "split"), transient_global=True).leaves
        leaves = LeafTable("T5X's unrolled T5", {**known, **fused_leaves()})
        return pack_of(
            PackCall("t5_minimal_to_unscanned", _bias_argument(bias_per_layer)),
            _follow((_bias_per_layer(None),), None),
            _follow((merge,), None),
            example=_MINIMAL_EXAMPLE,
            back_example=_MINIMAL_EXAMPLE,
            _leaves=leaves,
            _leaves_back=leaves,
        )
    heads, dim = _checked_heads(num_heads, head_dim)
    return pack_of(
        PackCall("t5_minimal_to_unscanned", (("num_heads", heads), ("head_dim", dim), *_bias_argument(bias_per_layer))),
        _follow((_bias_per_layer(None), *_split_heads(heads, dim)), None),
        _follow((*_join_heads(heads, dim), merge), None),
        example=_MINIMAL_EXAMPLE,
        back_example=_MINIMAL_EXAMPLE,
        _before=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _before_back=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _leaves=t5x_table("T5X's minimal T5", transient_global=True),
        _leaves_back=t5x_table("T5X's unscanned T5", heads=("split",), transient_global=True),
    )


def t5_unscanned_to_scanned(*, scan_axis: int = 1, subblocks: int | None = None) -> RulePack:
    """Maps unscanned scalable T5 of T5X to scanned: the layers stacked.

    Heads stay as they are: Flaxformer's are joined. A relative bias of the tower is repeated for every layer; backwards
    biases stay with their layers, unless the target has one for the tower.

    Args:
      scan_axis: the position of the layers' axis; T5X's `scan_axis`.
      subblocks: N: layer i is in `subblock_{i % N}`, as Flaxformer stacks layers that differ (every N-th has experts);
        None: all layers are alike.

    Example:
      >>> layer = {"mlp": {"wo": {"kernel": np.ones((8, 4))}}}
      >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_unscanned_to_scanned()(state, {}))
      {'target': {'encoder': {'encoder': {'mlp': {'wo': {'kernel': (8, 2, 4)}}}}}}
    """
    axis = operator.index(scan_axis)
    count = None if subblocks is None else operator.index(subblocks)
    if count is not None and count < 1:
        raise ValueError(f"subblocks is at least 1, not {subblocks}")
    stack: tuple[Transform, ...] = (_bias_per_layer(axis), _stack(axis))
    unstack: tuple[Transform, ...] = (_unstack(axis),)
    if count is not None:
        stack = (_bias_per_layer(None), *stack_subblocks(count, axis))
        unstack = unstack_subblocks(count, axis)
    return pack_of(
        PackCall(
            "t5_unscanned_to_scanned", (*_axis_argument(axis), *(() if count is None else (("subblocks", count),)))
        ),
        _follow_stacking(stack, axis),
        _follow_stacking((*unstack, bias_per_tower(MergeWhereWanted)), axis),
        example=_MINIMAL_EXAMPLE,
        back_example=_SCANNED_EXAMPLE if count is None else _SCANNED_EXAMPLE.replace("/att", "/subblock_0/att"),
        _leaves=t5x_table("T5X's unscanned T5", heads=("split", "joined"), experts=count is not None),
        _leaves_back=t5x_table(
            "T5X's scanned T5",
            heads=("split", "joined"),
            scan_axis=axis,
            subblocks=count is not None,
            experts=count is not None,
        ),
    )


def _axis_argument(axis: int) -> tuple[tuple[str, int], ...]:
    return () if axis == 1 else (("scan_axis", axis),)


def _bias_argument(bias_per_layer: bool) -> tuple[tuple[str, bool], ...]:
    return (("bias_per_layer", True),) if bias_per_layer else ()
