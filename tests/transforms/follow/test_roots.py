"""Optimizers' states are found by structure: generated train states whose every leaf tells what it is of."""

import itertools

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.transforms.follow.roots import find_roots

SHAPES = {
    "decoder/layers_0/attention/query/kernel": (4, 8),
    "decoder/layers_0/attention/key/kernel": (4, 8),
    "decoder/layers_0/norm/scale": (4,),
    "decoder/layers_1/attention/query/kernel": (4, 8),
    "decoder/layers_1/attention/key/kernel": (4, 8),
    "decoder/layers_1/norm/scale": (4,),
    "token_embedder/embedding": (6, 4),
}
# Root of the parameters, of the optimizer's state, what is below a moment's kind, and the name of the step.
STATES = {
    "linen": ("params", "opt_state", "", "step"),
    "nnx": ("model", "opt/opt_state", "", "opt/step"),
    "maxtext": ("params/params", "opt_state", "params/", "step"),
    "maxtext nnx": ("model", "optimizer/opt_state", "", "optimizer/step"),
    "t5x": ("target", "state/param_states", "", "state/step"),
    "flat": ("weights", "trainer/optimizer", "", "trainer/step"),
}
# Path of each transform's state, the kinds there, and whether it has a parameter's moments.
OPTIMIZERS = {
    "adam": [("0", ("mu", "nu"), lambda path: True)],
    "chain": [("1/0", ("mu", "nu"), lambda path: True)],
    "adafactor": [("0", ("v_row", "v_col", "v"), lambda path: True)],
    "masked": [("inner_states/a/inner_state/0", ("mu", "nu"), lambda path: "norm" not in path)],
    "several": [
        ("inner_states/a/inner_state/0", ("mu", "nu"), lambda path: "norm" not in path),
        ("inner_states/b/inner_state/0", ("trace",), lambda path: "norm" in path),
    ],
}
RENAMINGS = {
    "nothing": lambda path: path,
    "modules": lambda path: path.replace("attention", "attn").replace("token_embedder", "embed"),
    "swapped": lambda path: path.translate(str.maketrans("01", "10")),
}


def shape_of(kind, shape):
    if not kind.startswith("v"):
        return shape
    if kind == "v":
        return (1,) if len(shape) == 2 else shape
    return (shape[kind == "v_col"],) if len(shape) == 2 else (1,)


def state(which, optimizer, renaming):
    """A state whose arrays are filled with the number of what they are: the kind and the parameter's first name."""
    root, moments, inner, step = STATES[which]
    numbers = itertools.count(1)
    leaves = {}
    for path, shape in SHAPES.items():
        leaves[f"{root}/{renaming(path)}"] = np.full(shape, next(numbers), np.float32)
    for where, kinds, has in OPTIMIZERS[optimizer]:
        for kind, (path, shape) in itertools.product(kinds, SHAPES.items()):
            number = next(numbers)
            if has(path):
                name = f"{moments}/{where}/{kind}/{inner}{renaming(path)}"
                leaves[name] = np.full(shape_of(kind, shape), number, np.float32)
        leaves[f"{moments}/{where}/count"] = np.int32(next(numbers))
    return leaves | {step: np.int32(next(numbers))}


def follow(old, new, renaming):
    rules = [(f"{STATES[old][0]}/{path}", f"{STATES[new][0]}/{renaming(path)}") for path in SHAPES]
    return tr.FollowOptimizer(tr.Rename(rules))


def is_all(result, wanted):
    return wanted.keys() <= result.keys() and all(np.array_equal(result[name], leaf) for name, leaf in wanted.items())


@pytest.mark.parametrize("renaming", RENAMINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("old", "new"), list(itertools.product(STATES, STATES)))
def test_states_become_those_of_other_loops(old, new, optimizer, renaming):
    names = RENAMINGS[renaming]
    source, wanted = state(old, optimizer, RENAMINGS["nothing"]), state(new, optimizer, names)
    result, diagnostics = run(follow(old, new, names), source, wanted)
    assert diagnostics.problems == [] and diagnostics.warnings == []
    moved = {name: leaf for name, leaf in wanted.items() if not name.endswith(("count", "step"))}
    assert is_all(result, moved)
    assert len(result) == len(source)
    # Without a target nothing is lost either, and the way back is whole.
    alone, diagnostics = run(follow(old, new, names), source)
    assert diagnostics.problems == [] and len(alone) == len(source)
    back, diagnostics = run(tr.FollowOptimizer(follow(old, new, names).inverse().transform), alone, source)
    assert diagnostics.problems == []
    assert is_all(back, {name: leaf for name, leaf in source.items() if not name.endswith(("count", "step"))})


def test_parameters_outside_given_roots_are_a_problem():
    source = state("linen", "adam", RENAMINGS["nothing"])
    inner = tr.Rename([("params/(.*)", r"model/\1")])
    _, diagnostics = run(tr.FollowOptimizer(inner, roots=[("params", "opt_state")]), source)
    assert [problem.kind for problem in diagnostics.problems] == ["optimizer"]
    assert "14 leaves of the optimizer have no parameter under these names" in diagnostics.problems[0].message


def test_moments_of_either_of_two_trees_are_a_problem():
    paths = ["a/kernel", "b/kernel"]
    source = {f"{tree}/{path}": np.ones(2) for tree in ("student", "teacher") for path in paths}
    source |= {f"optimizer/0/{kind}/{path}": np.ones(2) for kind in ("mu", "nu") for path in paths}
    swap = tr.FollowOptimizer(tr.Rename([("student/a/(.*)", r"student/b/\1"), ("student/b/(.*)", r"student/a/\1")]))
    _, diagnostics = run(swap, source)
    assert [problem.kind for problem in diagnostics.problems] == ["optimizer"]
    assert "'student' or 'teacher'" in diagnostics.problems[0].message


def test_modules_called_as_moments_are_parameters():
    names = ["params/enc/mu/kernel", "params/enc/nu/kernel", "params/enc/opt/kernel", "params/mu/kernel"]
    assert find_roots(dict.fromkeys(names)).pairs == ()
    moments = [f"opt_state/0/{kind}/{name.removeprefix('params/')}" for kind in ("mu", "nu") for name in names]
    assert find_roots(dict.fromkeys([*names, *moments])).pairs == (("params", "opt_state"),)
