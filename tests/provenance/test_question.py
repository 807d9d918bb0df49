"""The decisions for several items are one decision, or a problem that names `item=`."""

import pytest

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.question import Decision, ResumeContext, combine_decisions

SWAP = ot.transforms.Rename([("x", "y"), ("y", "x")])
CONTEXT = ResumeContext(record_rules([SWAP]), "restore", None, False, "/here", "orbax")
ENTRY = CONTEXT.entry(CONTEXT.chain)
APPLIED, TO_APPLY = Decision(True, (ENTRY,)), Decision(False, (ENTRY,), unmatched=())


def test_equal_decisions_are_one():
    assert combine_decisions({"a": APPLIED}) is APPLIED
    other = Decision(True, (CONTEXT.entry(CONTEXT.chain, continues=True),), warnings=("twice",), note="told")
    both = combine_decisions({"a": APPLIED, "b": other, "c": other})
    assert both.is_resuming and both.lineage == (ENTRY, *other.lineage)
    assert (both.warnings, both.note, both.unmatched) == (("twice",), "told", None)
    assert combine_decisions({"a": TO_APPLY, "b": TO_APPLY}).unmatched == ()


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (APPLIED, TO_APPLY, ("applied already", "to be applied")),
        (TO_APPLY, Decision(False, (), problem=("unknown", ot.errors.Fix("ask"))), ("to be applied", "not decided")),
        # As many of them, and not the same.
        (Decision(False, (), skipped=(0,)), Decision(False, (), skipped=(1,)), ("1 of them applied already",) * 2),
    ],
)
def test_decisions_that_differ_name_item(one, other, texts):
    what, fix = combine_decisions({"a": one, "b": other}).problem
    assert "item=" in str(fix) and f"'a': {texts[0]}; 'b': {texts[1]}" in what
