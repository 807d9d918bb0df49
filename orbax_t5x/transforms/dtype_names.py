"""Names of dtypes as users write them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.text.wording import did_you_mean

# Other libraries' names; NumPy takes `f16` and `f8` for floats of so many bytes, so that they are no such names.
_OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
_USUAL = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64")


def as_dtype(dtype: Any) -> np.dtype:
    """Converts the name of a dtype to NumPy's dtype.

    Raises:
      TypeError: it names none.
    """
    if not isinstance(dtype, str):
        return np.dtype(dtype)
    if hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    try:
        return np.dtype(dtype)
    except TypeError:
        other = _OTHER_NAMES.get(dtype.lower())
        hint = f"; did you mean {other!r}?" if other else did_you_mean(dtype.lower(), _USUAL)
        raise TypeError(f"{dtype!r} names no dtype{hint or '; bfloat16, float32 and float16 are usual'}") from None
