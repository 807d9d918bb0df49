"""Packs of names alone, made of a table of leaves: both ways, below prefixes, and with the scales of float8."""

import pytest

from orbax_t5x import rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.rules.renaming import RenamedLeaf, renaming_pack

PACK = renaming_pack(
    "wan_t5_to_hf_t5",
    "a layout",
    (RenamedLeaf("blocks.*.in.weight", "block.*.wi.weight", "FE"), RenamedLeaf("top.weight", "shared.weight", "VE")),
    forwards_only=(RenamedLeaf("copy.weight", "other.weight", "VE"),),
)


def test_each_layer_keeps_its_number():
    ours = {"blocks.0.in.weight": 1, "blocks.11.in.weight": 2, "top.weight": 3}
    theirs = {"block.0.wi.weight": 1, "block.11.wi.weight": 2, "shared.weight": 3}
    assert PACK(ours, {}) == theirs
    assert PACK.inverse()(theirs, {}) == ours


def test_names_may_be_below_a_prefix():
    assert PACK({"a.b.blocks.3.in.weight": 1, "a.b.top.weight": 2}, {}) == {"block.3.wi.weight": 1, "shared.weight": 2}


def test_names_of_one_way_are_no_names_of_the_other():
    assert PACK({"top.weight": 1, "copy.weight": 2}, {}) == {"shared.weight": 1, "other.weight": 2}
    with pytest.raises(RestorePlanError, match=r"other\.weight"):
        PACK.inverse()({"shared.weight": 1, "other.weight": 2}, {})


def test_dots_of_names_are_dots():
    with pytest.raises(RestorePlanError, match="blocksX0"):
        PACK({"blocksX0.in.weight": 1, "top.weight": 2}, {})


def test_packs_made_of_tables_have_an_inverse():
    for pack in (rules.wan_t5_to_hf_t5(), rules.pix2struct_decoder_to_hf_t5()):
        assert pack.inverse().inverse() == pack
