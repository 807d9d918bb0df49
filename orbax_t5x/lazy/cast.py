"""Casts: as NumPy's `astype`, for every dtype, with or without a check that no value is lost.

A cast reads into memory of its own and converts from there into the buffer. It gives no warnings: whoever
asks for a cast has asked for what it loses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy.box import Box, box_size
from orbax_t5x.lazy.geometry import Walk
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.view import Lowered, View


class Cast(View):
    """The elements in another dtype, as NumPy's `astype` makes them."""

    __slots__ = ()

    def __init__(self, source: View, dtype: np.dtype):
        super().__init__(source.shape, dtype, (source,))
        cast_carrier(source.dtype, dtype)

    def _describe(self) -> str:
        return f"cast {self._dtype.name}"

    def _select(self, walk: Walk) -> View | None:
        if any(dim < 0 for dim, _ in walk.maps):
            return None
        return type(self)(self.inputs[0]._walked(walk), self._dtype)

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.inputs[0]._requests(box, found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        source = self.inputs[0]
        carrier = cast_carrier(source.dtype, self._dtype)
        size = source.dtype.itemsize + (carrier.itemsize if carrier else 0)
        return box_size(box) * size + source._temp_bytes(box, len(box))

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        source = self.inputs[0]
        temp = np.empty(out.shape, source.dtype)
        source._lower(box, temp, lowered)
        lowered.finish.append(self._finish(temp, out))

    def _finish(self, temp: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return partial(cast_into, out, temp)


class CheckedCast(Cast):
    """A cast that raises where a value does not survive the way there and back."""

    __slots__ = ()

    def _describe(self) -> str:
        return f"checked cast {self._dtype.name}"

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        # The way back, and the comparison with its parts.
        checks = box_size(box) * (self.inputs[0].dtype.itemsize + 8)
        back = cast_carrier(self._dtype, self.inputs[0].dtype)
        return super()._temp_bytes(box, contiguous_dims) + checks + (box_size(box) * back.itemsize if back else 0)

    def _finish(self, temp: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        return partial(self._cast_and_check, temp, out)

    def _cast_and_check(self, temp: np.ndarray, out: np.ndarray) -> None:
        cast_into(out, temp)
        back = np.empty(temp.shape, temp.dtype)
        cast_into(back, out)
        same = back == temp
        same |= (back != back) & (temp != temp)
        if _is_integer(temp.dtype) and _is_integer(out.dtype):
            # -1 becomes the largest unsigned integer, and -1 again on the way back.
            same &= (temp < temp.dtype.type(0)) == (out < out.dtype.type(0))
        if not same.all():
            lost = temp[~same][0]
            leaf = self.leaves()[0]
            raise LeafMismatchError(
                f"the value {lost} does not fit {self._dtype.name} (it is stored as {temp.dtype.name})",
                path=leaf.path or None,
                leaf=leaf.name,
            )


@lru_cache(maxsize=1024)
def cast_carrier(source: np.dtype, target: np.dtype) -> np.dtype | None:
    """The dtype on the way from one to another that NumPy cannot cast directly; None where it can.

    Small integers go through int8 and small floats through float32, which hold each of their values.

    Raises:
      TypeError: strings have no numbers to cast, and numbers no text.
    """
    if source != target and (source.kind in "OSU" or target.kind in "OSU"):
        raise TypeError(f"cannot cast a lazy array of dtype {source.name} to {target.name}")
    if _casts(source, target):
        return None
    for name in ("int8", "float32"):
        carrier = np.dtype(name)
        if (
            (name == "float32" or (_is_small_int(source) and _is_small_int(target)))
            and _casts(source, carrier)
            and _casts(carrier, target)
        ):
            return carrier
    raise TypeError(f"cannot cast a lazy array of dtype {source.name} to {target.name}")


def _casts(source: np.dtype, target: np.dtype) -> bool:
    return np.can_cast(source, target, casting="unsafe")


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.name.lstrip("u").startswith("int")


def _is_small_int(dtype: np.dtype) -> bool:
    return _is_integer(dtype) and dtype.itemsize == 1


def cast_into(out: np.ndarray, source: np.ndarray) -> None:
    """`out[...] = source.astype(out.dtype)`, without warnings."""
    if source.dtype.kind == "c" and out.dtype.kind not in "cb":
        source = np.real(source)
    carrier = cast_carrier(source.dtype, out.dtype)
    with np.errstate(all="ignore"):
        np.copyto(out, source if carrier is None else source.astype(carrier), casting="unsafe")
