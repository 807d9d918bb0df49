"""Which conversions keep every value: compared with converting every value (or many) there and back."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.trees.dtypes import conversion, kind_of

INTS = [
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    ml_dtypes.int4,
    ml_dtypes.uint4,
]
FLOATS = [
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
]
ALL = [np.dtype(dtype) for dtype in (np.bool_, *INTS, *FLOATS, np.complex64, np.complex128)]


def every_value(dtype: np.dtype) -> np.ndarray:
    """All values of small types; of large ones random bits and the extremes."""
    if dtype == np.bool_:
        return np.array([False, True])
    if dtype in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)):
        info = ml_dtypes.iinfo(dtype)
        return np.arange(int(info.min), int(info.max) + 1).astype(dtype)
    if dtype.itemsize <= 2:
        return np.arange(1 << (8 * dtype.itemsize), dtype=np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    if kind_of(dtype) == "complex":
        real = every_value(np.dtype(f"f{dtype.itemsize // 2}"))
        values = np.zeros(len(real) // 2, dtype)
        values.real, values.imag = real[: len(values)], real[-len(values) :]
        return values
    bits = np.random.default_rng(0).integers(0, 1 << 63, 4096, dtype=np.uint64)
    values = bits.view(dtype)
    info = ml_dtypes.iinfo(dtype) if kind_of(dtype) == "int" else ml_dtypes.finfo(dtype)
    return np.concatenate([values, np.array([info.min, info.max, 0, 1], dtype)])


def survives(values: np.ndarray, target: np.dtype) -> bool:
    with np.errstate(all="ignore"):
        converted = values.astype(target)
        if kind_of(values.dtype) in ("int", "bool") and kind_of(target) == "int":
            # Not there and back: that would not see 255 become -1 and 255 again.
            return [int(value) for value in converted] == [int(value) for value in values]
        real = kind_of(target) == "complex" and kind_of(values.dtype) != "complex"
        back = (converted.real if real else converted).astype(values.dtype)
        if kind_of(values.dtype) in ("int", "bool"):
            return bool(np.array_equal(back, values))
        # NaN payloads are not values; which value it is, is.
        wide = np.complex128 if kind_of(values.dtype) == "complex" else np.float64
        return bool(np.array_equal(back.astype(wide), values.astype(wide), equal_nan=True))


@pytest.mark.parametrize("source", ALL, ids=str)
def test_lossless_means_that_every_value_survives(source):
    values = every_value(source)
    for target in ALL:
        change = conversion(source, target)
        if {source, target} == {np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)}:
            assert change == "lossy"  # ml_dtypes has no cast between these two to compare with
        elif source == target:
            assert change == "same"
        elif change == "lossless":
            assert survives(values, target), (source, target)
        elif change == "lossy" and source.itemsize <= 2:
            assert not survives(values, target), (source, target)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (ml_dtypes.bfloat16, np.float32, "lossless"),
        (np.float32, ml_dtypes.bfloat16, "lossy"),
        (np.int64, np.int32, "lossy"),
        (np.int64, np.float64, "lossy"),
        (np.int32, np.float64, "lossless"),
        (np.float32, np.int32, "forbidden"),
        (np.complex64, np.float64, "forbidden"),
        (np.float32, np.complex64, "lossless"),
        (np.int8, np.bool_, "forbidden"),
        (np.bool_, np.int8, "lossless"),
        (np.float16, ml_dtypes.bfloat16, "lossy"),
        (object, np.float32, "forbidden"),
        (np.uint16, ml_dtypes.bfloat16, "lossy"),
    ],
)
def test_examples(source, target, expected):
    assert conversion(np.dtype(source), np.dtype(target)) == expected


def test_forbidden_kinds_are_exactly_those_named():
    for source, target in itertools.product(ALL, ALL):
        kinds = kind_of(source), kind_of(target)
        named = kinds in {("float", "int"), ("complex", "float"), ("complex", "int")} or (
            kinds[1] == "bool" and kinds[0] != "bool"
        )
        assert (conversion(source, target) == "forbidden") == named
