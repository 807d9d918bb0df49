"""One part of all missing names under another word is one problem; it is code only for abbreviations."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.testing.transform_suite import assert_same
from orbax_t5x.trees.flat import flatten
from tests.support.failed_plans import assert_cured, problems_of
from tests.support.memory_checkpoint import checkpoint

_NAMES = [f"{tree}/{tower}/layers_{i}/attention/kernel" for tree in "ab" for tower in ("decoder", "x") for i in (0, 1)]
_TARGET = {name: np.full((2, 3 + i), i, np.float32) for i, name in enumerate(_NAMES)}


def stored(old, new):
    return checkpoint({name.replace(old, new): array for name, array in _TARGET.items()})


@pytest.mark.parametrize(
    ("old", "new"), [("decoder", "dec"), ("attention", "attn"), ("decoder", "Decoder"), ("attention", "(attention)")]
)
def test_another_word_is_one_problem(old, new):
    """Below two trees, so that no single prefix does it."""
    plan, problem = assert_cured(stored(old, new), _TARGET)
    assert f"the target's names have {old!r}, the checkpoint's have {new!r}" in problem.message
    assert_same(flatten(plan.execute()), _TARGET)


@pytest.mark.parametrize(
    ("old", "new"), [("decoder", "encoder"), ("attention", "mlp"), ("attention", "self_attention"), ("x", "y.(z)")]
)
def test_words_of_other_meaning_are_advice(old, new):
    """Equal shapes do not show that two modules are one: there is nothing to paste."""
    (problem,) = problems_of(stored(old, new), _TARGET)
    assert repr(old) in problem.message and repr(new) in problem.message
    assert not problem.fix.transforms and "ot." not in str(problem.fix) and "[" not in str(problem.fix)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda name: name.replace("decoder", "mu"), "another quantity"),
        (lambda name: name.replace("layers_0", "layers_5"), "another number"),
    ],
)
def test_what_is_no_consistent_renaming_is_none(change, reason):
    source = checkpoint({change(name): array for name, array in _TARGET.items()})
    for problem in problems_of(source, {**_TARGET, "more": np.ones(9, np.float32)}):
        assert "names have" not in problem.message, reason


def test_two_words_that_fit_are_none():
    """Both towers of the checkpoint could be the target's one."""
    array = np.ones(2, np.float32)
    for word, towers in (("writer", ("wri", "writ")), ("decoder", ("deco", "decode")), ("decoder", ("dec", "deco"))):
        arrays = {f"{tree}/{tower}/{i}/w": array for tree in "ab" for tower in towers for i in (0, 1)}
        target = {f"{tree}/{word}/{i}/w": array for tree in "ab" for i in (0, 1)}
        assert not any("names have" in problem.message for problem in problems_of(checkpoint(arrays), target))


def test_several_abbreviations_are_one_problem():
    """Of words with other meanings there is nothing to say."""
    for words, is_known in (({"decoder": "dec", "attention": "attn"}, True), ({"decoder": "dec", "x": "y"}, False)):
        arrays = {"/".join(words.get(part, part) for part in name.split("/")): array for name, array in _TARGET.items()}
        if is_known:
            plan, problem = assert_cured(checkpoint(arrays), _TARGET)
            assert "names have 'decoder', 'attention', the checkpoint's have 'dec', 'attn'" in problem.message
            assert_same(flatten(plan.execute()), _TARGET)
        else:
            first, *_ = problems_of(checkpoint(arrays), _TARGET)
            assert "the checkpoint's have 'dec'" in first.message and "'y'" not in first.message


def test_an_optimizer_is_renamed_too():
    arrays = {f"{tree}/decoder/{i}/w": np.full(2, i, np.float32) for tree in ("target", "opt_state/mu") for i in (0, 1)}
    target = {name.replace("decoder", "dec"): array for name, array in arrays.items()}
    plan, _ = assert_cured(checkpoint(arrays), target)
    assert_same(flatten(plan.execute()), target)


def test_leaves_that_the_renaming_does_not_give_are_left():
    target = {name.replace("decoder", "dec"): array for name, array in _TARGET.items()}
    more = {"a/dec/layers_2/attention/kernel": np.ones(2, np.float32)}
    first, second = problems_of(checkpoint(_TARGET), target | more)
    assert isinstance(first.fix.transforms[0], ot.transforms.Rename) and second.kind == "missing"


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace("layers_", "block_"),
        lambda name: name.replace("layers_", "h."),
        lambda name: name.replace("/wi/", "/wi_0/"),
        lambda name: name.replace("/layers_0/", "/h_0/").replace("/layers_1/", "/h_1/"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_a_substitution_in_all_layers_is_one_rename(change, back):
    ours = {
        f"target/encoder/layers_{i}/mlp/{name}/kernel": np.full((2, 3), i, np.float32) for i in (0, 1) for name in "x"
    }
    ours.update({f"target/encoder/layers_{i}/mlp/wi/kernel": np.full((3, 2), i, np.float32) for i in (0, 1)})
    theirs = {change(name): value for name, value in ours.items()}
    stored_, target = (ours, theirs) if back else (theirs, ours)
    plan, problem = assert_cured(checkpoint(stored_), target)
    (rename,) = problem.fix.transforms
    assert isinstance(rename, ot.transforms.Rename) and len(rename.rules) == 1
    assert_same(flatten(plan.execute()), target)
