"""Turns: of square matrices the others of their kind show how they lie, and nothing else does."""

import pytest

from orbax_t5x.rules.alignment.kinds import Sides
from orbax_t5x.rules.alignment.turns import Turns
from tests.support.aligned_leaves import items

SQUARE = {
    "source": {"h.0.a.weight": (4, 4), "h.1.a.weight": (4, 4)},
    "target": {"l/0/b/kernel": (4, 4), "l/1/b/kernel": (4, 4)},
}


def turn(more_source, more_target, pairs=()):
    """The turn of the square matrices of a layer, after some pairs are proven."""
    sides = Sides(items({**SQUARE["source"], **more_source}), items({**SQUARE["target"], **more_target}))
    turns = Turns(sides)
    named = [
        {leaf.name: kind for kind in tree.kinds for leaf in kind.members.values()}
        for tree in (sides.source, sides.target)
    ]
    for old, new in pairs:
        turns.count(named[0][old], named[1][new], 1)
    return turns.of(named[0]["h.0.a.weight"], named[1]["l/0/b/kernel"])


def layers(name, shape):
    return {name.format(at): shape for at in range(2)}


@pytest.mark.parametrize(("shape", "is_turned"), [((4, 9), False), ((9, 4), True)])
def test_a_square_matrix_lies_as_others_of_its_kind_do(shape, is_turned):
    more = layers("h.{}.c.weight", shape), layers("l/{}/d/kernel", (4, 9))
    assert turn(*more) is is_turned
    both = {**more[1], **layers("l/{}/e/kernel", (9, 4))}, {**more[0], **layers("h.{}.e.weight", (9, 4))}
    assert turn(both[1], both[0]) is None  # the counts fit both ways
    assert turn(both[1], both[0], [("h.0.c.weight", "l/0/d/kernel")]) is is_turned


def test_without_others_or_with_others_that_differ_nothing_is_known():
    assert turn({}, {}) is None
    both = layers("h.{}.c.weight", (9, 4)) | layers("h.{}.e.weight", (4, 7))
    theirs = layers("l/{}/d/kernel", (4, 9)) | layers("l/{}/f/kernel", (4, 7))
    assert turn(both, theirs, [("h.0.c.weight", "l/0/d/kernel"), ("h.0.e.weight", "l/0/f/kernel")]) is None


def test_what_was_counted_can_be_forgotten():
    sides = Sides(
        items(SQUARE["source"] | layers("h.{}.c.weight", (9, 4))),
        items(SQUARE["target"] | layers("l/{}/d/kernel", (4, 9))),
    )
    turns = Turns(sides)
    pair = (sides.source.kinds[1], sides.target.kinds[1])
    assert turns.may_lie_so(*pair) and turns.of(sides.source.kinds[0], sides.target.kinds[0])
    turns.forget(*pair)
    assert turns.of(sides.source.kinds[0], sides.target.kinds[0]) is None
