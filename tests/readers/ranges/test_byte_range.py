"""Boxes, runs, windows, checksums and reads of arrays in byte ranges: NumPy and google_crc32c are the oracles."""

import asyncio
import concurrent.futures
import errno
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from orbax_t5x.concurrency import run_jobs
from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError, CorruptCheckpointError
from orbax_t5x.lazy.box import Box, box_shape, box_slices, full_box
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges import byte_range as _byte_range
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.byte_runs import WindowGrid, byte_strides, locate_box, split_ends, union_runs
from orbax_t5x.readers.ranges.coverage import cover, fold_columns, uncovered
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.storage import crc32c as _crc
from orbax_t5x.storage.files import FileSet
from orbax_t5x.storage.paths import Root
from orbax_t5x.testing.leaf_reads import read_boxes, same_bits
from tests.support.array_strategies import random_bits
from tests.support.bundle_writer import DTYPES, np_dtype

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((low, high) for low, high in ends)


@st.composite
def shapes_and_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), min_size=1, max_size=5))


def bytes_of(shape: tuple[int, ...], itemsize: int, boxes: list[Box]) -> np.ndarray:
    """For each byte of the array, whether a box holds it."""
    held = np.zeros(shape, bool)
    for box in boxes:
        held[box_slices(box)] = True
    return np.repeat(held.reshape(-1), itemsize)


def gaps_of(read: np.ndarray, wanted: np.ndarray) -> list[int]:
    """Lengths of the stretches read over."""
    return [len(list(group)) for over, group in itertools.groupby(read & ~wanted) if over]


class TestGeometry:
    @given(shapes_and_boxes(), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3, 8, 40]))
    def test_runs_are_the_union_with_small_gaps(self, case, itemsize, max_gap) -> None:
        shape, boxes = case
        wanted = bytes_of(shape, itemsize, boxes)
        runs, count = union_runs(shape, itemsize, boxes, max_gap)
        ranges = [one for run in runs for one in run.ranges()]
        assert count == wanted.sum()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges)), "file order, disjoint"
        read = np.zeros_like(wanted)
        for start, stop in ranges:
            assert wanted[start] and wanted[stop - 1], "no read begins or ends in a gap"
            read[start:stop] = True
        assert (read >= wanted).all()
        assert max(gaps_of(read, wanted), default=0) < max(1, max_gap)

    @given(shapes_and_boxes(), st.sampled_from([1, 4]), st.sampled_from([0, 3, 8, 40]))
    def test_split_ends_reads_the_same_and_cuts_at_wanted_edges(self, case, itemsize, max_gap) -> None:
        shape, boxes = case
        runs, _ = union_runs(shape, itemsize, boxes, max_gap)
        wanted, _ = union_runs(shape, itemsize, boxes, 0)
        before = [one for run in runs for one in run.ranges()]
        after = [one for run in split_ends(runs, wanted) for one in run.ranges()]
        starts = {start for run in wanted for start, _ in run.ranges()}
        stops = {stop for run in wanted for _, stop in run.ranges()}
        assert [byte for one in after for byte in range(*one)] == [byte for one in before for byte in range(*one)]
        for start, stop in before:
            inside = [one for one in after if start <= one[0] < stop]
            assert inside[0][1] in stops and inside[-1][0] in starts

    @given(shapes_and_boxes(), st.sampled_from([1, 4]), st.sampled_from([1, 4, 16, 100]))
    def test_windows_are_boxes_and_byte_ranges_at_once(self, case, itemsize, max_bytes) -> None:
        shape, boxes = case
        assume(0 not in shape)
        runs, _ = union_runs(shape, itemsize, boxes, 8)
        numbers = np.arange(int(np.prod(shape, dtype=int)) * itemsize).reshape(*(shape or (1,)), itemsize)
        grid = WindowGrid(shape, itemsize, max_bytes)
        pieces = []
        for window in grid.windows(runs):
            assert window.stop - window.start <= max(max_bytes, itemsize)
            inside = numbers[(*window.outer, slice(window.low, window.high))].reshape(-1)
            assert inside.tolist() == list(range(window.start, window.stop))
            assert all(window.start <= start < stop <= window.stop for start, stop in window.pieces)
            pieces += window.pieces
        assert [b for one in pieces for b in range(*one)] == [
            b for run in runs for one in run.ranges() for b in range(*one)
        ]

    @given(shapes_and_boxes(), st.sampled_from([1, 4]))
    def test_a_box_is_one_range_where_its_bytes_are(self, case, itemsize) -> None:
        shape, (box, *_) = case
        held = np.flatnonzero(bytes_of(shape, itemsize, [box]))
        assume(held.size)
        placed = locate_box(box, box_shape(box), shape, byte_strides(shape, itemsize))
        assert placed == (held[0], held[-1] + 1 - held[0] == held.size)

    def test_boxes_outside_are_refused(self) -> None:
        strides = byte_strides((4,), 1)
        for box, extents in (((0, 5),), (5,)), (((-1, 2),), (3,)), (((0, 2),), (3,)), ((), ()), (((3, 1),), (-2,)):
            assert locate_box(box, extents, (4,), strides) is None

    def test_columns_of_a_matrix_are_one_run_however_high_it_is(self) -> None:
        runs, wanted = union_runs((10**9, 4, 10**6), 4, [((0, 10**9), (0, 4), (5, 10))], 4096)
        assert len(runs) == 1 and wanted == 10**9 * 4 * 5 * 4


class TestChecksums:
    @given(st.lists(st.binary(max_size=40), max_size=60))
    @example([bytes([number]) * number for number in range(100)])
    def test_combined_is_that_of_the_concatenation(self, parts: list[bytes]) -> None:
        crcs = [google_crc32c.value(part) for part in parts]
        whole = google_crc32c.value(b"".join(parts))
        assert _crc.combine(crcs, [len(part) for part in parts]) == whole
        assert _crc.unmask(_crc.mask(whole)) == whole

    @given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**40)), min_size=1, max_size=80))
    def test_the_vectorised_way_equals_the_plain_one(self, parts: list[tuple[int, int]]) -> None:
        crcs, lengths = zip(*parts, strict=True)
        plain = functools.reduce(lambda whole, part: _crc.combine([whole, part[0]], [0, part[1]]), parts, 0)
        padded = ([0] * 40 + list(crcs), [0] * 40 + list(lengths))
        assert _crc.combine(*padded) == _crc.combine(*map(np.asarray, padded)) == plain

    def test_gigabytes_of_zeros(self) -> None:
        zeros = google_crc32c.value(bytes(1 << 20))
        whole = functools.reduce(lambda crc, _: google_crc32c.extend(crc, bytes(1 << 20)), range(100), 0)
        assert _crc.combine([zeros] * 100, [1 << 20] * 100) == whole

    def test_different_counts_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 checksums for 1 lengths"):
            _crc.combine([1, 2], [3])


DATA = bytes(np.random.default_rng(0).integers(0, 256, 120, np.uint8))


def part(start: int, stop: int) -> ChecksummedRange:
    return ChecksummedRange(start, stop, google_crc32c.value(DATA[start:stop]))


class TestCoverage:
    @given(
        st.lists(st.sets(st.integers(1, 119), max_size=8), min_size=1, max_size=3),
        st.randoms(use_true_random=False),
        st.integers(0, 40),
    )
    def test_any_partitions_together_cover(self, cuts: list[set[int]], random, repeats: int) -> None:
        parts = [part(*ends) for edges in cuts for ends in itertools.pairwise(sorted({0, 120, *edges}))]
        parts += random.choices(parts, k=repeats)
        random.shuffle(parts)
        assert cover(parts, 120) == (google_crc32c.value(DATA), True, None)
        assert uncovered(parts, 120) == []

    @given(st.sets(st.integers(1, 119), min_size=2, max_size=8), st.data())
    def test_a_missing_part_leaves_it_open(self, edges: set[int], data) -> None:
        parts = [part(*ends) for ends in itertools.pairwise(sorted({0, 120, *edges}))]
        gone = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        assert cover(parts, 120) == (None, False, None)
        assert uncovered(parts, 120) == [(gone.start, gone.stop)]

    def test_what_lies_on_no_chain_is_not_verified(self) -> None:
        assert cover([part(0, 120), part(30, 60)], 120) == (google_crc32c.value(DATA), False, None)
        assert cover([part(0, 70), part(50, 120)], 120) == (None, False, None)

    def test_two_readings_that_differ(self) -> None:
        bad = ChecksummedRange(30, 60, part(30, 60).crc ^ 1)
        assert cover([part(0, 30), part(30, 60), bad, part(60, 120)], 120).conflict == (30, 60)
        finer = [part(0, 30), bad, part(60, 120), part(0, 60)]
        assert cover(finer, 120).conflict is not None

    @given(
        st.integers(1, 40),
        st.integers(1, 9),
        st.sets(st.integers(1, 8)),
        st.sets(st.integers(1, 39), max_size=2),
        st.randoms(use_true_random=False),
    )
    def test_columns_of_several_processes_cover_together(self, rows: int, width: int, cuts, row_cuts, random) -> None:
        data = random.randbytes(rows * width)
        whole = google_crc32c.value(data)

        def columns(low: int, high: int, first: int, last: int) -> list[ChecksummedRange]:
            starts = [row * width for row in range(first, last)]
            return [
                ChecksummedRange(at + low, at + high, google_crc32c.value(data[at + low : at + high])) for at in starts
            ]

        sides = list(itertools.pairwise(sorted({0, width, *(cut for cut in cuts if cut < width)})))
        heights = list(itertools.pairwise(sorted({0, rows, *(cut for cut in row_cuts if cut < rows)})))
        told = [fold_columns(columns(*side, *height)) for side in sides for height in heights]
        if len(sides) > 1:
            assert all(
                len(parts) == 1
                for parts, (low, high) in zip(told, heights * len(sides), strict=True)
                if high - low >= 16
            )
        parts = [part for process in told for part in process]
        random.shuffle(parts)
        assert cover(parts, len(data)) == (whole, True, None)
        assert cover([*parts, random.choice(parts)], len(data)) == (whole, True, None)
        gone = random.randrange(len(parts))
        assert cover(parts[:gone] + parts[gone + 1 :], len(data)).complete is False
        wrong = parts[gone]._replace(crc=parts[gone].crc ^ 1)
        assert cover([*parts[:gone], wrong, *parts[gone + 1 :]], len(data)).crc != whole
        assert cover([*parts, wrong], len(data)).conflict is not None

    def test_columns_that_do_not_fill_a_row_are_not_verified(self) -> None:
        rows = [ChecksummedRange(at, at + 2, 0) for at in range(0, 120, 6)]
        (folded,) = fold_columns(rows)
        assert folded[:2] == (0, 2) and folded[3:] == (6, 20)
        assert cover([folded], 120) == (None, False, None)
        assert cover([folded, part(0, 120)], 120) == (google_crc32c.value(DATA), False, None)
        assert fold_columns([folded]) == [folded]

    def test_nothing_is_covered_by_nothing(self) -> None:
        assert cover([], 0) == (0, True, None)
        assert cover([], 1) == (None, False, None)


# -- reading


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small arrays take every path: many windows, many jobs, gaps that matter."""
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_byte_range, "_WINDOW_BYTES", 64)
    monkeypatch.setattr(_byte_range, "_JOB_BYTES", 150)
    monkeypatch.setattr(_byte_range, "MAX_GAP_BYTES", 16)


OFFSET = 5


def stored(
    directory: Path, array: np.ndarray, *, swap: bool = False, verify: bool = True, damage: bool = False
) -> ByteRangeLeaf:
    """A leaf over a file that holds an array between other bytes; damaged, one bit in its middle is another."""
    data = array.tobytes()
    if swap:
        width = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
        data = np.frombuffer(data, f"u{width}").byteswap().tobytes()
    crc = google_crc32c.value(data) if verify else None
    if damage:
        middle = len(data) // 2
        data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
    (directory / "file").write_bytes(b"x" * OFFSET + data + b"y" * 9)
    file = FileSet(Root(directory)).file("file")
    return ByteRangeLeaf("leaf", ByteRange(file, OFFSET, array.shape, array.dtype, swap), crc)


def buffer_for(box: Box, dtype: np.dtype, kind: str) -> np.ndarray:
    shape = box_shape(box)
    if kind == "transposed":
        return np.zeros(shape[::-1], dtype).T
    if kind == "reversed" and shape:
        return np.zeros(shape, dtype)[::-1]
    if kind == "strided" and shape:
        return np.zeros((*shape[:-1], shape[-1] * 2), dtype)[..., ::2]
    return np.zeros(shape, dtype)


@pytest.mark.slow
@given(
    shapes_and_boxes(),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.sampled_from(["plain", "plain", "transposed", "reversed", "strided"]), min_size=5, max_size=5),
    st.booleans(),
    st.sampled_from(["touched", "full", "off"]),
)
@settings(max_examples=300)
def test_reads_equal_numpy(tmp_path_factory, case, dtype_name, kinds, swap, verify) -> None:
    shape, boxes = case
    array = random_bits(shape, np_dtype(dtype_name))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        leaf = stored(tmp_path_factory.mktemp("leaf"), array, swap=swap)
        requests = [Request(box, buffer_for(box, array.dtype, kind)) for box, kind in zip(boxes, kinds, strict=False)]
        stats = ReadStats(verify)
        asyncio.run(leaf.read_into(requests, stats))
        for box, out in requests:
            assert same_bits(np.ascontiguousarray(out).reshape(out.shape), array[box_slices(box)].copy())
        wanted = bytes_of(shape, array.dtype.itemsize, boxes)
        read_before = stats.bytes_read
        assert read_before == wanted.sum()
        verified = asyncio.run(leaf.verify_checksum(stats, stats.ranges(leaf)))
        if verify == "off":
            assert verified is None and not stats.ranges(leaf)
        elif wanted.all() or verify == "full":
            assert verified is True
            assert stats.bytes_read + stats.gap_bytes <= 2 * wanted.size
        else:
            # Gaps that were read over count: their bytes have been seen.
            assert verified is (stats.bytes_read + stats.gap_bytes == wanted.size and not wanted.size == 0)


@st.composite
def meshes(draw) -> tuple[tuple[int, ...], list[list[Box]]]:
    """A shape, and for each of some processes the boxes of its devices: sharded over any dimensions, replicas too."""
    rank = draw(st.integers(1, 3))
    splits = [draw(st.sampled_from([1, 1, 2, 4])) for _ in range(rank)]
    shape = tuple(split * draw(st.integers(1, 5)) for split in splits)
    steps = [[(k * size // n, (k + 1) * size // n) for k in range(n)] for size, n in zip(shape, splits, strict=True)]
    shards = [tuple(box) for box in itertools.product(*steps)] * draw(st.sampled_from([1, 2]))
    processes = draw(st.sampled_from([n for n in (1, 2, 4, 8) if len(shards) % n == 0]))
    each = len(shards) // processes
    order = draw(st.sampled_from(["blocks", "interleaved"]))
    pick = (lambda p: shards[p * each : (p + 1) * each]) if order == "blocks" else (lambda p: shards[p::processes])
    return shape, [sorted(set(pick(p))) for p in range(processes)]


@pytest.mark.slow
@given(meshes(), st.booleans(), st.sampled_from([0, 16, 200]))
@settings(max_examples=300)
def test_processes_verify_together_what_each_read_in_part(tmp_path_factory, mesh, damage: bool, max_gap: int) -> None:
    shape, processes = mesh
    array = random_bits(shape, np.dtype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setattr(_byte_range, "MAX_GAP_BYTES", max_gap)
        directory = tmp_path_factory.mktemp("leaf")
        leaf = stored(directory, array, damage=damage)
        parts = []
        for boxes in processes:
            reading = read_boxes_only(leaf, boxes)
            parts += reading.ranges(leaf)
        stats = ReadStats("touched")
        if damage:
            with pytest.raises(CorruptCheckpointError, match="crc32c"):
                asyncio.run(leaf.verify_checksum(stats, parts))
        else:
            assert asyncio.run(leaf.verify_checksum(stats, parts)) is True


def read_boxes_only(leaf: ByteRangeLeaf, boxes: list[Box]) -> ReadStats:
    stats = ReadStats("touched")
    leaf.read_blocking([Request(box, np.empty(box_shape(box), leaf.dtype)) for box in boxes], stats)
    return stats


def test_columns_over_processes_make_few_parts(tmp_path: Path) -> None:
    """Rows shorter than a gap are read as they lie; what each process records does not grow with the rows."""
    array = random_bits((20_000, 64), np.dtype(np.float32))
    leaf = stored(tmp_path, array)
    parts = []
    for column in range(0, 64, 16):
        stats = read_boxes_only(leaf, [((0, 20_000), (column, column + 16))])
        assert stats.bytes_read == array.nbytes // 4
        assert len(stats.ranges(leaf)) < 20
        parts += stats.ranges(leaf)
    assert asyncio.run(leaf.verify_checksum(ReadStats(), parts)) is True


def test_wide_columns_are_read_without_the_others(tmp_path: Path) -> None:
    array = random_bits((40, 4096), np.dtype(np.float32))
    leaf = stored(tmp_path, array)
    reading = read_boxes(leaf, [((0, 40), (1024, 2048))])
    assert same_bits(reading.arrays[0], array[:, 1024:2048].copy())
    assert (reading.stats.bytes_read, reading.stats.gap_bytes) == (array.nbytes // 4, 0)
    assert reading.verified is False
    parts = reading.stats.ranges(leaf)
    for box in (((0, 40), (0, 1024)), ((0, 40), (2048, 4096))):
        parts += read_boxes_only(leaf, [box]).ranges(leaf)
    assert asyncio.run(leaf.verify_checksum(ReadStats(), parts)) is True


def test_gaps_below_the_limit_are_read_over_and_counted_apart(tmp_path: Path) -> None:
    array = random_bits((20_000,), np.dtype(np.uint8))
    leaf = stored(tmp_path, array)
    near = read_boxes(leaf, [((0, 10),), ((4105, 4110),)])
    assert (near.stats.bytes_read, near.stats.gap_bytes) == (15, 4095)
    far = read_boxes(leaf, [((0, 10),), ((4106, 4110),)])
    assert (far.stats.bytes_read, far.stats.gap_bytes) == (14, 0)


def test_full_reads_what_is_missing_once(tmp_path: Path) -> None:
    array = random_bits((1000, 50), np.dtype(np.float32))
    leaf = stored(tmp_path, array)
    reading = read_boxes(leaf, [((100, 200), (0, 50))], "full")
    assert reading.verified is True and reading.stats.bytes_read == array.nbytes
    # Parts that overlap without a common edge: the whole is read again.
    parts = [*read_boxes_only(leaf, [((0, 600), (0, 50))]).ranges(leaf)]
    parts += read_boxes_only(leaf, [((400, 1000), (0, 50))]).ranges(leaf)
    assert asyncio.run(leaf.verify_checksum(ReadStats("touched"), parts)) is False
    assert asyncio.run(leaf.verify_checksum(ReadStats("full"), parts)) is True


def test_no_checksum_is_said_to_be_none(tmp_path: Path) -> None:
    leaf = stored(tmp_path, random_bits((4, 4), np.dtype(np.float32)), verify=False)
    for verify in ("touched", "full", "off"):
        assert read_boxes(leaf, verify=verify).verified is None


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_scalars_and_empties(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = random_bits(shape, np.dtype(np.int64))
    reading = read_boxes(stored(tmp_path, array))
    assert same_bits(reading.arrays[0], array) and reading.verified is True


def test_a_bool_that_is_neither_is_damage(tmp_path: Path) -> None:
    array = np.array([0, 1, 2, 1], np.uint8)
    leaf = stored(tmp_path, array)
    leaf = ByteRangeLeaf("leaf", ByteRange(leaf.range.file, OFFSET, (4,), np.dtype(bool)), leaf.crc)
    with pytest.raises(CorruptCheckpointError, match="a bool is stored as 2"):
        read_boxes(leaf)


def test_bits_above_an_int4_do_not_count(tmp_path: Path) -> None:
    stored(tmp_path, np.array([0xFF, 0x0F, 0x37], np.uint8))
    file = FileSet(Root(tmp_path)).file("file")
    leaf = ByteRangeLeaf("leaf", ByteRange(file, OFFSET, (3,), np_dtype("int4")))
    (out,) = read_boxes(leaf).arrays
    assert out.view(np.uint8).tolist() == [0x0F, 0x0F, 0x07]
    assert out.astype(int).tolist() == [-1, -1, 7]


def test_a_buffer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    leaf = stored(tmp_path, random_bits((4, 4), np.dtype(np.float32)))
    for box, out in (
        (((0, 4), (0, 4)), np.zeros((4, 4), np.float64)),
        (((0, 4), (0, 4)), np.zeros((4, 3), np.float32)),
        (((0, 4), (0, 5)), np.zeros((4, 5), np.float32)),
    ):
        with pytest.raises(ValueError, match="a buffer of"):
            leaf.read_blocking([Request(box, out)], ReadStats())


# -- faults


def test_short_reads_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_windows) -> None:
    array = random_bits((60, 7), np.dtype(np.float32))
    leaf = stored(tmp_path, array)
    real = os.preadv

    def short(fd, buffers, offset):
        first = buffers[0].reshape(-1).view(np.uint8)
        return real(fd, [first[: max(1, first.size // 2)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    for boxes in (
        [full_box(array.shape)],
        [((0, 30), (0, 7)), ((31, 60), (0, 7))],
        [((0, 60), (1, 3)), ((0, 60), (3, 6))],
    ):
        reading = read_boxes(leaf, boxes)
        for box, out in zip(boxes, reading.arrays, strict=True):
            assert same_bits(out, array[box_slices(box)].copy())


@pytest.mark.parametrize("boxes", [None, [((0, 60), (1, 3))]])
def test_an_io_error_names_file_and_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boxes, small_windows) -> None:
    leaf = stored(tmp_path, random_bits((60, 7), np.dtype(np.float32)))
    calls = itertools.count()
    real = os.preadv

    def fail(fd, buffers, offset):
        if next(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointIOError, match="Input/output error") as caught:
        read_boxes(leaf, boxes)
    assert caught.value.errno == errno.EIO
    assert caught.value.leaf == "leaf" and caught.value.path == str(tmp_path / "file")
    monkeypatch.undo()
    assert read_boxes(leaf, boxes)


def test_a_stale_handle_is_a_vanished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = stored(tmp_path, random_bits((6, 7), np.dtype(np.float32)))

    def fail(fd, buffers, offset):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointGoneError, match="vanished"):
        read_boxes(leaf)


def test_a_file_cut_after_opening_is_gone(tmp_path: Path) -> None:
    leaf = stored(tmp_path, random_bits((60, 7), np.dtype(np.float32)))
    assert read_boxes(leaf).verified
    os.truncate(tmp_path / "file", 100)
    with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened"):
        read_boxes(leaf)


def replace_with(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        other = path.with_name("other")
        other.write_bytes(data(path.read_bytes()))
        os.utime(other, ns=(1, 1))
        other.replace(path)

    return act


@pytest.mark.parametrize("longer", [b"", b"more"])
def test_a_file_replaced_before_the_first_read_is_gone(tmp_path: Path, longer: bytes) -> None:
    leaf = stored(tmp_path, random_bits((60, 7), np.dtype(np.float32)))
    replace_with(lambda data: data + longer)(tmp_path / "file")
    with pytest.raises(CheckpointGoneError, match="was replaced"):
        read_boxes(leaf)


def test_a_file_replaced_between_reads_is_read_as_it_was(tmp_path: Path) -> None:
    array = random_bits((60, 7), np.dtype(np.float32))
    leaf = stored(tmp_path, array)
    read_boxes(leaf)
    replace_with(lambda data: bytes(len(data)))(tmp_path / "file")
    assert same_bits(read_boxes(leaf).arrays[0], array)


def test_a_file_gone_before_the_first_read(tmp_path: Path) -> None:
    leaf = stored(tmp_path, random_bits((6, 7), np.dtype(np.float32)))
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointGoneError, match="vanished"):
        read_boxes(leaf)


def test_reading_after_close_is_a_value_error(tmp_path: Path) -> None:
    leaf = stored(tmp_path, random_bits((6, 7), np.dtype(np.float32)))
    files = leaf.range.file._files
    read_boxes(leaf)
    files.close()
    files.close()
    with pytest.raises(ValueError, match="closed"):
        read_boxes(leaf)


def test_few_files_are_open_at_a_time(tmp_path: Path, descriptors: set[int]) -> None:
    files = FileSet(Root(tmp_path), max_open=3)
    leaves = []
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(bytes([number] * 8))
        leaves.append(ByteRangeLeaf("leaf", ByteRange(files.file(f"{number}"), 0, (8,), np.dtype(np.uint8))))
    for number, leaf in [*enumerate(leaves), *enumerate(leaves)]:
        assert read_boxes(leaf).arrays[0].tolist() == [number] * 8
        assert 1 <= len(descriptors) <= 3
    files.close()
    assert not descriptors


def test_without_descriptors_left_idle_files_are_closed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: set[int]
) -> None:
    files = FileSet(Root(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    one, two = files.file("a"), files.file("b")
    assert one.read(0, 1) == b"a"
    real, calls = os.open, itertools.count()

    def scarce(*args, **kwargs):
        if next(calls) == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", scarce)
        assert two.read(0, 1) == b"b"
    assert len(descriptors) == 1
    files.close()
    assert not descriptors


def test_a_file_closed_while_it_is_read_is_closed_afterwards(tmp_path: Path, descriptors: set[int]) -> None:
    (tmp_path / "a").write_bytes(b"a")
    files = FileSet(Root(tmp_path))
    file = files.file("a")
    fd = files.acquire(file, None)
    files.close()
    assert os.pread(fd, 1, 0) == b"a" and descriptors == {fd}
    files.release(file)
    assert not descriptors


def test_many_threads_share_few_descriptors_and_a_close_ends_them(
    tmp_path: Path, small_windows, descriptors: set[int]
) -> None:
    """Right values or, once closed, a ValueError; no descriptor is left or closed twice."""
    files = FileSet(Root(tmp_path), max_open=2)
    array = random_bits((40, 9), np.dtype(np.float32))
    leaves = []
    for number in range(6):
        (tmp_path / f"{number}").write_bytes(array.tobytes())
        leaf_range = ByteRange(files.file(f"{number}"), 0, array.shape, array.dtype)
        leaves.append(ByteRangeLeaf("leaf", leaf_range, google_crc32c.value(array.tobytes())))
    rounds = itertools.count()

    def read(number: int) -> str:
        for turn in range(60):
            leaf = leaves[(number + turn) % len(leaves)]
            out = np.empty(array.shape, array.dtype)
            boxes = [((0, 40), (0, 4)), ((0, 40), (4, 9))]
            try:
                leaf.read_blocking([Request(box, out[box_slices(box)]) for box in boxes], ReadStats())
            except ValueError as error:
                return str(error)
            assert same_bits(out, array)
            if next(rounds) == 300:
                files.close()
        return "done"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(read, range(8)))
    assert all(end == "done" or "closed" in end for end in ends)
    assert any("closed" in end for end in ends)
    assert not descriptors


class TestJobs:
    def test_all_are_done_once(self) -> None:
        jobs = (functools.partial(lambda number: number, number) for number in range(100))
        assert sorted(run_jobs(jobs)) == list(range(100))

    def test_the_first_error_is_raised_and_no_job_runs_on(self) -> None:
        begun = []

        def job(number: int) -> None:
            begun.append(number)
            if number == 5:
                raise KeyError(number)

        with pytest.raises(KeyError):
            run_jobs(functools.partial(job, number) for number in range(10_000))
        assert len(begun) < 10_000

    def test_jobs_may_start_jobs(self) -> None:
        def outer(number: int) -> int:
            return sum(run_jobs(functools.partial(int, number) for _ in range(20)))

        assert sum(run_jobs(functools.partial(outer, number) for number in range(20))) == 20 * 190
