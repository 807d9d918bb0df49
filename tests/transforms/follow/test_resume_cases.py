"""Random resumptions against NumPy's truth; `resume_cases.py` runs many more by its command."""

import collections

import pytest

from tests.transforms.follow.resume_cases import run_cases

CASES = 50

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_dtype_promotion")]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_leaf_count_and_key_is_right_or_the_restore_is_refused(seed):
    outcomes = dict(run_cases(seed, range(CASES)))
    wrong = {
        number: (outcome.kind, outcome.details[:3], outcome.case.get("rules"))
        for number, outcome in outcomes.items()
        if outcome.kind in ("wrong", "raised")
    }
    assert not wrong
    counts = collections.Counter(outcome.kind for outcome in outcomes.values())
    # Refusing all would be right, too.
    assert counts["right"] >= 0.6 * CASES, counts
