"""The leaves that become a leaf of the target, and what is done to them."""

import numpy as np

from orbax_t5x.rules.alignment.moves import Move, moves_between


def test_equal_names_stay_though_they_are_some_of_all():
    source = {f"layers_{i}/w": np.ones(2) for i in range(4)}
    found = moves_between(source, {name: source[name] for name in ("layers_2/w", "layers_3/w")})
    assert found == {name: Move((name,), (name,)) for name in ("layers_2/w", "layers_3/w")} and found.open == {}


def test_moves_know_the_way_back():
    source = {f"layers_{i}/w": np.ones((2, 3)) for i in range(4)}
    found = moves_between(source, {"all/w": np.ones((2, 4, 3))})
    move = found["all/w"]
    assert move == Move(tuple(source), ("all/w",), axis=1, stacks=True)
    assert move.reversed() == Move(("all/w",), tuple(source), axis=1) and move.reversed().reversed() == move


def test_layers_that_may_be_on_several_axes_are_open():
    source = {f"layers_{i}/w": np.ones((3, 3)) for i in range(3)}
    found = moves_between(source, {"all/w": np.ones((3, 3, 3))})
    assert found == {} and found.open == {"all/w": ()} and found.why == {"all/w": "nothing has its shape and place"}


def test_names_without_separators_are_split_at_underscores():
    source = {f"encoder/layers_{i}/{name}/w": np.ones((3, 3)) for i in range(2) for name in ("ab", "cd", "ef")}
    target = {name.replace("/", "_"): value for name, value in source.items()}
    found = moves_between(source, target)
    assert {move.targets[0]: move.sources[0] for move in found.values()} == {
        name.replace("/", "_"): name for name in source
    }


def test_numbers_that_only_differ_in_zeros_are_names():
    source = {"layer_1/ab": np.ones(2), "layer_01/cd": np.ones(3)}
    assert moves_between(source, {"x/ab": np.ones(2), "y/cd": np.ones(3)}).open == {}
