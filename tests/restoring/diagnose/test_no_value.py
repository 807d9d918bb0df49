"""Leaves that the checkpoint has no value of."""

import numpy as np

import orbax_t5x as ot
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint


def test_none_on_disk_says_what_it_means():
    source = checkpoint({"a": np.ones(2, np.float32)}, empties={"m": None})
    (problem,) = problems_of(source, {"a": np.ones(2, np.float32), "m": np.ones(2, np.float32)})
    assert problem.leaf == "m" and "has None there" in problem.message and "closest" not in problem.message
    assert str(problem.fix).startswith("put None in the target there, or if they are to be new, give fallback= values")
    assert ot.restore(source, {"a": np.ones(2, np.float32), "m": None})["m"] is None
