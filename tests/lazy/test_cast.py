"""Casts of views: as NumPy casts, with or without a check that no value is lost."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import AffineFunction, as_view, several
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.array_strategies import DTYPES


def _scalar_cast(value, source, target):
    """What a cast that NumPy lacks must give: the scalar type's own rounding, or the integer modulo its width."""
    if "int" not in source.name or "int" not in target.name:
        return target.type(int(float(value)) if "int" in target.name else float(value))
    bits = int(target.name.lstrip("uint"))
    wrapped = int(value) % 2**bits
    return target.type(wrapped - 2**bits if target.name.startswith("int") and wrapped >= 2 ** (bits - 1) else wrapped)


@pytest.mark.parametrize("source", DTYPES, ids=lambda dtype: dtype.name)
def test_casts_between_all_dtypes_equal_numpy(source):
    values = np.array([0, 1, 0, 1, 1, 0, 0, 1]).astype(source)
    if source.name == "float8_e8m0fnu":  # It has no zero, and int1 no one.
        values = np.array([0.25, 0.5, 0.25, 0.25, 0.5]).astype(source)
    for target in DTYPES:
        cast = as_view(values).astype(target)
        assert cast.dtype == target
        if source.kind == "c" and target.kind not in "cb":
            expected = values.real.astype(target)
        elif np.can_cast(source, target, casting="unsafe"):
            expected = values.astype(target)
        else:
            expected = np.array([_scalar_cast(value, source, target) for value in values])
        got = cast.get()
        assert got.dtype == target and got.tobytes() == expected.tobytes(), (source, target)


@pytest.mark.parametrize(
    "source", [d for d in DTYPES if d.kind == "f" or d.name.startswith(("float8", "bfloat"))], ids=str
)
def test_float_casts_keep_numpys_rounding_infinities_and_nan(source):
    with np.errstate(all="ignore"):
        values = np.array([0.1, -2.7, 448.0, 1e9, -1e-9, np.inf, -np.inf, np.nan]).astype(source)
        for target in (
            np.dtype("float32"),
            np.dtype("float16"),
            np.dtype(ml_dtypes.bfloat16),
            np.dtype(ml_dtypes.float8_e5m2),
        ):
            if np.can_cast(source, target, casting="unsafe"):
                assert as_view(values).astype(target).get().tobytes() == values.astype(target).tobytes()


def test_a_chain_of_casts_keeps_what_each_loses():
    values = np.array([1100001, 3], np.int64)
    assert as_view(values).astype("bfloat16").astype("int32").get().tolist() == [1097728, 3]


def test_checked_casts_pass_what_survives_and_name_what_does_not():
    for value, dtype in [(7, "int32"), (-(2**31), "int32"), (255, "uint8"), (1, "bool"), (3, "int4"), (96, "bfloat16")]:
        got = as_view(np.array([value])).cast_checked(dtype).get()
        assert got.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)) and int(got[0]) == value
    nan = as_view(np.array([np.nan, 1.5])).cast_checked("float32").get()
    assert np.isnan(nan[0]) and nan[1] == 1.5
    refused = [
        (2**31, "int32"),
        (-1, "uint64"),
        (-1, "uint32"),
        (256, "uint8"),
        (8, "int4"),
        (-1, "uint4"),
        (2, "bool"),
        (257, "bfloat16"),
        (2**53 + 1, "float64"),
    ]
    for value, dtype in refused:
        view = as_view(ArrayLeaf(np.array([1, value]), "state/step")).cast_checked(dtype)
        with pytest.raises(LeafMismatchError, match=rf"leaf 'state/step'.*{value} does not fit {dtype}") as caught:
            view.get()
        assert caught.value.leaf == "state/step" and caught.value.path == "/checkpoints/state/step"
    with pytest.raises(LeafMismatchError, match="does not fit uint32"):
        as_view(np.uint64(2**63)).cast_checked("uint32").get()
    with pytest.raises(LeafMismatchError, match="does not fit int64"):
        as_view(np.uint64(2**63)).cast_checked("int64").get()
    with pytest.raises(LeafMismatchError, match="does not fit int32"):
        as_view(np.float32("nan")).cast_checked("int32").get()
    # Only what is read is checked.
    assert as_view(np.array([5, 2**40])).cast_checked("int32")[:1].get().tolist() == [5]


def test_strings_keep_their_bytes_and_are_not_cast():
    words = as_view(np.array([b"ab", b"\x00c"], object))
    assert words[::-1].get().tolist() == [b"\x00c", b"ab"]
    assert several.stack([words, words]).reshape(4).get().tolist() == [b"ab", b"\x00c"] * 2
    with pytest.raises(TypeError, match="cannot cast a lazy array of dtype object to float32"):
        words.astype("float32")
    with pytest.raises(TypeError, match="cannot cast"):
        as_view(np.zeros(2)).astype(object)


ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("index", [np.s_[...], np.s_[1], np.s_[:, ::-1, 1:3], np.s_[:0], np.s_[0, 0, 0]])
def test_boxes_equal_numpys(index):
    found = as_view(ARRAY).map(np.sqrt)[index]
    np.testing.assert_array_equal(np.asarray(found), np.sqrt(ARRAY)[index])


def test_it_composes_and_shows_its_name():
    view = as_view(ARRAY).map(lambda x: x > 3, name="above").T.astype(np.int8)
    np.testing.assert_array_equal(np.asarray(view), (ARRAY > 3).T.astype(np.int8))
    assert "map above" in view.describe() and view.map(np.negative).describe().count("map") == 2
    assert as_view(np.float32(4)).map(np.sqrt).get() == 2


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda x: x.sum(), ValueError, "not elementwise"),
        (lambda x: x[:-1] if x.size else x[None], ValueError, "not elementwise"),
        (lambda x: x.tolist(), TypeError, "returned list"),
    ],
)
def test_other_functions_are_refused(function, error, match):
    with pytest.raises(error, match=match):
        as_view(ARRAY).map(function, name="f")


def test_errors_of_the_function_arrive_as_they_are():
    def fails(x):
        if x.size:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine"):
        as_view(ARRAY).map(fails).get()
    late = as_view(ARRAY).map(lambda x: x if not x.size else x.ravel())
    with pytest.raises(ValueError, match="not elementwise"):
        late.get()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_affine_rounds_once(dtype):
    array = as_view(np.linspace(-3, 3, 17)).astype(ot.transforms.Cast("x", dtype).dtype).get()
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (array.astype(wide) * wide(1.7) + wide(0.3)).astype(array.dtype)
    np.testing.assert_array_equal(AffineFunction(1.7, 0.3)(array), expected)
