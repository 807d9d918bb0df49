"""The layout of safetensors files is planned first."""

import json

import numpy as np
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.operations.convert import safetensors_layout
from orbax_t5x.operations.convert.safetensors_layout import Tensor, plan_files
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
