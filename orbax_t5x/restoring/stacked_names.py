"""Names by which models call their layers, with a number for each or as one leaf for all of them."""

from __future__ import annotations

import itertools
import re

# A container of layers that are one array for all of them.
_LAYERS = re.compile(r"(?i)(?:\w*_)?(?:layers?|blocks?|h|stack|scan[a-z]*|(?:en|de)coder_?blocks?)(?:_(?:stack|scan))?")
_LAYER = re.compile(r"(?i)(?:.*(?:layer|block)s?|blk|h)")


def is_layer_word(part: str) -> bool:
    """Reports whether a part of a name, without the number at its end, is a word for a layer."""
    return _LAYER.fullmatch(part) is not None


def stacked_part(name: str) -> str | None:
    """Returns the beginning of a name up to a part for layers without a number, or None: one dimension may count them.

    Flaxformer and T5X repeat the name of the tower: `decoder/decoder`.
    """
    parts = name.split("/")
    for at, (part, after) in enumerate(itertools.pairwise(parts)):
        if _LAYERS.fullmatch(part) is not None and not after.isdecimal():
            return "".join(f"{one}/" for one in parts[: at + 1])
        if part == after:
            return "".join(f"{one}/" for one in parts[: at + 2])
    return None
