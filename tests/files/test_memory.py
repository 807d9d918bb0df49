"""Arrays of shapes that files claim, at any strides, and errors about memory."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files import memory


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


class Clock:
    """Says that touching memory took as long as a test sets: a second in small pages, then `costs` in huge ones."""

    def __init__(self, *costs):
        self._costs = iter((1.0, *costs))
        self._now = 0.0
        self._is_end = False

    def __call__(self):
        self._now += next(self._costs) if self._is_end else 0
        self._is_end = not self._is_end
        return self._now


BYTE = np.dtype(np.uint8)
MIB = 1 << 20


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.delenv("NUMPY_MADVISE_HUGEPAGE", raising=False)
    return lambda *costs: monkeypatch.setattr(memory, "_pages", memory.PageChoice(Clock(*costs)))


def advice_of(mebibytes, dtype=BYTE):
    array = memory.empty_array((mebibytes * MIB // dtype.itemsize,), dtype)
    advice = page_advice(array)
    array[...] = 3
    assert (array == 3).all()
    return advice


def test_large_arrays_are_in_small_pages_before_a_trial(pages):
    pages()
    for mebibytes in (4, 5, 40):  # may not be fresh memory, which tells nothing
        assert "hg" not in advice_of(mebibytes)


def test_huge_pages_are_left_where_each_part_is_clearly_cheaper(pages):
    pages(*[0.4] * 9)
    numpys = page_advice(np.empty(64 * MIB, np.uint8))
    assert [advice_of(size) for size in (64, 48, 8)] == [numpys] * 3


@pytest.mark.parametrize("costs", [[3.0], [0.9], [0.4, 3.0]])
def test_the_first_part_that_is_dear_ends_huge_pages(pages, costs):
    pages(*costs)  # asked once more, the clock would raise
    assert "hg" not in advice_of(128)
    assert "hg" not in advice_of(64)
    assert "hg" not in advice_of(8)


def test_the_variable_of_numpy_decides_before_any_trial(pages, monkeypatch):
    pages()
    monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", "1")
    assert advice_of(64) == page_advice(np.empty(64 * MIB, np.uint8))


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4), np.dtype(np.complex128)])
def test_arrays_of_any_dtype_can_be_the_first(pages, dtype):
    pages(3.0)
    assert "hg" not in advice_of(80, dtype)


def test_arrays_of_objects_tell_nothing(pages):
    pages()
    assert memory.empty_array((8 * MIB,), np.dtype(object)).nbytes == 64 * MIB
