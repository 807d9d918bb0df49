"""Every transform equals its oracle on generated trees and rules, and rule tables equal trying rules one by one."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support import transform_oracle as oracle

_EXAMPLES = settings.default.max_examples // 4

PARTS = st.sampled_from(["a", "b", "ab", "w", "layers_0", "layers_1", "layers_2", "layers_10", "0", "1"])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


# -- transforms on generated trees


@st.composite
def trees(draw, names=NAMES, shapes=None):
    chosen = draw(st.lists(names, min_size=0, max_size=8, unique=True))
    # No name runs through another: this is about transforms, not about nesting.
    chosen = [name for name in chosen if not any(name.startswith(other + "/") for other in chosen)]
    if shapes is None:
        shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=3).map(tuple)
    dtypes = st.sampled_from([np.float32, np.float32, np.int32])
    return {
        name: np.arange(seed, seed + int(np.prod(shape)), dtype=draw(dtypes)).reshape(shape)
        for seed, (name, shape) in enumerate((name, draw(shapes)) for name in chosen)
    }


NAME_PATTERNS = st.one_of(
    NAMES,
    st.sampled_from(
        [
            r"(.*)/(.*)",
            r"a/(.*)",
            r"(a|b)",
            r"(.*)w",
            r"(a)/(b|w)?.*",
            r"layers_(\d+)(.*)",
            r"([^/]*)()",
            ".*",
            r"(ab?)(.*)",
        ]
    ),
)
REPLACEMENTS = st.sampled_from(["n", r"n/\1", r"\1", r"\2/\1", r"\1/\2", "a", "b", "a/w", r"\1x", None])
RULES = st.lists(st.tuples(NAME_PATTERNS, REPLACEMENTS), max_size=4)


def check(transform, source, oracle_result, target=None):
    """The transform's answer is the oracle's, or both find something wrong of the same kind."""
    try:
        expected = oracle_result()
    except oracle.Wrong as wrong:
        _, diagnostics = run(transform, source, target)
        assert str(wrong) in {problem.kind for problem in diagnostics.problems}
    else:
        result, diagnostics = run(transform, source, target)
        assert diagnostics.problems == []
        assert_same(result, expected)


@pytest.mark.slow
@settings(max_examples=2 * _EXAMPLES)
@given(trees(), st.lists(NAMES, unique=True, max_size=6), RULES, st.booleans())
def test_assignment_map(source, target, rules, require):
    wanted = dict.fromkeys(target)
    check(
        tr.AssignmentMap(rules, require), source, lambda: oracle.assignment_map(source, wanted, rules, require), wanted
    )


@pytest.mark.slow
@settings(max_examples=2 * _EXAMPLES)
@given(trees(), st.lists(NAMES, unique=True, max_size=4), st.data())
def test_assignment_map_between_names_that_are_there(source, more, data):
    """Swaps, rotations, one source for several, leaves left out: rules of names alone."""
    wanted = dict.fromkeys([*source, *more])
    taken = st.sampled_from([*source, None]) if source else st.none()
    rules = [(re.escape(name), data.draw(taken)) for name in wanted if data.draw(st.booleans())]
    check(tr.AssignmentMap(rules), source, lambda: oracle.assignment_map(source, wanted, rules), wanted)


@pytest.mark.slow
@settings(max_examples=2 * _EXAMPLES)
@given(trees(), RULES)
def test_rename(source, rules):
    check(tr.Rename(rules), source, lambda: oracle.rename(source, rules))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), st.lists(NAME_PATTERNS, min_size=1, max_size=3))
def test_drop_and_keep(source, chosen):
    check(tr.Drop(chosen), source, lambda: oracle.drop(source, chosen))
    check(tr.Keep(chosen), source, lambda: oracle.keep(source, chosen))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), trees(), st.booleans())
def test_intersect_and_merge(source, other, overwrite):
    check(tr.Intersect(), source, lambda: oracle.intersect(source, other), other)
    check(tr.Merge(other, overwrite), source, lambda: oracle.merge(source, other, overwrite))


LAYER_NAMES = st.builds(
    "{}/layers_{}/{}".format, st.sampled_from(["e", "d"]), st.sampled_from([0, 0, 1, 1, 2, "01"]), st.sampled_from("wb")
)


@pytest.mark.slow
@settings(max_examples=2 * _EXAMPLES)
@given(
    trees(
        st.one_of(LAYER_NAMES, LAYER_NAMES, LAYER_NAMES, st.just("norm")), st.sampled_from([(2,), (2,), (2,), (3, 2)])
    ),
    st.integers(-3, 2),
    st.sampled_from([r"\1/layers/\3", r"\1/\1/\3", r"x/\3"]),
)
def test_stack_layers(source, axis, into):
    pattern = r"(e|d)/layers_(?P<i>\d+)/(.*)"
    check(tr.StackLayers(pattern, into, axis), source, lambda: oracle.stack_layers(source, pattern, into, axis))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(
    st.dictionaries(st.sampled_from(["e", "d"]), st.integers(0, 3), min_size=1),
    st.lists(st.sampled_from(["w", "b", "m/k"]), min_size=1, unique=True),
    st.integers(0, 2),
)
def test_stacked_layers_come_apart_again(depths, leaves, axis):
    source = {
        f"{tower}/layers_{i}/{leaf}": np.arange(6).reshape(2, 3) + 10 * i
        for tower, depth in depths.items()
        for i in range(depth)
        for leaf in leaves
    }
    stack = tr.StackLayers(r"(.)/layers_(\d+)/(.*)", r"\1/\1/\3", axis, require_match=False)
    unstack = tr.UnstackLayers(r"(.)/\1/(.*)", r"\1/layers_{i}/\2", axis, require_match=False)
    stacked, diagnostics = run(stack, source)
    assert diagnostics.problems == []
    assert_same(run(unstack, stacked)[0], source)


AXES = st.integers(-2, 2)


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), NAME_PATTERNS, AXES)
def test_unstack_layers(source, pattern, axis):
    into = r"u/{i}/\g<0>"
    check(tr.UnstackLayers(pattern, into, axis), source, lambda: oracle.unstack_layers(source, pattern, into, axis))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), NAME_PATTERNS, AXES, st.sampled_from([None, (1, 1), (0, 2), (2, 1), (1, 3)]))
def test_split(source, pattern, axis, sizes):
    into = [r"s/\g<0>", r"t/\g<0>"]
    check(tr.Split(pattern, into, axis, sizes), source, lambda: oracle.split(source, pattern, into, axis, sizes))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(
    trees(NAMES, st.sampled_from([(2, 3), (2, 3), (1, 3)])),
    st.lists(
        st.sampled_from([r"a(.*)", r"b(.*)", r"(.*)w", r"layers_0(.*)", "ab()"]), min_size=1, max_size=2, unique=True
    ),
    AXES,
    st.sampled_from([r"c\1", "c"]),
)
def test_concat(source, chosen, axis, into):
    check(tr.Concat(chosen, into, axis), source, lambda: oracle.concat(source, chosen, into, axis))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), NAME_PATTERNS, AXES, st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 6]), max_size=3))
def test_transforms_of_one_leaf(source, pattern, axis, shape):
    check(tr.Reshape(pattern, shape), source, lambda: oracle.each(source, pattern, lambda v: v.reshape(shape)))
    check(tr.Transpose(pattern), source, lambda: oracle.each(source, pattern, np.transpose))
    check(tr.Transpose(pattern, (1, 0)), source, lambda: oracle.each(source, pattern, lambda v: v.transpose(1, 0)))
    check(tr.Cast(pattern, "int8"), source, lambda: oracle.each(source, pattern, lambda v: v.astype(np.int8)))
    check(
        tr.Repeat(pattern, 2, axis),
        source,
        lambda: oracle.each(source, pattern, lambda v: np.repeat(np.expand_dims(v, axis), 2, axis)),
    )


SIZES = st.lists(st.sampled_from([None, 0, 1, 2, 3, 5]), max_size=3)
INDICES = st.lists(
    st.sampled_from([0, -1, 2, None, slice(None), slice(1, None), slice(None, None, -1), slice(-1, 0, -2)])
)


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(trees(), NAME_PATTERNS, SIZES, st.sampled_from([0, 3]), INDICES)
def test_pad_and_slice(source, pattern, shape, value, index):
    def padded(array):
        return oracle.padded(array, shape, value)

    def part(array):
        try:
            return np.asarray(array[tuple(index)])
        except IndexError:
            raise ValueError from None

    check(tr.Pad(pattern, shape, value), source, lambda: oracle.each(source, pattern, padded))
    check(tr.Slice(pattern, tuple(index)), source, lambda: oracle.each(source, pattern, part))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(
    trees(
        st.builds("{}/{}".format, st.sampled_from("xy"), st.sampled_from(["kernel", "a", "b"])),
        st.sampled_from([(2, 3), (2, 1), (1, 3), (2, 1), (1, 3), (2, 0), (0, 3), (1, 3, 2), (2, 3, 2), (3,)]),
    ),
    st.sampled_from([r"(.)/kernel", r"(x)/kernel", "z"]),
    st.sampled_from([1, -0.5]),
)
def test_add_low_rank(source, pattern, scale):
    check(
        tr.AddLowRank(pattern, r"\1/a", r"\1/b", scale),
        source,
        lambda: oracle.add_low_rank(source, pattern, r"\1/a", r"\1/b", scale),
    )


@pytest.mark.slow
@settings(max_examples=_EXAMPLES)
@given(
    trees(st.builds("{}/{}".format, st.sampled_from("xyz"), st.sampled_from(["w", "b", "m/w"])), st.just((2,))),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from([1.0, 0.5, 2.0, 3.0]), min_size=1),
    st.sampled_from([".*", "w", "./w", "(./)?m/w"]),
)
def test_average_and_overlay(source, weights, pattern):
    weights = {name: weight for name, weight in weights.items() if any(n.startswith(name + "/") for n in source)}
    present = list(dict.fromkeys(name[0] for name in source))
    if weights and any(re.fullmatch(pattern, n) or re.fullmatch(pattern, n[2:]) for n in source if n[0] in weights):
        _check_average(source, dict(sorted(weights.items())), pattern)
    if present:
        check(tr.Overlay(present[:2]), source, lambda: oracle.overlay(source, present[:2]))


def _check_average(source, weights, pattern):
    try:
        expected = oracle.average(source, weights, pattern)
    except oracle.Wrong as wrong:
        assert str(wrong) in {p.kind for p in run(tr.Average(weights, pattern), source)[1].problems}
        return
    result, diagnostics = run(tr.Average(weights, pattern), source)
    assert diagnostics.problems == [] and sorted(result) == sorted(expected)
    for name, value in expected.items():
        assert result[name].dtype == value.dtype
        # Sums are made in float32.
        np.testing.assert_allclose(result[name], value, rtol=1e-6)
