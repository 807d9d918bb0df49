"""Rounds of broadcasts: who takes part, and how much each process receives."""

import itertools

import numpy as np
import pytest

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


def schedule_of(needers, shape, processes, limit):
    leaf = AwaitedLeaf("a", np.broadcast_to(np.float32(0), shape))
    return schedule_broadcast([needs_of("a", as_view(leaf), needers)], processes, limit)


def columns(shape, groups, processes):
    """Equal columns, each for some processes."""
    size = shape[1] // groups
    return {
        ((0, shape[0]), (group * size, (group + 1) * size)): set(range(group, processes, groups))
        for group in range(groups)
    }


@pytest.mark.parametrize(("processes", "groups"), [(2, 2), (8, 8), (8, 2), (32, 8)])
def test_who_needs_columns_receives_its_own(processes, groups):
    shape, limit = (1 << 16, 512), 4 << 20
    schedule = schedule_of(columns(shape, groups, processes), shape, processes, limit)
    needed = (1 << 16) * 512 * 4 // groups
    assert all(one.slots == processes for one in schedule.rounds)
    for process in range(processes):
        received = [m for one in schedule.rounds for m in itertools.chain(*one.received_by(process))]
        assert sum(message.size for message in received) == needed
    # What travels is hardly more: each member receives one slot of each.
    assert sum(one.slot_bytes * processes for one in schedule.rounds) <= 1.5 * needed


def test_what_most_need_is_sent_to_all_at_once():
    """Two of three processes need each half: sending it to each alone would save a third."""
    needers = {((0, 4096), (0, 256)): {0, 1}, ((0, 4096), (256, 512)): {0, 2}}
    schedule = schedule_of(needers, (4096, 512), 3, 1 << 20)
    assert schedule.rounds and all(one.slots == 1 for one in schedule.rounds)


@pytest.mark.parametrize("share", [1 / 4, 7 / 8])
def test_memory_is_bounded_where_one_process_needs_most(share):
    """Its slots are full when those of others are not: the owners begin no further chunks meanwhile."""
    edge = int(512 * share)
    needers = {((0, 4096), (0, edge)): {0}} | {
        ((0, 4096), pair): {1 + index}
        for index, pair in enumerate(itertools.pairwise(range(edge, 513, (512 - edge) // 4)))
    }
    limit = 2 << 20
    schedule = schedule_of(needers, (4096, 512), 5, limit)
    assert len(schedule.chunks) > 10 and all(one.slots == 5 for one in schedule.rounds)
    for process in range(5):
        rounds = {}
        for number, one in enumerate(schedule.rounds):
            for message in itertools.chain(*one.sent_by(process)):
                rounds.setdefault(message.chunk, []).append(number)
        for number, one in enumerate(schedule.rounds):
            held = sum(schedule.chunks[chunk].size for chunk, some in rounds.items() if some[0] <= number <= some[-1])
            assert held + one.host_bytes <= limit


def test_many_processes_exchange_few_messages():
    """Chunks do not become smaller the more processes need some of them."""
    schedule = schedule_of(columns((4096, 4096), 256, 256), (4096, 4096), 256, 256 << 20)
    messages = sum(len(row) for one in schedule.rounds for slots in one.sent for row in slots)
    assert messages == 256 * len(schedule.chunks) <= 256 * 4
