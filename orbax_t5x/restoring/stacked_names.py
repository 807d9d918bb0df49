"""Names of layers in models, numbered or stacked."""

from __future__ import annotations

import itertools
import re

# A container of layers that are one array for all of them.
_LAYERS = re.compile(r"(?i)(?:\w*_)?(?:layers?|blocks?|h|stack|scan[a-z]*|(?:en|de)coder_?blocks?)(?:_(?:stack|scan))?")
_LAYER = re.compile(r"(?i)(?:.*(?:layer|block)s?|blk|h)")


def is_layer_word(part: str) -> bool:
    """Tests if a name's part, without its number, means a layer."""
    return _LAYER.fullmatch(part) is not None


def stacked_part(name: str) -> str | None:
    """Returns a name up to an unnumbered layer part, or None."""
    parts = name.split("/")
    for at, (part, after) in enumerate(itertools.pairwise(parts)):
        if _LAYERS.fullmatch(part) is not None and not after.isdecimal():
            return "".join(f"{one}/" for one in parts[: at + 1])
        if part == after:
            return "".join(f"{one}/" for one in parts[: at + 2])
    return None
