"""Classes of dtype conversions by the values that they keep.

No other module decides if a conversion needs permission.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
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
    """Returns "bool", "int", "float", "complex" or "object", for ml_dtypes' types too."""
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
    """Classifies the conversion between two dtypes: "same", "lossless", "lossy" or "forbidden".

    Forbidden ones take an explicit `Cast`: float to integer, complex to real, number to bool, anything to or from text.
    """
    if source == target:
        return "same"
    kinds = kind_of(source), kind_of(target)
    if "object" in kinds:
        return "forbidden"
    match kinds:
        case (_, "bool") | ("float", "int") | ("complex", "int") | ("complex", "float"):
            return "forbidden"
        case ("int" | "bool", "int"):
            (low, high), (lowest, highest) = _int_range(source), _int_range(target)
            lossless = lowest <= low and high <= highest
        case ("int" | "bool", _):
            lossless = _float_holds(source, _real(target))
        case _:
            lossless = _float_fits(_real(source), _real(target))
    return "lossless" if lossless else "lossy"


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"float{4 * dtype.itemsize}") if dtype.kind == "c" else dtype


def _int_range(dtype: np.dtype) -> tuple[int, int]:
    if kind_of(dtype) == "bool":
        return 0, 1
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def _float_holds(source: np.dtype, target: np.dtype) -> bool:
    """Tests if a float has every integer of a type.

    Digits count, and the zero, sign and range that small floats lack.
    """
    low, high = _int_range(source)
    if high.bit_length() > int(ml_dtypes.finfo(target).nmant) + 1:
        return False
    bounds = np.array([low, 0, high], np.float64)
    with np.errstate(all="ignore"):
        return bool(np.array_equal(bounds.astype(target).astype(np.float64), bounds))


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


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype | None:
    """Promotes dtypes as JAX does, keeping 64 bits.

    None: JAX has no common dtype for them. Integers take the dtype of a float with them; float16 with bfloat16 is
    float32; types narrower than 8 bits, and floats of 8 bits and less with other floats, are not promoted.
    """
    distinct = set(dtypes)
    numbers = [dtype for dtype in distinct if kind_of(dtype) != "bool"] or list(distinct)
    if any(kind_of(dtype) == "object" for dtype in numbers):
        return None
    if len(numbers) == 1:
        return numbers[0]
    if any(kind_of(dtype) == "int" and dtype.name.lstrip("uint") in ("1", "2", "4") for dtype in numbers):
        return None
    # A float decides over any integer, whatever their sizes.
    deciding = [dtype for dtype in numbers if kind_of(dtype) != "int"] or numbers
    return functools.reduce(_promoted, deciding[1:], deciding[0])


_NUMPY_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")


def _promoted(one: np.dtype | None, other: np.dtype) -> np.dtype | None:
    if one is None or one == other:
        return one
    names = {one.name, other.name}
    if kind_of(one) == "int" or names <= set(_NUMPY_FLOATS):
        return np.promote_types(one, other)
    if "bfloat16" in names and names - {"bfloat16"} <= set(_NUMPY_FLOATS):
        return np.promote_types(np.float32, other if one.name == "bfloat16" else one)
    return None
