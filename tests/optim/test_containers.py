"""Containers of optimizers' states, and their parameters, by words and structure."""

import numpy as np

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
