"""Rounds of broadcasts: who takes part, and how much each process receives."""

import numpy as np

from orbax_t5x.lazy import as_view
from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast
from tests.support.broadcast_needs import needs_of
from tests.support.memory_checkpoint import AwaitedLeaf


def test_pairs_that_need_the_same_have_rounds_of_their_own():
    """Data-parallel over (0, 2) and (1, 3): nobody receives what it does not need."""
    view = as_view(AwaitedLeaf("a", np.zeros((8, 4), np.float32)))
    needs = needs_of("a", view, {((0, 4), (0, 4)): {0, 2}, ((4, 8), (0, 4)): {1, 3}})
    schedule = schedule_broadcast([needs], 4, 1 << 20)
    assert {one.members for one in schedule.rounds} == {(0, 2), (1, 3)}
