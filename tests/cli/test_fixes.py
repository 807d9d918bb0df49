"""Fixes are rendered from their data: other words for all messages change no option and no keyword."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.fixes import fix_text
from orbax_t5x.errors import Fix, RestorePlanError
from orbax_t5x.operations.start.advice import with_init_fn

BUNDLE = Path(__file__).parents[1] / "goldens" / "tf_bundle" / "t5_1_1_f32"

# For each constructor of a fix: one, and what the command line makes of its data.
FIXES = {
    "setting": (Fix.setting("pass {} to leave them unread", strict=False), "--no-strict"),
    "adding": (Fix.adding(ot.rules.t5_minimal_to_unscanned(6, 8)), "--rules t5_minimal_to_unscanned:num_heads=6,"),
    "writing": (Fix.writing("a", "b"), '["a", "b"]'),
    "removing": (Fix.removing(ot.transforms.Translate(), "there"), "--no-translate"),
    "in_program": (Fix.in_program("call it"), "in Python, "),
    "by_target": (Fix.by_target("build another model"), "choose another --target"),
    "any_of": (Fix.any_of(Fix.setting("give {} values", fallback=...), Fix.setting("{}", item="a")), "--item a"),
}  # fmt: skip


def reworded(fix):
    """The same data in other words."""
    return dataclasses.replace(
        fix,
        text="lorem ipsum",
        words="dolor {} sit" if fix.words else "",
        alternatives=tuple(map(reworded, fix.alternatives)),
    )


def test_every_constructor_is_here():
    assert {name for name, member in vars(Fix).items() if isinstance(member, classmethod)} == FIXES.keys()


@pytest.mark.parametrize("name", FIXES)
def test_options_come_from_the_data(name):
    fix, option = FIXES[name]
    assert option in fix_text(fix) and option in fix_text(reworded(fix))
    data, other = fix.as_data(), reworded(fix).as_data()
    assert all(other[key] == data[key] for key in ("transforms", "arguments"))
    assert pickle.loads(pickle.dumps(fix)) == fix and hash(fix) == hash(pickle.loads(pickle.dumps(fix)))


@pytest.mark.parametrize("fallback", [Fix.setting("give {} values", fallback=...), FIXES["any_of"][0]])
def test_a_start_names_its_own_keyword(fallback):
    problem = ot.errors.Problem("missing", "a", "lorem ipsum", reworded(fallback))
    (found,) = with_init_fn(RestorePlanError([problem])).problems
    assert "init_fn=" in str(found.fix) and "fallback" not in str(found.fix)
    assert found.fix is not None and dict(found.fix.arguments) == {"init_fn": ...}


def test_problems_of_a_plan_give_options_whatever_the_words_are():
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(BUNDLE, {"target": {"token_embedder": {"embedding": np.zeros(3, np.float16)}, "x": 0.0}})
    problems = [one for one in caught.value.problems if one.fix is not None]
    reworded_problems = [dataclasses.replace(one, message="x", fix=reworded(one.fix)) for one in problems]
    text = RestorePlanError(reworded_problems).described(fix_text, width=200)
    assert "pass --translate" in text and "--no-strict" in text and "strict=" not in text
