"""The one entry for explaining a plan that failed."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.conftest import GOLDENS
from tests.support.failed_plans import ARRAYS, HF, HF_CONFIG, applied, assert_cured, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint


def test_nothing_is_proposed_to_a_run_that_goes_on():
    """Its transforms are not applied again, so a rule more would not be, either."""
    source = checkpoint({f"params/{name}": array for name, array in ARRAYS.items()})
    found = problems_of(source, ARRAYS, [ot.transforms.Intersect()], is_resuming=True)
    assert len(found) == len(ARRAYS) + 1 and not any("transforms" in str(problem.fix) for problem in found[:-1])


_RESTORE = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("orbax_t5x.restoring.diagnose", "orbax_t5x.rules")):
            raise ImportError(f"a restore that succeeds loads {name}")

sys.meta_path.insert(0, Refuse())
import numpy as np
import subprocess
import sys

import numpy as np

import orbax_t5x as ot

everything = ot.restore(sys.argv[1], None)
again = ot.restore(sys.argv[1], everything, strict=True)
assert again.keys() == everything.keys()
some = {"target": everything["target"]}
def function(state, target, *, is_resuming=False):
    return state
transforms = [ot.transforms.Rename(((r"(target/.*)", r"\\1"),)), function]
assert ot.restore(sys.argv[1], some, transforms, strict=False).keys() == some.keys()
try:
    ot.plan_restore(sys.argv[1], {"other": np.zeros(2)})
except (ImportError, ot.errors.CheckpointError) as error:
    print(error)
"""


def test_a_restore_that_succeeds_enters_no_module_of_this_package():
    """One that fails does, so that the test would see it."""
    source = GOLDENS / "t5x_orbax" / "d8_adafactor"
    done = subprocess.run([sys.executable, "-c", _RESTORE, source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "a restore that succeeds loads orbax_t5x.restoring.diagnose" in done.stdout


def test_everything_that_is_wrong_is_in_one_list():
    """Problems of the transforms, of shapes, causes of several leaves, single leaves, and what is left over."""
    arrays = {f"layers_{i}/w": np.ones(2) for i in range(2)} | {"a": np.ones(2), "extra": np.ones(2)}
    target = {f"layers_{i}/w": np.ones(2) for i in range(4)} | {"a": np.ones(3), "other": np.ones(2)}
    found = problems_of(checkpoint(arrays), target, [ot.transforms.Rename([("none", "such")])])
    assert [(problem.kind, problem.leaf) for problem in found] == [
        ("unused_rule", None), ("missing", None), ("missing", "other"), ("shape", "a"), ("leftover", "extra")
    ]  # fmt: skip


def test_a_proposal_leads_to_what_is_left():
    """The heading counts the problems that the fix leaves, and they follow."""
    source = checkpoint({f"params/{name}": array for name, array in ARRAYS.items()})
    first, second = problems_of(source, {**ARRAYS, "other": np.ones(7)})
    assert first.message.startswith("7 target leaves have no match by name and shape in the checkpoint: ")
    assert first.message.endswith("; with the fix, 1 problem is left, listed below")
    assert second.leaf == "other"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["auto", "rules"])
def test_a_shapes_fix_keeps_the_rules_of_the_call(given):
    """The vocabulary of a model that "auto" reaches is larger: what it found is written out before `Pad`."""
    target = parameters(HF_CONFIG)
    name = "target/token_embedder/embedding"
    target[name] = jax.ShapeDtypeStruct((target[name].shape[0] + 8, *target[name].shape[1:]), np.float32)
    transforms = "auto" if given == "auto" else [ot.rules.hf_t5_to_t5x()]
    (problem,) = problems_of(HF, unflatten(target), transforms)
    assert (problem.kind, problem.leaf) == ("shape", name)
    zeros, fallback, _ = problem.fix.ways
    assert set(fallback.arguments) >= {"fallback"}
    plan = ot.plan_restore(HF, unflatten(target), applied(zeros, transforms))
    assert {entry.action for entry in plan.entries} == {"read"} and not plan.unused


def test_a_misspelt_name_is_a_rule():
    """Other layers have the right word, and keep it."""
    arrays = {f"encoder/layers_{i}/attention/kernel": np.ones((2, 3 + i), np.float32) for i in range(3)}
    target = {name.replace("layers_1/attention", "layers_1/atention"): array for name, array in arrays.items()}
    assert_cured(checkpoint(arrays), target)
