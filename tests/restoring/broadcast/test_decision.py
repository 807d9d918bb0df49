"""Requests and bytes of both ways, against counts by hand; and what is decided by them."""

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from benchmarks.scale_model import FORMATS, Job, Stored, predict
from orbax_t5x.lazy import as_view
from orbax_t5x.readers.ranges.byte_range import WINDOW_BYTES
from orbax_t5x.restoring.broadcast.chunks import ReadCounts, leaf_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds, StoreKind, Stores
from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast
from orbax_t5x.restoring.plan import PlanEntry
from tests.support.http_store import serving
from tests.support.memory_checkpoint import AwaitedLeaf

ROWS, COLUMNS = 512, 4096
NBYTES = ROWS * COLUMNS * 4
WINDOWS = NBYTES // WINDOW_BYTES
WHOLE = ((0, ROWS), (0, COLUMNS))


def decided(needers, store, chunks=None):
    """The decision about one array, given the processes that need each box."""
    leaf = AwaitedLeaf("w", np.broadcast_to(np.float32(0), (ROWS, COLUMNS)), chunks)
    view = as_view(leaf)
    entry = PlanEntry("w", ("w",), view.shape, view.dtype, None, "read", view=view, leaves=view.leaves())
    needs = [EntryNeeds(entry, tuple(needers), tuple(needers.values()))]
    schedule = schedule_broadcast(needs, 4, 1 << 28, Stores(store, store))
    assert schedule.unshared == (() if schedule.decisions["w"].is_broadcast else (entry,))
    return schedule.decisions["w"]


@pytest.mark.parametrize("store", StoreKind)
def test_replicas_are_read_once_but_from_local_disks(store):
    decision = decided({WHOLE: (0, 1, 2, 3)}, store)
    assert decision.own == (4 * WINDOWS, 4 * NBYTES)
    assert decision.once == (WINDOWS, NBYTES)
    assert decision.bytes_sent == 3 * NBYTES
    assert decision.is_broadcast == (store is not StoreKind.LOCAL)


@pytest.mark.parametrize("store", StoreKind)
def test_rows_of_their_own_are_read_by_each(store):
    rows = {((128 * i, 128 * (i + 1)), (0, COLUMNS)): (i,) for i in range(4)}
    decision = decided(rows, store)
    assert decision.own == (WINDOWS, NBYTES) and not decision.is_broadcast


@pytest.mark.parametrize("store", StoreKind)
def test_columns_of_byte_ranges_are_requests_without_end(store):
    """A row of a column shard is 4 KiB, with the others' shards between."""
    columns = {((0, ROWS), (1024 * i, 1024 * (i + 1))): (i,) for i in range(4)}
    decision = decided(columns, store)
    assert decision.own == (4 * ROWS, NBYTES)
    assert decision.once.requests < 20 and decision.once.nbytes == NBYTES
    assert decision.is_broadcast == (store is not StoreKind.LOCAL)


@pytest.mark.parametrize("store", StoreKind)
def test_chunks_that_every_process_needs_are_read_once(store):
    columns = {((0, ROWS), (1024 * i, 1024 * (i + 1))): (i,) for i in range(4)}
    decision = decided(columns, store, chunks=(64, COLUMNS))
    assert decision.own == (4 * ROWS // 64, 4 * NBYTES)
    assert decision.once == (ROWS // 64, NBYTES)
    assert decision.is_broadcast == (store is not StoreKind.LOCAL)


@pytest.mark.parametrize("layout", ["rows", "columns", "replicated"])
@pytest.mark.parametrize("broadcast", ["auto", True])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_processes_send_the_requests_of_one(format, broadcast, layout):
    """Small leaves, whose rows each of many processes would read, and leaves of many windows."""
    shapes = {f"small{number}": (512, 32 + number) for number in range(20)} | {"large": (4096, 1024), "step": ()}
    stored = Stored.of(FORMATS[format], shapes)
    (one,) = predict(stored, Job(1, 1, layout, False))
    for processes in (2, 8, 64):
        counts = predict(stored, Job(processes, 2, layout, broadcast))
        assert sum(count.data for count in counts) <= 1.2 * one.data
        assert sum(count.nbytes for count in counts) == one.nbytes


def test_counts_of_a_leaf():
    leaf = AwaitedLeaf("w", np.zeros((8, 4096), np.float32))
    assert leaf_reads(leaf, [((0, 8), (0, 4096))]) == ReadCounts(1, 8 * 16384)
    assert leaf_reads(leaf, [((2, 5), (0, 4096))]) == ReadCounts(1, 3 * 16384)
    assert leaf_reads(leaf, [((0, 8), (0, 8))]) == ReadCounts(8, 8 * 32)
    assert leaf_reads(leaf, [((0, 0), (0, 8))]) == ReadCounts(0, 0)
    # Gaps below 4 KiB are read over.
    narrow = AwaitedLeaf("w", np.zeros((8, 64), np.float32))
    assert leaf_reads(narrow, [((0, 8), (0, 32))]) == ReadCounts(1, 7 * 256 + 128)
    # Chunks at the edges are smaller, and are chunks.
    chunked = AwaitedLeaf("w", np.zeros((10, 10), np.float32), (4, 4))
    assert leaf_reads(chunked, [((0, 10), (0, 10))]) == ReadCounts(9, 400)


BOXES = [((0, 896), (0, 1024)), ((100, 700), (0, 1024)), ((10, 20), (0, 2)), ((0, 896), (0, 600)), ((3, 3), (0, 2))]


@pytest.mark.parametrize("box", BOXES)
def test_counts_of_a_remote_leaf_are_what_the_server_counts(tmp_path, box):
    """The whole array of 3.5 MiB, rows of it, columns far from each other and near, and nothing."""
    array = np.arange(896 * 1024, dtype=np.float32).reshape(896, 1024)
    safetensors.numpy.save_file({"w": array}, tmp_path / "m.safetensors")
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/m.safetensors") as checkpoint:
        leaf = checkpoint.leaves["w"]
        store.forget()
        found = as_view(leaf)[tuple(slice(*one) for one in box)].get()
        np.testing.assert_array_equal(found, array[tuple(slice(*one) for one in box)])
        assert leaf_reads(as_view(leaf).leaves()[0], [box]) == ReadCounts(len(store.log), store.bytes_sent)
