"""Blocks of Mesh TensorFlow that hold several of T5X's layers.

Models with experts in every second layer have them. A block's sublayers are what its gin file lists. T5's are
self-attention, in a decoder cross-attention, and the feed-forward layer; a list of twice these makes one block of two
layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SUBLAYER = re.compile(r"(?P<tower>encoder|decoder|transformer)/block_(?P<block>\d+)/layer_(?P<layer>\d+)/(?P<rest>.*)")
_FEED_FORWARD = frozenset({"DenseReluDense", "MoE1D"})
# The modules that a layer of T5X has in order, by tower.
_CYCLES = {
    "encoder": ({"SelfAttention"}, _FEED_FORWARD),
    "decoder": ({"SelfAttention"}, {"EncDecAttention"}, _FEED_FORWARD),
    "transformer": ({"SelfAttention"}, _FEED_FORWARD),
}
_MODULES = frozenset().union(*_CYCLES["decoder"])


def one_layer_blocks(names: Iterable[str]) -> dict[str, str]:
    """Maps names in long blocks to names in blocks of a layer.

    Empty if all blocks have a single layer.
    """
    found = [match for name in names if (match := _SUBLAYER.fullmatch(name))]
    renames: dict[str, str] = {}
    for tower, cycle in _CYCLES.items():
        own = [match for match in found if match["tower"] == tower]
        count = max((int(match["layer"]) for match in own), default=-1) + 1
        layers, rest = divmod(count, len(cycle))
        if layers < 2 or rest or not all(_is_in_cycle(match, cycle) for match in own):
            continue
        for match in own:
            layer, sublayer = divmod(int(match["layer"]), len(cycle))
            block = int(match["block"]) * layers + layer
            renames[match.string] = f"{tower}/block_{block:03}/layer_{sublayer:03}/{match['rest']}"
    return renames


def _is_in_cycle(match: re.Match[str], cycle: tuple[Iterable[str], ...]) -> bool:
    """Tests if T5X's layer has this module at that place.

    Norms are everywhere.
    """
    module = match["rest"].partition("/")[0]
    return module not in _MODULES or module in cycle[int(match["layer"]) % len(cycle)]
