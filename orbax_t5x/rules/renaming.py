"""Packs between other programs' PyTorch names and Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from orbax_t5x.rules.leaf_table import LeafTable
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.scaled_fp8 import with_scales
from orbax_t5x.rules.steps import WithoutPrefix
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.dequantize import NOTES, SCALES, WEIGHT
from orbax_t5x.transforms.names import Rename

_KINDS = "|".join(end[1:] for end in (WEIGHT, *SCALES, *NOTES))


class RenamedLeaf(NamedTuple):
    """Leaf of both layouts, with `*` for the number of its layer.

    Attributes:
      ours: its name, which ends in `weight`.
      theirs: Hugging Face's name.
      dimensions: see `leaf_table`.
    """

    ours: str
    theirs: str
    dimensions: str


def renaming_pack(
    function: str,
    layout: str,
    leaves: Sequence[RenamedLeaf],
    *,
    forwards_only: Sequence[RenamedLeaf] = (),
    back_first: Sequence[Transform] = (),
    back_last: Sequence[Transform] = (),
    extra_names: Sequence[RenamedLeaf] = (),
) -> RulePack:
    """Makes a pack from other names to Hugging Face's, with its inverse.

    Names may be below a prefix, and weights in float8 may have scales beside them.

    Args:
      function: its name in `orbax_t5x.rules`, without arguments.
      layout: for people.
      leaves: of the layout.
      forwards_only: leaves that have another name on the way back.
      back_first: transforms before the renaming back, on Hugging Face's names.
      back_last: transforms after it.
      extra_names: leaves that the way back takes, for `back_first`.
    """
    ours = {leaf.ours: (leaf.dimensions,) for leaf in (*leaves, *forwards_only)}
    theirs = {leaf.theirs: (leaf.dimensions,) for leaf in (*leaves, *extra_names)}
    table = LeafTable(layout, with_scales(ours), has_dots=True)
    table_back = LeafTable(f"{layout}, by Hugging Face's names,", with_scales(theirs), has_dots=True)
    return pack_of(
        PackCall(function),
        (_rename_weights([(leaf.ours, leaf.theirs) for leaf in (*leaves, *forwards_only)]),),
        (*back_first, _rename_weights([(leaf.theirs, leaf.ours) for leaf in leaves]), *back_last),
        example=next(leaf.ours for leaf in leaves if "*" in leaf.ours).replace("*", "0"),
        back_example=next(leaf.theirs for leaf in leaves if "*" in leaf.theirs).replace("*", "0"),
        _before=(WithoutPrefix(table),),
        _before_back=(WithoutPrefix(table_back),),
        _leaves=table,
        _leaves_back=table_back,
    )


def _rename_weights(pairs: Sequence[tuple[str, str]]) -> Rename:
    """Makes renaming rules; scales follow their weights."""
    rules: list[tuple[str, str]] = []
    for old, new in pairs:
        pattern = re.escape(old.removesuffix("weight")).replace(r"\*", r"(?P<i>\d+)")
        replacement = new.removesuffix("weight").replace("*", r"\g<i>")
        rules.append((rf"{pattern}(?P<kind>{_KINDS})", rf"{replacement}\g<kind>"))
    return Rename(tuple(rules), require_match=False)
