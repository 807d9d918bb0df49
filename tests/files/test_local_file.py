"""Open files: short reads, errors, replacement, closing, and few descriptors."""

import concurrent.futures
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import box_slices, full_box
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.testing.leaf_reads import read_boxes, same_bits
from tests.support.array_strategies import random_bits
from tests.support.byte_ranges import shrink, stored


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small arrays take every path: many windows, many jobs, gaps that matter."""
    shrink(monkeypatch)


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
    files = leaf.range.file._root
    read_boxes(leaf)
    files.close()
    files.close()
    with pytest.raises(ValueError, match="closed"):
        read_boxes(leaf)


def test_few_files_are_open_at_a_time(tmp_path: Path, descriptors: set[int]) -> None:
    files = LocalFiles(tmp_path, max_open=3)
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
    files = LocalFiles(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    one, two = files.file("a"), files.file("b")
    assert one.read(0, 1) == b"a"
    real, calls = os.open, itertools.count()

    def scarce(*args, **kwargs):
        if next(calls) < 1:
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
    files = LocalFiles(tmp_path)
    file = files.file("a")
    fd = files._opened.acquire(file, None)
    files.close()
    assert os.pread(fd, 1, 0) == b"a" and descriptors == {fd}
    files._opened.release(file)
    assert not descriptors


@pytest.mark.slow
def test_many_threads_share_few_descriptors_and_a_close_ends_them(
    tmp_path: Path, small_windows, descriptors: set[int]
) -> None:
    """Right values or, once closed, a ValueError; no descriptor is left or closed twice."""
    files = LocalFiles(tmp_path, max_open=2)
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
