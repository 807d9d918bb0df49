"""One of several sources lacks the transforms that lead to the target's names."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.failed_plans import BUNDLE, HF, problems_of
from tests.support.memory_checkpoint import checkpoint

T = ot.transforms
PARAMETERS = {
    str(BUNDLE): flatten(ot.restore(BUNDLE, None, [T.Translate(), T.Keep("target/.*")])),
    str(HF): flatten(ot.restore(HF, None, ot.rules.hf_t5_to_t5x())),
}
OTHER = {"a": np.zeros(2, np.float32)}


@pytest.mark.parametrize("path", PARAMETERS)
@pytest.mark.parametrize("overlaid", [True, False])
def test_the_fix_gives_the_source_its_transforms(path, overlaid):
    parameters = PARAMETERS[path]
    if overlaid:
        target, transforms = unflatten({**parameters, **OTHER}), [T.Overlay(["other", "base"])]
    else:
        target, transforms = {"base": unflatten(parameters), "other": OTHER}, ()
    sources = {"base": ot.Source(path), "other": checkpoint(OTHER)}
    (problem,) = problems_of(sources, target, transforms)
    assert problem.kind == "missing" and "'base'" in problem.message and not problem.fix.transforms
    code = str(problem.fix).partition("transforms: ")[2]
    mended = eval(code, {"ot": ot, "path": path})
    plan = ot.plan_restore({**sources, **mended}, target, transforms)
    assert {entry.action for entry in plan.entries} == {"read"} and not plan.unused


@pytest.mark.slow
def test_a_source_that_has_transforms_gets_no_others():
    target = {"base": unflatten(PARAMETERS[str(BUNDLE)])}
    found = problems_of({"base": ot.Source(BUNDLE, [T.Rename([("(encoder)/(.*)", r"\1/x/\2")])])}, target)
    assert not any("ot.Source" in str(problem.fix) for problem in found)
