"""Moves as transforms."""

import numpy as np
import pytest

from orbax_t5x.rules.alignment.moves import Move
from orbax_t5x.rules.alignment.writing import moves_as_transforms
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms

FORMS = ["layers_{}", "layers/{}", "h{}", "{}"]


def applied(transforms, source):
    diagnostics = Diagnostics()
    result = run_transforms(transforms, source, {}, is_resuming=False, diagnostics=diagnostics)
    assert diagnostics.problems == []
    return {name: as_numpy(value) for name, value in result.items()}


@pytest.mark.parametrize("form", [*FORMS, "layers_{:02d}"])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_layers_are_stacked_and_unstacked_whatever_their_numbers(form, start, depth):
    source = {
        f"{tower}/{form.format(i + start)}/{name}": np.full((2, 3), 10 * i + at)
        for tower in ("enc", "dec")
        for i in range(depth)
        for at, name in enumerate("wv")
    }
    source |= {"enc/norm": np.ones(2)}
    moves = [Move(("enc/norm",), ("e/norm",))]
    stacked = {"e/norm": source["enc/norm"]}
    for tower in ("enc", "dec"):
        for name in "wv":
            names = tuple(f"{tower}/{form.format(i + start)}/{name}" for i in range(depth))
            moves.append(Move(names, (f"{tower}/all/{name}x",), axis=1, stacks=True))
            stacked[f"{tower}/all/{name}x"] = np.stack([source[name] for name in names], 1)
    transforms = moves_as_transforms(moves, list(source), list(stacked))
    found = applied(transforms, source)
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in stacked.items()}
    back = applied(moves_as_transforms([move.reversed() for move in moves], list(stacked), list(source)), stacked)
    assert {name: value.tolist() for name, value in back.items()} == {n: v.tolist() for n, v in source.items()}


def test_only_the_leaves_of_moves_are_transposed():
    names = ["a/wi/weight", "a/wo/weight", "a/emb/weight", "b/wi/weight"]
    source = {name: np.ones((2, 3)) for name in names}
    moves = [Move((name,), (name,), axes=(1, 0) if name != "a/emb/weight" else ()) for name in names[:3]]
    result = applied(moves_as_transforms(moves, names, names), source)
    assert {name: value.shape for name, value in result.items()} == {
        "a/wi/weight": (3, 2),
        "a/wo/weight": (3, 2),
        "a/emb/weight": (2, 3),
        "b/wi/weight": (2, 3),
    }
    moves = [Move((name,), (f"{name}.x",), axes=(1, 0)) for name in names]
    assert {
        value.shape
        for value in applied(moves_as_transforms(moves, names, [f"{name}.x" for name in names]), source).values()
    } == {(3, 2)}


def test_a_leaf_that_one_layer_has_alone_is_not_stacked():
    """It stays, or has another name; `layers` is the word for the numbers that stand alone."""
    source = {f"enc/{i}/{name}": np.full(2, i) for i in range(3) for name in ("w", "v")} | {"enc/0/bias": np.ones(2)}
    for moves, alone in (([], "enc/0/bias"), ([Move(("enc/0/bias",), ("e/b",))], "e/b")):
        both = [Move(tuple(f"enc/{i}/{name}" for i in range(3)), (f"e/{name}",), axis=0, stacks=True) for name in "wv"]
        result = applied(moves_as_transforms([*both, *moves], list(source), ["e/w", "e/v", alone]), source)
        assert sorted(result) == sorted(["e/w", "e/v", alone]) and result["e/w"].shape == (3, 2)
