"""Proposals are guesses of both sides; what is as good as another is none."""

from orbax_t5x.rules.alignment.evidence import Evidence
from orbax_t5x.rules.alignment.kinds import Sides
from orbax_t5x.rules.alignment.search import MOST_RIVALS, proposals
from tests.support.aligned_leaves import items


def proposed(ours, theirs):
    sides = Sides(items(ours), items(theirs))
    found = proposals(sides, Evidence(sides, {}))
    return {"/".join(one.template): "/".join(other.template) for other, one in found.items()}


def test_names_and_structure_propose_and_ties_do_not():
    ours = {f"{name}/w": (2, 2) for name in ("query", "key", "foo")}
    assert proposed(ours, {f"{name}/w": (2, 2) for name in ("q", "k", "bar")}) == {
        "query/w": "q/w", "key/w": "k/w", "foo/w": "bar/w"
    }  # fmt: skip
    assert proposed(ours, {f"{name}/w": (2, 2) for name in ("q", "x", "bar")}) == {"query/w": "q/w"}
    tree = {"x/a": (2,), "x/b": (3,), "y/c/d": (2,), "y/c/e": (4,), "y/f": (3,)}
    other = {"p/a": (2,), "p/b": (3,), "q/c/d": (2,), "q/c/e": (4,), "q/f": (3,)}
    assert proposed(tree, other) == dict(zip(tree, other, strict=True))


def test_many_leaves_of_one_shape_are_proposed_by_whole_names_alone():
    names = [f"{first}{second}" for first in "abcdefghijkl" for second in "mnopqrstuvwx"]
    assert len(names) > MOST_RIVALS
    found = proposed({f"x/{name}": (2,) for name in names}, {f"x/{name}": (2,) for name in [*names[1:], "other"]})
    assert found == {f"x/{name}": f"x/{name}" for name in names[1:]}
