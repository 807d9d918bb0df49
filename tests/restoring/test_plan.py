"""A plan is executed with the settings that it was made with."""

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf, checkpoint

S = jax.ShapeDtypeStruct
WIDE = {
    "int": np.arange(8, dtype=np.int64) + 2**40,
    "float": np.arange(8, dtype=np.float64) + 2.0**-40,
    "complex": np.arange(8) + 1j * 2.0**-40,
}


@pytest.fixture(params=[BlockedLeaf, AwaitedLeaf])
def kind(request):
    return request.param


@pytest.mark.parametrize("name", WIDE)
def test_a_plan_of_64_bits_executed_with_32_is_an_error_and_never_other_values(kind, name):
    source = checkpoint(WIDE, kind)
    with jax.enable_x64(True):
        plan = ot.plan_restore(source, {"a": S((8,), WIDE[name].dtype)}, lambda state, _: {"a": state[name]})
    with pytest.raises(ot.RestorePlanError, match="the plan has") as caught:
        plan.execute()
    assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("dtype", "a")]
