"""Transforms of sizes: leaves grown at the end, or cut."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.lazy import View, broadcast_to
from orbax_t5x.lazy.several import pad
from orbax_t5x.lazy.value import UnfilledLeaf
from orbax_t5x.lazy.view import is_keys
from orbax_t5x.transforms.base import Given
from orbax_t5x.transforms.by_rules import InPlace
from orbax_t5x.transforms.patterns.table import Pattern, pattern_text
from orbax_t5x.trees.dtypes import kind_of


class Filling(enum.Enum):
    """Source of new elements that is not a number."""

    FALLBACK = "the fallback"

    def __repr__(self) -> str:
        return self.name

    def as_code(self) -> str:
        """Returns the Python code of the constant."""
        return f"ot.transforms.{self.name}"


FALLBACK = Filling.FALLBACK
"""For `Pad`: new elements are those at the same place of the fallback's leaf.

Example:
  >>> grow = ot.transforms.Pad("embedding", (256, None), ot.transforms.FALLBACK)
  >>> grow({"embedding": np.ones((128, 16))}, {})["embedding"].shape
  (256, 16)
"""


@dataclasses.dataclass(frozen=True)
class Pad(InPlace):
    """Padding of leaves at their ends: a vocabulary of 32,100 rows to 32,256.

    With `value=FALLBACK` the new elements are those at the same place of the leaf of `fallback=` that has the name of
    the target's leaf. Transforms after it may move and cast the leaf; what takes elements out of their order, or
    computes with them, has to come before it. The optimizer's moments get zeros for new elements, whatever the value:
    these have seen no gradient.

    Attributes:
      pattern: a regex that must match a whole name.
      shape: the new shape; None keeps a dimension.
      value: a number, or `FALLBACK`.
      require_match: whether it is an error that no name matches.

    Example:
      >>> grow = ot.transforms.Pad("embedding", (4, None), value=-1)
      >>> np.asarray(grow({"embedding": np.ones((3, 2))}, {})["embedding"])
      array([[ 1.,  1.],
             [ 1.,  1.],
             [ 1.,  1.],
             [-1., -1.]])
    """

    pattern: Pattern
    shape: Given[int | Sequence[int | None] | None, tuple[int | None, ...]]
    value: complex | Filling = 0
    require_match: bool = True

    def __post_init__(self) -> None:
        shape: Any = (self.shape,) if self.shape is None or hasattr(self.shape, "__index__") else self.shape
        self._set(
            shape=tuple(None if size is None else operator.index(size) for size in shape),
            value=_plain_number(self.value),
        )

    def _compute(self, view: View) -> View:
        shape = self._new_shape(view.shape)
        if shape == view.shape:
            return view
        if isinstance(self.value, Filling):
            return pad(view, UnfilledLeaf(self.value.value, shape, view.dtype), self.value.value)
        if is_keys(view):
            raise ValueError("no number is a PRNG key: pad with keys of the fallback")
        return pad(view, broadcast_to(_as_dtype(self.value, view.dtype), shape), f"{self.value:g}")

    def _new_shape(self, old: tuple[int, ...]) -> tuple[int, ...]:
        if len(self.shape) != len(old):
            raise ValueError(f"a shape of rank {len(self.shape)} for a leaf of shape {old}")
        shape = tuple(size if wanted is None else wanted for size, wanted in zip(old, self.shape, strict=True))
        if any(size > wanted for size, wanted in zip(old, shape, strict=True)):
            raise ValueError(f"shape {shape} is smaller than the leaf's {old}; Slice takes a part of a leaf")
        return shape


def _plain_number(value: Any) -> Any:
    """Converts a number to Python's own."""
    if isinstance(value, Filling):
        return value
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, int | float | complex):
        raise TypeError(f"Pad: value is a number or ot.transforms.FALLBACK, not {value!r}")
    # Equal values have equal digests: False, 0 and 0.0.
    if isinstance(number, int) or (isinstance(number, float) and number.is_integer()):
        return int(number)
    return number


def _as_dtype(value: complex, dtype: np.dtype) -> np.ndarray:
    """Converts a number to a leaf's dtype."""
    if _fits_dtype(value, dtype):
        with np.errstate(all="ignore"):
            array = np.asarray(value).astype(dtype)
            if not np.isfinite(complex(value)) or np.isfinite(array.astype(np.complex128)):
                return array
    raise ValueError(f"a leaf of dtype {dtype.name} has no value {value}")


def _fits_dtype(value: complex, dtype: np.dtype) -> bool:
    """Reports whether a number fits a leaf's dtype."""
    match kind_of(dtype):
        case "bool":
            return value in (0, 1)
        case "int":
            info = ml_dtypes.iinfo(dtype)
            return isinstance(value, int) and int(info.min) <= value <= int(info.max)
        case "float":
            return isinstance(value, int | float)
        case kind:
            return kind == "complex"


IndexItem = int | EllipsisType | tuple[int | None, int | None, int | None] | None
"""One part of an index; a slice is (start, stop, step)."""
AnyIndexItem = IndexItem | slice
"""The same, or a slice of Python's."""


@dataclasses.dataclass(frozen=True)
class Slice(InPlace):
    """Indexing of leaves, as NumPy's basic indexing: `Slice(r".*/embedding", np.s_[:32000])`.

    A slice that reaches beyond a leaf ends with it, as in NumPy; an integer beyond it is a problem.

    Attributes:
      pattern: a regex that must match a whole name.
      index: integers, slices, None and `...`, or a tuple of these. A slice may also be given, and is kept, as a tuple
        (start, stop, step).
      require_match: whether it is an error that no name matches.

    Example:
      >>> ot.transforms.Slice("embedding", np.s_[:100])({"embedding": np.ones((128, 16))}, {})["embedding"].shape
      (100, 16)
    """

    pattern: Pattern
    index: Given[AnyIndexItem | tuple[AnyIndexItem, ...], tuple[IndexItem, ...]]
    require_match: bool = True

    def __post_init__(self) -> None:
        given: Any = self.index
        self._set(index=tuple(_index_item(part) for part in (given if isinstance(given, tuple) else (given,))))

    def describe(self) -> str:
        """Returns a line for people, in Python's notation."""
        return f"Slice({self._arguments('')})"

    def as_code(self) -> str:
        """See `Transform.as_code`."""
        return f"ot.transforms.Slice({self._arguments('np.s_')})"

    def _arguments(self, before_index: str) -> str:
        parts = ", ".join(_index_item_text(part) for part in self.index)
        rest = "" if self.require_match else ", require_match=False"
        return f"{pattern_text(self.pattern)!r}, {before_index}[{parts}]{rest}"

    def _compute(self, view: View) -> View:
        return view[tuple(slice(*part) if isinstance(part, tuple) else part for part in self.index)]


def _index_item(part: Any) -> IndexItem:
    """Converts an index's item to a hashable form."""
    if part is None or part is ...:
        return part
    if isinstance(part, slice | tuple):
        bounds: Any = (part.start, part.stop, part.step) if isinstance(part, slice) else part
        if len(bounds) != 3 or any(bound is not None and not hasattr(bound, "__index__") for bound in bounds):
            raise TypeError(f"Slice: a slice is (start, stop, step) of integers or None, not {bounds!r}")
        start, stop, step = (None if bound is None else operator.index(bound) for bound in bounds)
        if step == 0:
            raise ValueError("Slice: the step of a slice must not be zero")
        return start, stop, step
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f"Slice: an index is made of integers, slices, None and '...', not {part!r}")
    return operator.index(part)


def _index_item_text(part: IndexItem) -> str:
    if not isinstance(part, tuple):
        return "..." if part is ... else str(part)
    start, stop, step = ("" if bound is None else str(bound) for bound in part)
    return f"{start}:{stop}" + (f":{step}" if step else "")
