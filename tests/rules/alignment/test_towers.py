"""Alike towers with modules moved, added and dropped, deeper and shallower: no leaf gets another's values."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from tests.support.aligned_leaves import applied
from tests.support.alike_towers import EDITS, pair


def wrong_and_found(one):
    """Names of the target that get other values than theirs, and of those that get their own."""
    alignment = ot.rules.align(one.source, one.target)
    result = applied(alignment.transforms, one.source)
    assigned = [name for name in one.target if name not in alignment.open]
    wrong = [
        name
        for name in assigned
        if name in one.new
        or (result[name].shape, result[name].tobytes()) != (one.target[name].shape, one.target[name].tobytes())
    ]
    return wrong, set(assigned).difference(wrong)


@pytest.mark.parametrize("edit", EDITS)
def test_no_leaf_of_alike_towers_is_wrong_and_most_are_found(edit):
    found = known = 0
    for seed in range(EDITS.index(edit), 12 * len(EDITS), len(EDITS)):
        one = pair(seed)
        wrong, right = wrong_and_found(one)
        assert not wrong, seed
        found, known = found + len(right), known + len(one.target) - len(one.new)
    assert found > known / 3


@settings(max_examples=settings.default.max_examples // 10)
@given(seed=st.integers(0, 1 << 32))
def test_no_other_pair_of_alike_towers_is_wrong(seed):
    assert not wrong_and_found(pair(seed))[0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("t_0/Dense_0 t_0/Dense_1 t_1/Dense_0", "t_0/Dense_0 t_1/Dense_0 t_1/Dense_1"),
        ("gen/fog gen/up gen/y dis/up dis/y", "gen/up gen/y dis/fog dis/up dis/y"),
        ("one/up one/w1 one/q two/up two/q", "one/up one/q two/raxwk two/up two/q"),
    ],
)
def test_a_module_that_moves_takes_no_namesake_along(source, target):
    """The tower that lost it is deeper, too: what has the other tower's names stays there, or open."""
    first = source[:3]

    def leaves(modules, layers, depth, lasts):
        found = {}
        for tower, module in (name.split("/") for name in modules.split()):
            for layer in range(depth if tower == first else 2):
                for last, shape in zip(lasts, ((4, 4), (4,)), strict=True):
                    if module not in ("y", "q") or last == lasts[0]:
                        key = f"{tower}/{layer}/{module}/{len(shape)}"
                        found[layers.format(tower, layer, module) + last] = np.full(shape, zlib.crc32(key.encode()))
        return found

    for lasts in (("w", "b"), ("w", "gamma")):
        ours = leaves(source, "model/{}/layers_{}/{}/", 2, lasts)
        theirs = leaves(target, "{}/h/{}/{}/", 3, lasts)
        kept = leaves(source, "{}/h/{}/{}/", 2, lasts).keys() & theirs.keys()
        alignment = ot.rules.align(ours, theirs)
        result = applied(alignment.transforms, ours)
        for name in kept - alignment.open.keys():
            np.testing.assert_array_equal(result[name], theirs[name], name)
