"""Plans that fail, and what the problems of one make of it."""

import re

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.restoring.diagnose.hypothesis import UnmatchedLeaves
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.targets import flatten_target
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support import t5_model

BUNDLE = ot.__path__[0] + "/cli/demo_data/model.ckpt-1000000"
HF = GOLDENS / "safetensors" / "t5_1_1"
HF_CONFIG = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)
ARRAYS = {f"layer_{i}/{name}": np.full((2, 3), i, np.float32) for i in range(3) for name in ("kernel", "bias")}


def parameters(config):
    """Flat abstract parameters below `target/`."""
    return flatten({"target": t5_model.abstract(config)["params"]})


def unmatched_of(state, target, *, transforms=(), takes_rules=True):
    """What hypotheses get of leaves by name and any target."""
    matcher = Matcher(flatten_target(target), RestoreOptions(), None, {}, state, Diagnostics())
    matcher.entries()
    return UnmatchedLeaves(
        {name: value for name, value in state.items() if value is not None},
        matcher.target,
        matcher.unfilled,
        tuple(matcher.missing),
        tuple(matcher.leftovers),
        transforms,
        takes_rules,
    )


def problems_of(source, target, transforms=(), **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, transforms, **keywords)
    assert len(str(caught.value).splitlines()) < 60
    return caught.value.problems


def applied(fix, transforms=()):
    """The transforms that a fix says to pass; its text and its data say the same."""
    code = re.search(r"transforms=(\[.*\])", str(fix))
    assert code is not None, fix
    result = eval(code[1], {"ot": ot, "transforms": transforms})
    assert tuple(result) == fix.arguments.get("transforms", (*transforms, *fix.transforms))
    return result


def assert_cured(source, target, transforms=(), *, kind="missing", **keywords):
    """One problem, and its fix restores every leaf from the checkpoint."""
    (problem,) = problems_of(source, target, transforms, **keywords)
    assert (problem.kind, problem.leaf) == (kind, None)
    plan = ot.plan_restore(source, target, applied(problem.fix, transforms), **keywords)
    assert {entry.action for entry in plan.entries} <= {"read", "value"} and not plan.unused
    return plan, problem


def failing(source, target, *arguments, **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, *arguments, **keywords)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def problems(*arguments, **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(*arguments, **keywords)
    return [(problem.kind, problem.leaf) for problem in caught.value.problems]
