"""Where only shapes agree nothing can be pasted, whatever hypothesis explains the leaves."""

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.restoring.diagnose.explain import EXPLANATIONS, REMEDIES
from orbax_t5x.restoring.diagnose.other_shapes import is_layer_word
from tests.support.failed_plans import unmatched_of
from tests.support.memory_checkpoint import checkpoint

_SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3).map(tuple)
# Half of the alphabet for each side: no word of one is a word, or a misspelt or shortened one, of the other.
_LETTERS = "acegikmoqsuwy", "bdfhjlnprtvxz"
# Words that both sides may have, which say nothing of the module that they belong to.
_COMMON = ["kernel", "bias", "scale", "weight", "embedding", "layers", "params", "target", "0", "1"]


def names(letters, last):
    words = st.text(letters, min_size=3, max_size=7)
    numbered = st.tuples(words, st.sampled_from(["", "", "_0", "_1", "/0", "/1"])).map("".join)
    return st.tuples(st.lists(numbered, min_size=1, max_size=3).map("/".join), last).map("/".join)


@st.composite
def trees(draw, common):
    """Two trees of other names and the same shapes; with `common` the last parts are equal."""
    shapes = draw(st.lists(_SHAPES, min_size=1, max_size=6))
    lasts = draw(st.lists(st.sampled_from(_COMMON[:5]), min_size=len(shapes), max_size=len(shapes)))
    sides = []
    for letters in _LETTERS:
        prefix = draw(st.sampled_from(["", "params/", "target/", "model/"]))
        tree = {}
        for shape, last in zip(shapes, lasts, strict=True):
            own = st.just(last) if common else st.text(letters, min_size=4, max_size=6)
            name = prefix + draw(names(letters, own).filter(lambda name, tree=tree: not is_used(name, tree)))
            tree[name] = np.zeros(shape, np.float32)
        sides.append(tree)
    return sides


def is_used(name, tree):
    return any(f"{other}/".startswith(f"{name}/") or f"{name}/".startswith(f"{other}/") for other in tree)


def assert_nothing_to_paste(source, target):
    try:
        ot.plan_restore(checkpoint(source), target)
    except ot.RestorePlanError as error:
        for problem in error.problems:
            for way in () if problem.fix is None else problem.fix.ways:
                assert not way.transforms and way.rule is None and "transforms=" not in str(way), problem
                assert "transforms" not in way.arguments, problem
    unmatched = unmatched_of(checkpoint(source).leaves, target)
    for hypothesis in REMEDIES:
        assert all(remedy.advice is not None for remedy in hypothesis(unmatched)), hypothesis
    for hypothesis in EXPLANATIONS:
        for one in hypothesis(unmatched):
            assert one.problem.fix is None or not any(way.transforms for way in one.problem.fix.ways), hypothesis


@pytest.mark.slow
@given(trees(common=False))
@settings(max_examples=settings.default.max_examples // 5, deadline=None)
def test_names_that_share_nothing(sides):
    assert_nothing_to_paste(*sides)


@pytest.mark.slow
@given(trees(common=True))
@settings(max_examples=settings.default.max_examples // 5, deadline=None)
def test_names_that_share_the_kind_of_a_leaf(sides):
    assert_nothing_to_paste(*sides)


@st.composite
def one_tree_twice(draw):
    """The same module below two names, with the same names in it: `encoder` for `decoder`."""
    inside = draw(
        st.lists(names(string.ascii_lowercase, st.sampled_from(_COMMON[:5])), min_size=2, max_size=4, unique=True)
    )
    arrays = {name: np.zeros(draw(_SHAPES), np.float32) for name in inside if not is_used(name, set(inside) - {name})}
    return [
        {f"{draw(st.text(letters, min_size=3, max_size=7).filter(lambda word: not is_layer_word(word)))}/": arrays}
        for letters in _LETTERS
    ]


@pytest.mark.slow
@given(one_tree_twice())
@settings(max_examples=settings.default.max_examples // 5, deadline=None)
def test_two_modules_with_the_same_leaves(sides):
    source, target = (
        {below + name: array for name, array in tree.items()} for side in sides for below, tree in side.items()
    )
    assert_nothing_to_paste(source, target)
