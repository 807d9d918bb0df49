"""Windows join near ranges of a file, are read once each, and serve the reads of the thread that holds them."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.errors import CheckpointGoneError
from orbax_t5x.files.places import files_at
from orbax_t5x.files.windows import MAX_GAP_BYTES, WINDOW_BYTES, holding, is_held, read_windows, windows_of

RANGES = st.lists(
    st.tuples(st.integers(0, 1 << 22), st.integers(0, 1 << 18)).map(lambda one: (one[0], sum(one))), max_size=40
)


@given(RANGES)
def test_each_range_is_in_one_window_and_no_window_reads_over_more_than_small_gaps(ranges):
    windows = list(windows_of(ranges))
    assert sorted(number for window in windows for number in window.members) == list(range(len(ranges)))
    for window in windows:
        inside = sorted(ranges[number] for number in window.members)
        assert (window.start, window.stop) == (inside[0][0], max(stop for _, stop in inside))
        assert window.size <= max(WINDOW_BYTES, max(stop - start for start, stop in inside))
        reached = window.start
        for start, stop in inside:
            assert start - reached < MAX_GAP_BYTES
            reached = max(reached, stop)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "data").write_bytes(bytes(range(256)) * 64)
    files = files_at(str(tmp_path))
    yield files.file("data")
    files.close()


def test_reads_inside_a_held_window_take_its_bytes_and_all_others_the_file(file):
    window = np.full(100, 7, np.uint8)
    out = np.zeros(10, np.uint8)
    with holding(file, 50, window):
        assert is_held(file)
        assert bytes(file.read(50, 100)) == bytes(window)
        file.read_into(140, [out[:4], out[4:]])
        assert (out == 7).all()
        assert bytes(file.read(141, 10)) == bytes(range(141, 151)), "the end is outside"
        assert bytes(file.read(49, 10)) == bytes(range(49, 59))
        others = []
        thread = threading.Thread(target=lambda: others.append(bytes(file.read(50, 3))))
        thread.start()
        thread.join()
        assert others == [bytes(range(50, 53))], "another thread holds nothing"
    assert not is_held(file)
    assert bytes(file.read(50, 3)) == bytes(range(50, 53))


def test_windows_are_read_once_each_and_whoever_holds_one_proves_the_file(file, tmp_path):
    windows = list(windows_of([(0, 10), (12, 20), (9000, 9100)]))
    found = [(window.members, data.tobytes()) for window, data in read_windows(file, windows)]
    content = bytes(range(256)) * 64
    assert found == [([0, 1], content[:20]), ([2], content[9000:9100])]
    os.utime(tmp_path / "data", (1, 1))
    with holding(file, 0, np.zeros(5, np.uint8)):
        file.check_unchanged()
    with pytest.raises(CheckpointGoneError, match="changed"):
        file.check_unchanged()


def test_a_closed_checkpoint_is_not_read_from_memory(tmp_path):
    (tmp_path / "data").write_bytes(b"0123")
    files = files_at(str(tmp_path))
    file = files.file("data")
    files.close()
    with holding(file, 0, np.zeros(4, np.uint8)), pytest.raises(ValueError, match="closed"):
        file.read_into(0, [np.zeros(2, np.uint8)])
