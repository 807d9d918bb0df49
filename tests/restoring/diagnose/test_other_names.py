"""A model under other names throughout is one problem, whose fix is advice to pass "auto"."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

PLAIN = t5_layouts.minimal()
WORDS = {"decoder": "dec", "encoder": "enc", "attention": "attn"}


def renamed(words):
    names = {name: "/".join(words.get(part, part) for part in name.split("/")) for name in PLAIN}
    return {f"model/{new.replace('layers_', 'layers/')}/value": PLAIN[old] for old, new in names.items()}


def test_a_model_of_other_names_is_one_problem():
    target = unflatten(renamed(WORDS))
    (problem,) = problems_of(checkpoint(PLAIN), target)
    assert problem.kind == "missing" and problem.leaf is None and "each one reading" in problem.message
    assert dict(problem.fix.arguments) == {"transforms": "auto"} and not problem.fix.transforms
    plan = ot.plan_restore(checkpoint(PLAIN), target, "auto")
    assert all(np.array_equal(plan_leaf, wanted) for plan_leaf, wanted in pairs(plan.execute(), renamed(WORDS)))
    text = str(plan)
    assert "Rules that \"auto\" found, as transforms to paste:\n  ot.transforms.Rename([('(.*)', '" in text
    assert eval(f"[{', '.join(plan.to_json()['found_rules'])}]", {"ot": ot}) == list(plan.found_rules)
    again = ot.plan_restore(checkpoint(PLAIN), target, plan.found_rules)
    assert again.found_rules == () and "auto" not in str(again)
    assert [entry.sources for entry in again.entries] == [entry.sources for entry in plan.entries]


def pairs(tree, flat):
    found = flatten(tree)
    return [(found[name], value) for name, value in flat.items()]


@pytest.mark.slow
def test_a_model_of_several_readings_and_one_with_rules_are_listed():
    target = unflatten(renamed({**WORDS, "query": "a", "key": "b"}))
    assert not any("one reading" in problem.message for problem in problems_of(checkpoint(PLAIN), target))
    rules = ot.transforms.Rename([("(.*)/nothing", r"\1")], require_match=False)
    found = problems_of(checkpoint(PLAIN), unflatten(renamed(WORDS)), rules)
    assert not any("one reading" in problem.message for problem in found)
