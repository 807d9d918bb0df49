"""Which conversions keep every value: the one place that decides what may happen without being asked for."""

from __future__ import annotations

import functools
from typing import Literal

import ml_dtypes
import numpy as np

Conversion = Literal["same", "lossless", "lossy", "forbidden"]

# Kinds that NumPy's own table does not give ml_dtypes' types ('V' for all of them).
_KINDS = {
    "b": "bool",
    "i": "int",
    "u": "int",
    "f": "float",
    "c": "complex",
    "O": "object",
    "S": "object",
    "U": "object",
}


@functools.cache
def kind_of(dtype: np.dtype) -> str:
    """One of "bool", "int", "float", "complex" and "object", for ml_dtypes' types too."""
    if dtype.kind in _KINDS and dtype.kind != "V":
        return _KINDS[dtype.kind]
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        try:
            ml_dtypes.iinfo(dtype)
        except ValueError:
            return "object"
        return "int"
    return "float"


@functools.cache
def conversion(source: np.dtype, target: np.dtype) -> Conversion:
    """What converting from one dtype to another would do to values.

    Returns:
      "same"; "lossless": every value survives; "lossy": some may not; "forbidden": the kinds differ so that only an
      explicit `Cast` may do it (float to integer, complex to real, number to bool, and anything to or from text).
    """
    if source == target:
        return "same"
    kinds = kind_of(source), kind_of(target)
    if "object" in kinds:
        return "forbidden"
    match kinds:
        case ("bool", _):
            return "lossless"
        case (_, "bool") | ("float", "int") | ("complex", "int") | ("complex", "float"):
            return "forbidden"
        case ("int", "int"):
            lossless = _int_fits(source, target)
        case ("int", _):
            lossless = _int_bits(source) <= _mantissa_bits(_real(target))
        case _:
            lossless = _float_fits(_real(source), _real(target))
    return "lossless" if lossless else "lossy"


def _real(dtype: np.dtype) -> np.dtype:
    return {np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64)}.get(
        dtype, dtype
    )


def _int_fits(source: np.dtype, target: np.dtype) -> bool:
    have, want = ml_dtypes.iinfo(source), ml_dtypes.iinfo(target)
    return int(want.min) <= int(have.min) and int(have.max) <= int(want.max)


def _int_bits(dtype: np.dtype) -> int:
    return int(ml_dtypes.iinfo(dtype).max).bit_length()


def _mantissa_bits(dtype: np.dtype) -> int:
    return int(ml_dtypes.finfo(dtype).nmant) + 1


def _float_fits(source: np.dtype, target: np.dtype) -> bool:
    have, want = ml_dtypes.finfo(source), ml_dtypes.finfo(target)
    if want.nmant < have.nmant or want.maxexp < have.maxexp:
        return False
    # The smallest subnormals must survive too, and infinities and NaN where the source has them.
    if want.minexp - want.nmant > have.minexp - have.nmant:
        return False
    specials = np.array([np.inf, -np.inf, np.nan, -0.0], dtype=np.float64)
    kept = specials.astype(source)
    with np.errstate(all="ignore"):
        there = kept.astype(np.float64)
        back = kept.astype(target).astype(np.float64)
    return bool(np.array_equal(there, back, equal_nan=True) and np.array_equal(np.signbit(there), np.signbit(back)))
