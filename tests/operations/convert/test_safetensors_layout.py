"""The layout of safetensors files is planned first."""

import json

import numpy as np
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.operations.convert import safetensors_layout
from orbax_t5x.operations.convert.safetensors_layout import Tensor, plan_files, unsupported_reason
from tests.support.conversions import names_in
from tests.support.memory_checkpoint import checkpoint


def assert_equals(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape, name
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_a_large_model_is_several_files_and_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_layout, "MAX_FILE_BYTES", 100)
    arrays = {f"w{i}": np.full(10, i, np.float32) for i in range(5)} | {"big": np.ones(40, np.float32)}
    ot.convert(checkpoint(arrays), tmp_path / "out", format="safetensors")
    files = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert names_in(tmp_path / "out") == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 90, "total_size": 360}
    loaded = {}
    for file in files:
        arrays_of_file = safetensors.numpy.load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == arrays_of_file.keys()
        assert len(arrays_of_file) == 1 or sum(array.nbytes for array in arrays_of_file.values()) <= 100
        loaded |= arrays_of_file
    assert_equals(loaded, arrays)
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert_equals({name: view.get() for name, view in opened.leaves.items()}, arrays)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 100))
@example([25, 25], 100)
def test_no_file_is_larger_than_the_bound_but_for_a_single_tensor(sizes, bound):
    tensors = [Tensor(f"t{i}", (size,), np.dtype(np.int16)) for i, size in enumerate(sizes)]
    files = plan_files(tensors, bound)
    assert sorted(name for file in files for name in file.starts) == sorted(tensor.name for tensor in tensors)
    for file, following in zip(files, [*files[1:], None], strict=True):
        data = file.size - len(file.head)
        assert data <= bound or len(file.starts) == 1
        if following is not None:
            first = min(following.starts)
            assert data + 2 * sizes[int(first[1:])] > bound
    assert len({file.name for file in files}) == len(files)


@given(
    st.dictionaries(
        st.text("abc/\u00e9", max_size=4), st.sampled_from(("float64", "float32", "int16", "bool")), min_size=1
    )
)
def test_a_file_is_laid_out_as_by_the_library(dtypes):
    arrays = {name: np.zeros(len(name) + 1, dtype) for name, dtype in dtypes.items()}
    (file,) = plan_files([Tensor(name, array.shape, array.dtype) for name, array in arrays.items()])
    assert header_of(file.head) == header_of(safetensors.numpy.save(arrays, {"format": "pt"}))
    assert all(start % arrays[name].dtype.itemsize == 0 for name, start in file.starts.items())


def header_of(data):
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_names_and_dtypes_that_a_file_cannot_hold():
    assert unsupported_reason("a\ud800", np.dtype(np.float32)) == "has a name that is no Unicode text"
    assert unsupported_reason("__metadata__", np.dtype(np.float32)) is not None
    assert unsupported_reason("a", np.dtype(object)) == "holds text"
    assert unsupported_reason("\u00e9", np.dtype(np.float32)) is None
