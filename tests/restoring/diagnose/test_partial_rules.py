"""What "auto" finds is applied only where it covers the model; what is new is named by fallback_for."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.support import t5_layouts
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

PLAIN = {f"params/{name}": value for name, value in t5_layouts.minimal().items()}
SCANNED = {f"target/{name}": value for name, value in t5_layouts.scanned(t5_layouts.minimal()).items()}
NEW = {f"params/heads/{name}/kernel": np.ones((7, 3), np.float32) for name in "ab"}
OPTIMIZER = {"opt_state/0/count": np.int32(0)}


def filled(source, target, **keywords):
    return ot.plan_restore(source, unflatten(target), "auto", fallback=unflatten(target), **keywords).filled


def sources():
    return {"a pack": checkpoint(SCANNED), "an alignment": checkpoint(renamed(PLAIN))}


def renamed(tree):
    words = {"params": "net", "decoder": "dec", "encoder": "enc", "attention": "attn"}
    return {"/".join(words.get(part, part) for part in name.split("/")): value for name, value in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pack", "an alignment", "a source's own"])
def test_a_fallback_does_not_complete_what_was_found_in_silence(kind):
    source = sources().get(kind) or ot.Source(checkpoint(SCANNED), "auto")
    target = PLAIN | NEW | OPTIMIZER
    transforms = () if kind == "a source's own" else "auto"
    (problem,) = problems_of(source, unflatten(target), transforms, fallback=unflatten(target))
    assert problem.kind == "rule" and problem.message.startswith("transforms='auto': ")
    if kind == "an alignment":
        assert "the target's" in problem.message and "by fallback_for" in str(problem.fix)
        new = ["params/heads/.*", "opt_state/.*"]
    else:
        count = f"cover {len(PLAIN)} of the model's {len(PLAIN) + 2} parameters"
        assert count in problem.message and "params/heads/** (2). The rules: ot.rules." in problem.message
        new = problem.fix.arguments["fallback_for"]
    plan = ot.plan_restore(source, unflatten(target), transforms, fallback=unflatten(target), fallback_for=new)
    assert set(plan.filled) == NEW.keys() | OPTIMIZER.keys()


def test_an_optimizer_and_what_needs_no_rules_are_filled():
    assert filled(checkpoint(SCANNED), PLAIN | OPTIMIZER) == tuple(OPTIMIZER)
    assert filled(checkpoint(PLAIN), PLAIN | OPTIMIZER) == tuple(OPTIMIZER)


@pytest.mark.slow
def test_without_a_fallback_the_leaf_is_missing():
    (problem,) = problems_of(checkpoint(SCANNED), unflatten(PLAIN | {"params/head": np.ones(3, np.float32)}), "auto")
    assert (problem.kind, problem.leaf) == ("missing", "params/head")
