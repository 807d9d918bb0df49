"""Kinds of leaves: layers are one, and numbers of unlike modules are words."""

from orbax_t5x.rules.alignment.kinds import Sides
from tests.support.aligned_leaves import items


def templates(ours, theirs=None):
    tree = Sides(items(ours), items(ours if theirs is None else theirs)).source
    return {"/".join(kind.template): len(kind.members) for kind in tree.kinds}


def test_layers_are_one_kind_and_numbers_of_unlike_modules_are_parts():
    shapes = {f"h/{i}/ff/{name}/w": (2, 3 + at) for i in range(3) for at, name in enumerate(("w1", "w2"))}
    assert templates(shapes) == {"h/#/ff/w_1/w": 3, "h/#/ff/w_2/w": 3}
    assert templates({f"layers_{i}/w": (2,) for i in (0, 1)}) == {"layers/#/w": 2}
    assert templates({f"norm_{i}/{name}": (2,) for i in (0, 1) for name in ("scale", "bias")}).keys() == {
        f"norm_{i}/{name}" for i in (0, 1) for name in ("scale", "bias")
    }


def test_words_of_numbers_are_those_of_all_beside_them():
    def words(*names):
        return [kind.parts for kind in Sides(items({f"x/{name}/w": (2,) for name in names}), []).source.kinds]

    assert words("norm_1", "norm_2")[0] == ("x", "norm_1 of [1, 2]", "w")
    assert words("norm_0", "norm_1")[1] == ("x", "norm_1 of [0, 1]", "w")
    assert words("Dense_0") == [("x", "Dense", "w")] and words("wi_0")[0][1] == "wi_0"
    assert words("linear", "linear_1")[1] == ("x", "linear_1 of [0, 1]", "w")
