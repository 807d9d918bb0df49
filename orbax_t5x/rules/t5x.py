r"""Rule packs between T5X's layouts of one T5: minimal, scalable (unscanned) and scanned, by C-order reshapes.

Minimal: `encoder/layers_3/attention/query/kernel` (E, H*D), one relative bias per tower. Scalable: (E, H, D), a bias
in every layer. Scanned: `encoder/encoder/attention/query/kernel` (E, L, H, D), all layers on one axis. Encoder and
decoder may differ in depth; either may be missing. Names may be below `target/`, `params/` or any other prefix; the
optimizer's leaves follow.
"""

from __future__ import annotations

import operator

from orbax_t5x.rules.leaf_table import t5x_table
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.steps import HeadsCheck, MergeEqualLayers, RepeatPerLayer
from orbax_t5x.transforms.arrays import Reshape
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.chain import Chain
from orbax_t5x.transforms.follow.optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers

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


def _follow(steps: tuple[Transform, ...], scan_axis: int | None) -> tuple[Transform, ...]:
    factors: list[tuple[str, tuple[str, ...]]] = [(pattern, parts) for pattern, parts in _FACTORS if len(parts) > 2]
    if scan_axis is not None:
        for pattern, parts in _FACTORS:
            # Below zero the axis counts from the end of the stacked shape.
            at = scan_axis if scan_axis >= 0 else scan_axis + len(parts) + 1
            factors.append((pattern, (*parts[:at], "BATCH", *parts[at:])))
    return (FollowOptimizer(Chain(steps), tuple(factors)),)


def _split_heads(num_heads: int, head_dim: int) -> tuple[Transform, ...]:
    """Reshapes (E, H*D) kernels to (E, H, D), and (H*D, E) ones to (H, D, E)."""
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
    """Gives each layer the tower's bias, on the layers' axis or under a name per layer."""
    into = rf"\1\2/layers_{{i}}/{_BIAS}" if scan_axis is None else rf"\1\2/\2/{_BIAS}"
    layers = r"{1}{2}/layers_(\d+)/.*"
    return RepeatPerLayer(rf"{_ROOT}{_TOWER}/{_BIAS}", layers, into, scan_axis, rf"{{1}}{{2}}/{_BIAS}")


def _bias_per_tower() -> MergeEqualLayers:
    """Makes the tower's bias of the layers' equal ones, unless the target has one per layer."""
    return MergeEqualLayers(rf"{_LAYER}{_BIAS}", rf"\1\2/{_BIAS}", rf"{{1}}{{2}}/layers_0/{_BIAS}")


def _checked_heads(num_heads: int, head_dim: int) -> tuple[int, int]:
    heads, dim = operator.index(num_heads), operator.index(head_dim)
    if heads < 1 or dim < 1:
        raise ValueError(f"num_heads and head_dim are at least 1, not {num_heads} and {head_dim}")
    return heads, dim


def t5_minimal_to_scanned(num_heads: int, head_dim: int, *, scan_axis: int = 1) -> RulePack:
    """Maps T5X minimal T5 to scanned scalable T5.

    The shared relative bias is repeated for every layer. Backwards, biases become one only if all are equal
    (checked when they are read) and the target has one for the tower.

    Args:
      num_heads: H.
      head_dim: D; kernels are (E, H*D) in the minimal layout.
      scan_axis: the position of the layers' axis; T5X's `scan_axis`.

    Example:
      >>> layer = {"attention": {"query": {"kernel": np.ones((16, 16))}}}
      >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer, "layers_2": layer}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_minimal_to_scanned(num_heads=2, head_dim=8)(state, {}))
      {'target': {'encoder': {'encoder': {'attention': {'query': {'kernel': (16, 3, 2, 8)}}}}}}
    """
    heads, dim = _checked_heads(num_heads, head_dim)
    axis = operator.index(scan_axis)
    return pack_of(
        PackCall("t5_minimal_to_scanned", (("num_heads", heads), ("head_dim", dim), *_axis_argument(axis))),
        _follow((_bias_per_layer(axis), *_split_heads(heads, dim), _stack(axis)), axis),
        _follow((_unstack(axis), *_join_heads(heads, dim), _bias_per_tower()), axis),
        example=_MINIMAL_EXAMPLE,
        back_example=_SCANNED_EXAMPLE,
        _before=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _before_back=(HeadsCheck(rf"{_ROOT}{_TOWER}/\2/{_ATTENTION}", heads, dim, axis),),
        _leaves=t5x_table("T5X's minimal T5"),
        _leaves_back=t5x_table("T5X's scanned T5", heads=("split",), scan_axis=axis),
    )


def t5_minimal_to_unscanned(num_heads: int, head_dim: int) -> RulePack:
    """Maps T5X minimal T5 to unscanned scalable T5: split heads, and the relative bias in every layer.

    Args:
      num_heads: H.
      head_dim: D.

    Example:
      >>> state = {"target": {"encoder": {"layers_0": {"attention": {"query": {"kernel": np.ones((16, 16))}}}}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_minimal_to_unscanned(num_heads=2, head_dim=8)(state, {}))
      {'target': {'encoder': {'layers_0': {'attention': {'query': {'kernel': (16, 2, 8)}}}}}}
    """
    heads, dim = _checked_heads(num_heads, head_dim)
    return pack_of(
        PackCall("t5_minimal_to_unscanned", (("num_heads", heads), ("head_dim", dim))),
        _follow((_bias_per_layer(None), *_split_heads(heads, dim)), None),
        _follow((*_join_heads(heads, dim), _bias_per_tower()), None),
        example=_MINIMAL_EXAMPLE,
        back_example=_MINIMAL_EXAMPLE,
        _before=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _before_back=(HeadsCheck(_LAYER + _ATTENTION, heads, dim),),
        _leaves=t5x_table("T5X's minimal T5"),
        _leaves_back=t5x_table("T5X's unscanned T5", heads=("split",)),
    )


def t5_unscanned_to_scanned(*, scan_axis: int = 1) -> RulePack:
    """Maps unscanned scalable T5 of T5X to scanned: the layers stacked.

    Args:
      scan_axis: the position of the layers' axis; T5X's `scan_axis`.

    Example:
      >>> layer = {"mlp": {"wo": {"kernel": np.ones((8, 4))}}}
      >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer}}}
      >>> jax.tree.map(np.shape, ot.rules.t5_unscanned_to_scanned()(state, {}))
      {'target': {'encoder': {'encoder': {'mlp': {'wo': {'kernel': (8, 2, 4)}}}}}}
    """
    axis = operator.index(scan_axis)
    return pack_of(
        PackCall("t5_unscanned_to_scanned", _axis_argument(axis)),
        _follow((_stack(axis),), axis),
        _follow((_unstack(axis),), axis),
        example=_MINIMAL_EXAMPLE,
        back_example=_SCANNED_EXAMPLE,
        # Flaxformer joins the heads.
        _leaves=t5x_table("T5X's unscanned T5", heads=("split", "joined")),
        _leaves_back=t5x_table("T5X's scanned T5", heads=("split", "joined"), scan_axis=axis),
    )


def _axis_argument(axis: int) -> tuple[tuple[str, int], ...]:
    return () if axis == 1 else (("scan_axis", axis),)
