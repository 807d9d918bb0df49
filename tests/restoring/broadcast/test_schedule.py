"""Schedules of broadcasts: each needed element is sent once, no byte is read twice, buffers are within the budget."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy import as_view
from orbax_t5x.lazy.box import box_shape, box_size, box_slices, slices_within
from orbax_t5x.lazy.several import stack
from orbax_t5x.restoring.broadcast.schedule import ALIGNMENT, message_starts, schedule_broadcast
from tests.support.broadcast_needs import needs_of
from tests.support.memory_checkpoint import AwaitedLeaf


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Entries over leaves with chunks, and which of a grid of boxes each process needs."""

    arrays: dict
    needs: list
    processes: int


def grid(shape, counts):
    """The boxes of an array that is cut into so many pieces along each dimension."""
    sides = []
    for size, count in zip(shape, counts, strict=True):
        edges = [size * index // count for index in range(count + 1)]
        sides.append(list(itertools.pairwise(edges)))
    return list(itertools.product(*sides))


@st.composite
def cases(draw):
    processes = draw(st.integers(1, 5))
    arrays, needs = {}, []
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        chunked = shape and draw(st.booleans())
        leaf = AwaitedLeaf(name, array, tuple(draw(st.integers(1, size)) for size in shape) if chunked else None)
        view = as_view(leaf)
        kind = draw(st.sampled_from(["plain", "stacked", "halves"]))
        if kind == "halves" and shape and shape[0] > 1:
            half = shape[0] // 2
            views = {f"{name}/0": (view[:half], array[:half]), f"{name}/1": (view[half:], array[half:])}
        elif kind == "stacked":
            views = {name: (stack([view, view], len(shape)), np.stack([array, array], len(shape)))}
        else:
            views = {name: (view, array)}
        for key, (one, values) in views.items():
            arrays[key] = values
            boxes = grid(values.shape, [draw(st.integers(1, min(size, 3))) for size in values.shape])
            some = st.sets(st.integers(0, processes - 1), min_size=1)
            needs.append(needs_of(key, one, {box: draw(some) for box in boxes}))
    return Case(arrays, needs, processes)


def stored_elements(leaf, box):
    """The elements of a leaf that reading a box of it takes, whole chunks where there are some, as a mask."""
    mask = np.zeros(leaf.shape, bool)
    if leaf.chunks is None:
        mask[box_slices(box)] = True
        return mask
    low = [start // chunk * chunk for (start, _), chunk in zip(box, leaf.chunks, strict=True)]
    high = [-(-stop // chunk) * chunk for (_, stop), chunk in zip(box, leaf.chunks, strict=True)]
    mask[tuple(map(slice, low, high))] = True
    return mask


@given(cases(), st.sampled_from([1, 1 << 20]))
def test_each_element_comes_once_and_no_stored_one_is_read_twice(case, limit):
    schedule = schedule_broadcast(case.needs, case.processes, limit)
    counted = {}
    for one in schedule.needs.values():
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for process in needers:
                counted[one.entry.name, box, process] = np.zeros(box_shape(box), int)
    read = {}
    for chunk in schedule.chunks:
        assert chunk.owner in chunk.members
        masks = {}
        for piece in chunk.pieces:
            for leaf, box in piece.view.requests(piece.box):
                masks[leaf] = masks.get(leaf, False) | stored_elements(leaf, box)
        for leaf, mask in masks.items():
            read[leaf] = read.get(leaf, 0) + mask.astype(int)
    for one in schedule.rounds:
        assert list(one.members) == sorted(set(one.members))
        for sender, slots in zip(one.members, one.sent, strict=True):
            assert one.sent_by(sender) == slots
            for row in slots:
                for start, message in message_starts(row):
                    assert start % ALIGNMENT == 0 and start + message.size <= one.slot_bytes
                    chunk = schedule.chunks[message.chunk]
                    assert (chunk.owner, chunk.members) == (sender, one.members)
        for receiver in one.members:
            for message in itertools.chain(*one.received_by(receiver)):
                piece = schedule.chunks[message.chunk].pieces[message.piece]
                needs = schedule.needs[piece.entry]
                whole = needs.boxes[piece.box_index]
                if receiver in needs.needers[piece.box_index]:
                    counted[piece.entry.name, whole, receiver][slices_within(message.box, whole)] += 1
                else:
                    assert one.slots == 1
    assert all((counts == 1).all() for counts in counted.values())
    assert all(counts.max(initial=0) <= 1 for counts in read.values())


@given(cases())
def test_what_is_read_alone_is_stored_apart(case):
    """No stored element of an entry that each process reads for itself is read by two of them."""
    schedule = schedule_broadcast(case.needs, case.processes, 1 << 20)
    alone = [one for one in case.needs if one.entry in schedule.unshared]
    assert len(alone) + len(schedule.needs) == len(case.needs)
    readers = {}
    for one in alone:
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for leaf, requested in one.view.requests(box):
                for process in needers:
                    mask = stored_elements(leaf, requested)
                    readers.setdefault(leaf, {}).setdefault(process, np.zeros(leaf.shape, bool))[mask] = True
    for masks in readers.values():
        assert sum(mask.astype(int) for mask in masks.values()).max(initial=0) <= 1


@pytest.mark.parametrize("chunks", [None, (64, 512), (4096, 64)], ids=["ranges", "rows", "columns"])
def test_a_replicated_array_is_read_by_all_in_equal_shares(chunks):
    leaf = AwaitedLeaf("a", np.broadcast_to(np.float32(0), (4096, 512)), chunks)
    view = as_view(leaf)
    processes, limit = 4, 1 << 20
    needs = needs_of("a", view, {((0, 4096), (0, 512)): set(range(processes))})
    schedule = schedule_broadcast([needs], processes, limit)
    read = [0] * processes
    for chunk in schedule.chunks:
        read[chunk.owner] += sum(box_size(piece.box) * 4 for piece in chunk.pieces)
        # A chunk of columns is as large as the whole budget.
        assert chunk.size <= max(limit, 4096 * 64 * 4)
    assert sum(read) == 4096 * 512 * 4 and max(read) <= 1.1 * sum(read) / processes
    for one in schedule.rounds:
        assert one.host_bytes <= limit
    # Rows are full: the bytes that travel are hardly more than those of the array.
    assert sum(one.slot_bytes * processes for one in schedule.rounds) <= 1.3 * sum(read)


def test_what_a_process_alone_needs_is_read_by_it():
    view = as_view(AwaitedLeaf("a", np.zeros((8, 4), np.float32), (4, 4)))
    needs = needs_of("a", view, {((0, 4), (0, 4)): {0}, ((4, 8), (0, 4)): {1}})
    schedule = schedule_broadcast([needs], 2, 1 << 20)
    assert schedule.unshared == (needs.entry,) and not schedule.rounds


def test_values_in_memory_are_taken_from_a_process_that_has_them():
    """What is stacked with a constant is read by a process that needs all of it, and by each alone where none does."""
    leaf, constant = AwaitedLeaf("a", np.zeros((8,), np.float32)), as_view(np.ones((8,), np.float32))
    view = stack([as_view(leaf), constant], 0)
    whole, rows = ((0, 2), (0, 8)), [((0, 2), (0, 4)), ((0, 2), (4, 8))]
    replicated = schedule_broadcast([needs_of("a", view, {whole: {1, 2}})], 3, 1 << 20)
    assert {chunk.owner for chunk in replicated.chunks} <= {1, 2} and replicated.chunks
    leaf.chunks = (8,)
    split = schedule_broadcast([needs_of("a", view, dict(zip(rows, [{0}, {1}], strict=True)))], 3, 1 << 20)
    assert len(split.unshared) == 1
