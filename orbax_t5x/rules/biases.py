"""Finds the relative biases of a tower in a tree: one for all layers, or one for each, under any program's names."""

from __future__ import annotations

import re
from collections.abc import Iterable

# With the tower filled in; the group is the layer's number.
_NAMES = (
    r"(?:.*[./])?{tower}[./]block[./](\d+)[./].*[./]relative_attention_bias[./].*",
    r"{tower}\.layer\.(\d+)\.self_attention\.attention\.relative_attention_bias\.weight",
    r"{short}\.blk\.(\d+)\.attn_rel_b\.weight",
)
# Wan's models have an encoder only.
_ENCODER_NAMES = (r"(?:.*?\.)??(?:blocks\.(\d+)\.)?pos_embedding\.embedding\.weight",)
_STACKED = r"(?:.*/)?{tower}/{tower}/(?:subblock_\d+/)?relpos_bias/rel_embedding"


def has_bias_per_layer(names: Iterable[str], tower: str) -> bool:
    """Reports whether names of another program, or of stacked layers, have a bias for more than the first layer."""
    return any(number not in (None, 0) for number in _bias_layers(names, tower))


def has_bias_of_tower(names: Iterable[str], tower: str) -> bool:
    """Reports whether names of another program have a bias of a tower, which is the first layer's or nobody's."""
    found = _bias_layers(names, tower)
    return bool(found) and found <= {None, 0}


def _bias_layers(names: Iterable[str], tower: str) -> set[int | None]:
    """Returns the layers that have a bias; None for a bias of no layer, -1 for stacked layers'."""
    texts = [*_NAMES, *(_ENCODER_NAMES if tower == "encoder" else ())]
    named = "|".join(texts).format(tower=tower, short=tower[:3])
    regex = re.compile(f"(?P<stacked>{_STACKED.format(tower=tower)})|{named}")
    found: set[int | None] = set()
    for name in names:
        match = regex.fullmatch(name)
        if match is not None:
            numbers = [int(group) for group in match.groups()[1:] if group is not None]
            found.add(-1 if match["stacked"] else numbers[0] if numbers else None)
    return found
