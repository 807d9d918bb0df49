"""Names of dtypes: NumPy's and those of ml_dtypes are the oracle."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.transforms.dtype_names import as_dtype


@pytest.mark.parametrize("name", ["bfloat16", "int4", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"])
def test_names_of_ml_dtypes(name):
    assert as_dtype(name) == np.dtype(getattr(ml_dtypes, name))


@pytest.mark.parametrize("dtype", ["f2", "float32", "<i4", "half", np.int8, np.dtype(">f4"), ml_dtypes.bfloat16])
def test_all_else_is_numpys(dtype):
    assert as_dtype(dtype) == np.dtype(dtype)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("fp32", "float32"),
        ("bfloat", "bfloat16"),
        ("folat32", "float32"),
        ("float8_e4m3_fn", "float8_e4m3fn"),
    ],
)
def test_another_name_is_answered_with_the_one_that_is_meant(name, meant, tmp_path):
    np.savez(tmp_path / "a.npz", w=np.zeros(2, np.float32))
    calls = (
        lambda: as_dtype(name),
        lambda: ot.transforms.Cast(".*", name),
        lambda: ot.restore(tmp_path / "a.npz", None, dtype=name),
        lambda: ot.convert(tmp_path / "a.npz", tmp_path / "out", dtype=name),
    )
    for call in calls:
        with pytest.raises(TypeError, match=rf"'{name}' names no dtype; did you mean '{meant}'\?"):
            call()


def test_a_name_like_no_other_lists_the_usual():
    with pytest.raises(TypeError, match="'zzz' names no dtype; bfloat16, float32 and float16 are usual"):
        as_dtype("zzz")
    with pytest.raises(TypeError):
        as_dtype(object())
