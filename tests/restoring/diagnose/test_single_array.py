"""An array without a name, as the checkpoint or as the target."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.failed_plans import applied, problems_of
from tests.support.memory_checkpoint import checkpoint

_ARRAY = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("stored", "target", "which"), [({"": _ARRAY}, {"a": _ARRAY}, "checkpoint"), ({"a": _ARRAY}, _ARRAY, "target")]
)
def test_one_array_on_either_side_gets_a_rule(stored, target, which):
    problem, *_ = problems_of(checkpoint(stored), target, strict=False)
    assert f"the {which} is a single array, which has no name" in problem.message
    assert ot.plan_restore(checkpoint(stored), target, applied(problem.fix)).bytes_to_read == 8


def test_another_shape_is_advice():
    (problem,) = problems_of(checkpoint({"": np.ones(2, np.float32)}), {"a": np.ones(3, np.float32)}, strict=False)
    assert str(problem.fix) == "pass the target's leaf by itself" and not problem.fix.transforms
    (problem,) = problems_of(checkpoint({"a": np.ones(2), "b": np.ones(2)}), np.ones(2, np.float32), strict=False)
    assert str(problem.fix) == "name the target's leaf, {name: leaf}"
