"""Transforms of leaves under their own names: reshape, transpose, cast, repeat."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orbax_t5x.lazy import AffineFunction, View, repeat
from orbax_t5x.lazy.view import is_keys
from orbax_t5x.transforms.base import Given
from orbax_t5x.transforms.by_rules import InPlace
from orbax_t5x.transforms.dtype_names import as_dtype
from orbax_t5x.transforms.patterns.table import Pattern
from orbax_t5x.trees.dtypes import kind_of


@dataclasses.dataclass(frozen=True)
class Reshape(InPlace):
    """Reshape of leaves, in C order.

    Attributes:
      pattern: a regex that must match a whole name.
      shape: the new shape; one size may be -1 and is worked out.
      require_match: whether it is an error that no name matches.

    Example:
      >>> ot.transforms.Reshape(".*/kernel", (-1, 2, 4))({"q": {"kernel": np.ones((16, 8))}}, {})["q"]["kernel"].shape
      (16, 2, 4)
    """

    pattern: Pattern
    shape: Given[int | Sequence[int], tuple[int, ...]]
    require_match: bool = True

    def __post_init__(self) -> None:
        shape: Any = (self.shape,) if hasattr(self.shape, "__index__") else self.shape
        self._set(shape=tuple(operator.index(size) for size in shape))

    def _compute(self, view: View) -> View:
        return view.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Transpose(InPlace):
    """Reordering of the dimensions of leaves.

    Attributes:
      pattern: a regex that must match a whole name.
      axes: the old axis for each new one, as NumPy takes them; None reverses them.
      require_match: whether it is an error that no name matches.

    Example:
      >>> ot.transforms.Transpose(".*weight")({"lm_head.weight": np.ones((128, 16))}, {})["lm_head.weight"].shape
      (16, 128)
    """

    pattern: Pattern
    axes: Sequence[int] | None = None
    require_match: bool = True

    def __post_init__(self) -> None:
        self._set(axes=None if self.axes is None else tuple(operator.index(axis) for axis in self.axes))

    def _compute(self, view: View) -> View:
        return view.T if self.axes is None else view.transpose(self.axes)


@dataclasses.dataclass(frozen=True)
class Cast(InPlace):
    """Cast of leaves to another dtype, as by NumPy's `astype`.

    Values may be lost.

    Attributes:
      pattern: a regex that must match a whole name.
      dtype: anything that names a NumPy dtype, `"bfloat16"` included.
      require_match: whether it is an error that no name matches.

    Example:
      >>> cast = ot.transforms.Cast("encoder/.*", "bfloat16")
      >>> cast({"encoder": {"w": np.ones(2)}}, {})["encoder"]["w"].dtype.name
      'bfloat16'
    """

    pattern: Pattern
    dtype: Given[npt.DTypeLike, np.dtype]
    require_match: bool = True

    follow: bool = dataclasses.field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._set(dtype=as_dtype(self.dtype))

    @property
    def only_selects(self) -> bool:
        return True

    def _compute(self, view: View) -> View:
        if is_keys(view):
            raise ValueError("PRNG keys are no numbers and have no other dtype")
        return view.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Affine(InPlace):
    """The values of leaves as `leaf * scale + offset`.

    Computed for each shard in float32 (float64 for leaves of 64 bits), and rounded to the leaf's dtype once. The
    optimizer's moments stay as they are if the scale is 1. They cannot follow another scale: where the target wants
    them, that is a problem, unless `follow=False` keeps them as they are.

    Attributes:
      pattern: a regex that must match a whole name.
      scale, offset: numbers.
      require_match: whether it is an error that no name matches.

    Example:
      >>> plus_one = ot.transforms.Affine("norm", offset=1.0)
      >>> np.asarray(plus_one({"norm": np.zeros(2)}, {})["norm"])
      array([1., 1.])
    """

    pattern: Pattern
    scale: float = 1.0
    offset: float = 0.0
    require_match: bool = True

    def __post_init__(self) -> None:
        self._set(scale=float(self.scale), offset=float(self.offset))
        if not (math.isfinite(self.scale) and math.isfinite(self.offset)):
            raise ValueError(f"Affine: scale={self.scale} and offset={self.offset} are not both finite")

    def _compute(self, view: View) -> View:
        if is_keys(view) or kind_of(view.dtype) != "float":
            raise TypeError(f"the values are {view.dtype.name}; Cast them to a floating dtype first")
        return view.map(AffineFunction(self.scale, self.offset), self._text())

    def _text(self) -> str:
        """Writes the function for plans."""
        offset = f" {'-' if self.offset < 0 else '+'} {abs(self.offset):g}" if self.offset else ""
        return f"x * {self.scale:g}{offset}" if self.scale != 1 else f"x{offset}"


@dataclasses.dataclass(frozen=True)
class Repeat(InPlace):
    """Repetition of leaves along a new axis.

    Attributes:
      pattern: a regex that must match a whole name.
      times: the size of the new axis.
      axis: its position in the result.
      require_match: whether it is an error that no name matches.

    Example:
      >>> ot.transforms.Repeat("bias", times=3, axis=0)({"bias": np.ones(2)}, {})["bias"].shape
      (3, 2)
    """

    pattern: Pattern
    times: int
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        times = operator.index(self.times)
        if times < 0:
            raise ValueError(f"Repeat: times must not be negative, not {times}")
        self._set(times=times, axis=operator.index(self.axis))

    def _compute(self, view: View) -> View:
        return repeat(view, self.times, self.axis)
