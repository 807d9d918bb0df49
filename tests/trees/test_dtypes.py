"""Which conversions keep every value: compared with converting every bit pattern (of large types, many)."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.trees.dtypes import common_dtype, conversion, kind_of
from tests.support.array_strategies import DTYPES

NARROW = [dtype for dtype in DTYPES if dtype.itemsize <= 2]
WIDE = [dtype for dtype in DTYPES if dtype.itemsize > 2]


def every_value(dtype: np.dtype) -> np.ndarray:
    """Every bit pattern of a type of up to 16 bits; of a larger one random bits and the extremes."""
    if dtype.itemsize <= 2:
        bits = 1 if dtype == np.bool_ else ml_dtypes.iinfo(dtype).bits if kind_of(dtype) == "int" else _bits(dtype)
        if kind_of(dtype) in ("int", "bool"):
            # Small integers are stored one to a byte, whose other bits mean nothing.
            low = int(ml_dtypes.iinfo(dtype).min) if kind_of(dtype) == "int" else 0
            return np.array([low + i for i in range(1 << bits)]).astype(dtype)
        return np.arange(1 << bits, dtype=np.uint32).astype(f"u{dtype.itemsize}").view(dtype)
    if kind_of(dtype) == "complex":
        real = every_value(np.dtype(f"f{dtype.itemsize // 2}"))
        values = np.zeros(len(real) // 2, dtype)
        values.real, values.imag = real[: len(values)], real[-len(values) :]
        return values
    bits = np.random.default_rng(0).integers(0, 1 << 63, 4096, dtype=np.uint64)
    values = bits.view(dtype)
    info = ml_dtypes.iinfo(dtype) if kind_of(dtype) == "int" else ml_dtypes.finfo(dtype)
    return np.concatenate([values, np.array([info.min, info.max, 0, 1], dtype)])


def _bits(dtype: np.dtype) -> int:
    return int(ml_dtypes.finfo(dtype).bits)


def numbers_of(values: np.ndarray) -> np.ndarray:
    """The values as numbers of 64 bits, exactly."""
    if kind_of(values.dtype) in ("int", "bool"):
        return values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    with np.errstate(all="ignore"):
        return values.astype(np.float64)


def are_same(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether numbers are the same one by one; NaN is NaN, and zeros of floats have a sign."""
    if before.dtype != after.dtype:
        # Python compares integers with floats exactly, NumPy rounds the integers.
        return before.tolist() == after.tolist()
    if before.dtype.kind != "f":
        return np.array_equal(before, after)
    return np.array_equal(before, after, equal_nan=True) and np.array_equal(
        np.signbit(before) & ~np.isnan(before), np.signbit(after) & ~np.isnan(after)
    )


def converted(values: np.ndarray, target: np.dtype) -> np.ndarray:
    """What NumPy makes of values in another dtype; by way of a dtype that holds them all where it has no cast."""
    with np.errstate(all="ignore"):
        try:
            return values.astype(target)
        except TypeError:
            between = np.float32 if kind_of(target) == "float" else np.int32
            return values.astype(between).astype(target)


def survives(values: np.ndarray, target: np.dtype) -> bool:
    """Whether every value means the same number in the other dtype."""
    there = converted(values, target)
    if kind_of(target) == "complex":
        there = there.real
    return are_same(numbers_of(values), numbers_of(there))


@pytest.mark.parametrize("source", NARROW, ids=str)
def test_every_pair_of_up_to_16_bits_is_decided_as_all_bit_patterns_decide(source):
    values = every_value(source)
    for target in NARROW:
        change = conversion(source, target)
        if source == target:
            assert change == "same"
        elif change != "forbidden":
            assert (change == "lossless") == survives(values, target), (source, target, change)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_lossless_to_a_wide_type_means_that_every_value_survives(source):
    values = every_value(source)
    for target in WIDE:
        change = conversion(source, target)
        if source == target:
            assert change == "same"
        elif change in ("lossless", "lossy") and kind_of(source) != "complex":
            kept = survives(values, target)
            assert kept or change == "lossy", (source, target)
            assert source.itemsize > 2 or kept == (change == "lossless"), (source, target)


def test_complex_numbers_convert_as_their_parts():
    assert conversion(np.dtype("complex64"), np.dtype("complex128")) == "lossless"
    assert conversion(np.dtype("complex128"), np.dtype("complex64")) == "lossy"


def jax_promotes(dtype):
    """Whether this version of JAX knows what a dtype has in common with itself."""
    try:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return bool(jnp.result_type(dtype, dtype))
    except (jax.errors.JAXTypeError, ValueError, TypeError):
        return False


def test_common_dtypes_are_those_of_jax():
    known = [dtype for dtype in DTYPES if dtype.name not in ("int1", "uint1") and jax_promotes(dtype)]
    rng = np.random.default_rng(0)
    triples = [tuple(known[i] for i in rng.integers(0, len(known), 3)) for _ in range(1500)]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for dtypes in [*itertools.product(known, repeat=2), *triples]:
            try:
                expected = np.dtype(jnp.result_type(*dtypes))
            except (jax.errors.JAXTypeError, ValueError, TypeError):
                expected = None
            got = common_dtype(dtypes)
            assert got == expected if expected is not None else got is None, dtypes


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
    for source, target in itertools.product(DTYPES, DTYPES):
        kinds = kind_of(source), kind_of(target)
        named = kinds in {("float", "int"), ("complex", "float"), ("complex", "int")} or (
            kinds[1] == "bool" and kinds[0] != "bool"
        )
        assert (conversion(source, target) == "forbidden") == named
