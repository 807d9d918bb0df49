"""Containers of optimizers' states, and their parameters, by words and structure."""

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.optim.containers import find_containers, find_roots, rename_counts
from orbax_t5x.testing.transform_suite import run


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


@pytest.mark.parametrize("modules", [["opt/m"], ["opt/opt/2", "kernel/2"], ["block/opt/layers_0", "norm/layers_0"]])
def test_modules_called_as_containers_are_parameters(modules):
    """Beside numbers, which are no evidence: an optimizer has more hyperparameters than the model has leaves."""
    leaves = {f"model/{name}": np.ones(1) for name in modules}
    leaves |= {f"optimizer/0/mu/{name}": np.ones(1) for name in modules}
    numbers = {f"optimizer/hyperparams/{number}": np.float32(0.1) for number in "abcdefgh"}
    assert find_roots({**leaves, **numbers, "optimizer/step": np.int32(3)}).pairs == (("model", "optimizer"),)


def test_a_count_is_no_moment_of_a_number():
    source = {"model/a/step": np.float32(1), "model/w": np.ones(2), "optimizer/step": np.int32(3)}
    source |= {f"optimizer/opt_state/0/mu/{name}": np.float32(2) for name in ("a/step", "w")}
    assert find_roots(source).pairs == (("model", "optimizer/opt_state"),)


def test_counts_of_named_chains_follow_into_a_wrapper():
    leaves = ["first/mu/w", "first/nu/w", "first/count", "then/count"]
    names = ["params/w", *(f"opt_state/{leaf}" for leaf in leaves)]
    wrapped = dict.fromkeys(name.replace("opt_state/", "opt_state/1/") for name in names)
    renames = rename_counts(dict.fromkeys(names), wrapped, {"opt_state/first": "opt_state/1/first"})
    assert renames["opt_state/then/count"] == "opt_state/1/then/count"


def test_steps_and_counts_go_to_the_targets_container():
    """With and without the ending of NNX's variables; other leaves stay."""
    linen = dict.fromkeys(["params/w", "opt_state/0/mu/w", "opt_state/0/nu/w", "opt_state/0/count", "step"])
    nnx = dict.fromkeys(
        ["model/w", "opt/opt_state/0/mu/w", "opt/opt_state/0/nu/w", "opt/opt_state/0/count", "opt/step"]
    )
    variables = {f"{name}/value": None for name in nnx}
    assert find_containers(linen) == ["opt_state"] and find_containers(nnx) == ["opt/opt_state"]
    for source, ending in ((linen, ""), (linen, "/value")):
        renames = rename_counts(source, {name + ending: None for name in nnx})
        assert renames.pop("opt_state/0/count") == f"opt/opt_state/0/count{ending}"
        assert renames.pop("step") == f"opt/step{ending}" and "params/w" not in renames
    for source, target in ((nnx, variables), (variables, nnx)):
        renames = rename_counts(source, target)
        assert {"opt/opt_state/0/count", "opt/step"} <= {name.removesuffix("/value") for name in renames}
        assert all(new in target for new in renames.values()) and not any("model" in name for name in renames)
    assert rename_counts(linen, linen) == {} and rename_counts(variables, variables) == {}
