"""The most memory that a process can have, and the arrays that are refused because they are larger."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files import memory


def test_limits_are_those_of_a_group_and_of_the_groups_around_it(tmp_path):
    (tmp_path / "jobs/run").mkdir(parents=True)
    (tmp_path / "memory/old").mkdir(parents=True)
    (tmp_path / "jobs/run/memory.max").write_text("max\n")
    (tmp_path / "jobs/memory.max").write_text("500\n")
    (tmp_path / "memory.max").write_text("900\n")
    (tmp_path / "memory/old/memory.limit_in_bytes").write_text("300\n")
    assert list(memory.cgroup_limits("0::/jobs/run", tmp_path)) == [500, 900]
    assert list(memory.cgroup_limits("4:cpu,memory:/old\n2:cpu:/old", tmp_path)) == [300]


def test_an_array_beyond_the_memory_is_refused_before_it_is_allocated():
    with pytest.raises(LimitExceededError, match="float32"):
        memory.empty_array((1 << 45,), np.dtype(np.float32))
    assert memory.empty_array((2, 3), np.dtype(np.int8)).shape == (2, 3)


DTYPES = [
    *np.typecodes["All"].replace("O", "").replace("V", ""),
    *(name for name in vars(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type) and "info" not in name),
]


@pytest.mark.parametrize("name", DTYPES)
def test_strides_of_every_dtype_are_those_of_slices(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name) or "S3")
    dtype = dtype if dtype.itemsize else np.dtype((dtype.type, 3))
    values = np.frombuffer(bytes(range(24)) * dtype.itemsize, dtype).reshape(4, 6)
    view = memory.strided(values, (3, 2), (values.strides[1] * 2, values.strides[0]), writeable=False)
    assert view.dtype == dtype and not view.flags.writeable
    assert view.tobytes() == values[:2, :6:2].T.tobytes()
    copy = values.copy()
    memory.strided(copy, (24,), (dtype.itemsize,))[:] = copy.reshape(-1)[::-1].copy()
    assert copy.tobytes() == values.reshape(-1)[::-1].tobytes()


def test_strides_of_objects():
    values = np.array([[1, "a"], [None, ()]], object)
    assert memory.strided(values, (2,), (sum(values.strides),)).tolist() == [1, ()]


def test_errors_about_memory_get_the_file_and_the_leaf():
    with pytest.raises(LimitExceededError) as caught, memory.naming_memory_errors("/file", "w"):
        raise MemoryError("full")
    assert (caught.value.path, caught.value.leaf) == ("/file", "w")
    with pytest.raises(LimitExceededError) as caught, memory.naming_memory_errors("/file", "w"):
        raise LimitExceededError("known", path="/other", leaf="v")
    assert (caught.value.path, caught.value.leaf) == ("/other", "v")


def page_advice(array):
    """What the kernel was asked about huge pages for the middle of an array: "hg" for them, "nh" against them."""
    middle, is_inside = array.ctypes.data + array.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            low, high = (int(end, 16) for end in name.split("-"))
            is_inside = low <= middle < high
        elif name == "VmFlags:" and is_inside:
            return {"hg", "nh"} & set(rest)
    raise AssertionError("no mapping holds the array")


def test_large_arrays_are_in_small_pages_unless_the_user_decides(monkeypatch):
    """Fresh huge pages cost several times as much on virtual machines whose host gives memory as it is touched."""
    monkeypatch.delenv("NUMPY_MADVISE_HUGEPAGE", raising=False)
    for nbytes in (memory.HUGE_PAGE_BYTES, (5 << 20) + 77, 64 << 20):
        array = memory.empty_array((nbytes,), np.dtype(np.uint8))
        assert "hg" not in page_advice(array)
        array[...] = 3
        assert (array == 3).all()
    monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", "1")
    shape = (64 << 20,)
    assert page_advice(memory.empty_array(shape, np.dtype(np.uint8))) == page_advice(np.empty(shape, np.uint8))
