"""Reads of any boxes of a byte range into any buffers, with the checksums of several processes."""

import asyncio
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.concurrency import run_jobs
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import Box, box_shape, box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.readers.ranges import byte_range as _byte_range
from orbax_t5x.readers.ranges import windowed as _windowed
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.testing.leaf_reads import read_boxes, same_bits
from tests.support.array_strategies import random_bits
from tests.support.bundle_writer import DTYPES, np_dtype
from tests.support.byte_ranges import OFFSET, bytes_of, shapes_and_boxes, shrink, stored


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


@given(shapes_and_boxes(), st.sampled_from(sorted(DTYPES)), st.booleans(), st.sampled_from(["touched", "off"]))
@settings(max_examples=max(10, settings.default.max_examples // 10))
def test_copies_equal_reads(tmp_path_factory, case, dtype_name, swap, verify) -> None:
    """What is passed on, its checksum, and what verifies the source; or nothing is."""
    shape, boxes = case
    array = random_bits(shape, np_dtype(dtype_name))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        leaf = stored(tmp_path_factory.mktemp("leaf"), array, swap=swap)
        for box in boxes:
            copied = bytearray()
            positions = []

            def sink(start: int, data: np.ndarray, copied=copied, positions=positions) -> None:
                positions.append(start - len(copied))
                copied += data.tobytes()

            stats, expected = ReadStats(verify), ReadStats(verify)
            crc = leaf.copy_blocking(box, sink, stats)
            if crc is None:
                assert not copied and not stats.bytes_read
                continue
            out = np.empty(box_shape(box), array.dtype)
            leaf.read_blocking([Request(box, out)], expected)
            assert copied == out.tobytes() and crc == array_crc(out)
            flat = np.arange(array.size).reshape(shape)[box_slices(box)]
            assert not flat.size or set(positions) == {int(flat.flat[0]) * array.itemsize}
            assert stats.bytes_read == expected.bytes_read
            spans = [[(one.start, one.stop) for one in found.ranges(leaf)] for found in (stats, expected)]
            assert spans[0] == [(low[0], high[1]) for low, high in zip(spans[1][:1], spans[1][-1:], strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_stored_as_in_memory_is_copied(tmp_path: Path, dtype: str) -> None:
    leaf = stored(tmp_path, random_bits((4, 6), np_dtype(dtype)))
    for box, is_copied in [(((0, 4), (0, 6)), True), (((1, 3), (0, 6)), True), (((1, 3), (0, 5)), False)]:
        assert (leaf.copy_blocking(box, lambda start, data: None, ReadStats()) is not None) is is_copied


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
def test_processes_verify_together_what_each_read_in_part(tmp_path_factory, mesh, damage: bool, max_gap: int) -> None:
    shape, processes = mesh
    array = random_bits(shape, np.dtype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setattr(_byte_range, "MAX_GAP_BYTES", max_gap)
        patch.setattr(_windowed, "MAX_GAP_BYTES", max_gap)
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
    file = LocalFiles(tmp_path).file("file")
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
