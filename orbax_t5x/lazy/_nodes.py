"""The node kinds over one input: a leaf, a walk over dimensions (slice, transpose, new axis, repeat) and a cast.

A walk is one node however many of these are composed. It writes straight into the buffer: transposed and negative steps
as views of it, a repeat by copying after the read. Steps beyond 1 read their covering box into memory of their own
where the rows between are small, and row by row where they are not, so that never more than `GAP_BYTES` at a time is
read for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import _geometry
from orbax_t5x.lazy._geometry import Walk, compose, identity
from orbax_t5x.lazy._leaf import Box, Leaf, Request, box_shape, box_size
from orbax_t5x.lazy._view import Lowered, View


class LeafView(View):
    """A whole leaf."""

    __slots__ = ("leaf",)

    leaf: Leaf

    def __init__(self, leaf: Leaf):
        super().__init__(tuple(leaf.shape), np.dtype(leaf.dtype))
        self._freeze(leaf=leaf)

    @property
    def value(self) -> Any:
        """The constant as it was given where the leaf is one, else what reading gives."""
        return getattr(self.leaf, "value", None) if self.is_value else self.get()

    def _add_leaves(self, found: dict[int, Leaf]) -> None:
        found.setdefault(id(self.leaf), self.leaf)

    def _describe(self) -> str:
        return ""

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        found.append((self.leaf, box))

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        return 0

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        lowered.reads.append((self.leaf, Request(box, out)))


class _Cut(NamedTuple):
    """A box of a walk as a box of its input.

    Attributes:
      box: of the input.
      at: cuts the output down to one element along repeats, and turns negative steps round.
      strides: the index of the wanted elements within the covering box, or None where the box is exact.
    """

    box: Box
    at: tuple[Any, ...]
    strides: tuple[slice, ...] | None


class Strided(View):
    """A walk over the dimensions of the input: any composition of slices, transposes, new axes and repeats.

    Make it with `strided`, which simplifies first.
    """

    __slots__ = ("_axes", "_expand", "_repeats", "walk")

    walk: Walk
    _repeats: tuple[int, ...]
    _axes: tuple[int, ...]
    _expand: tuple[Any, ...]

    def __init__(self, source: View, walk: Walk):
        super().__init__(walk.shape, source.dtype, (source,))
        dims = [dim for dim, _ in walk.maps if dim >= 0]
        self._freeze(
            walk=walk,
            _repeats=tuple(axis for axis, (dim, _) in enumerate(walk.maps) if dim < 0),
            # How the output's walked dimensions become the input's: transposed into its order, then a new axis for each
            # that stays at its start.
            _axes=tuple(sorted(range(len(dims)), key=dims.__getitem__)),
            _expand=tuple(slice(None) if dim in dims else None for dim in range(len(walk.start))),
        )

    @property
    def only_reshapes(self) -> bool:
        """Whether all it does is to add and drop dimensions of size 1."""
        source, walk = self.inputs[0], self.walk
        left = [(dim, size) for (dim, step), size in zip(walk.maps, walk.shape, strict=True) if size != 1 and step == 1]
        return left == [(dim, size) for dim, size in enumerate(source.shape) if size != 1] and source.size == self.size

    def _describe(self) -> str:
        if self.only_reshapes:
            return f"reshape {self.shape}"
        source, walk = self.inputs[0], self.walk
        walked = [dim for dim, _ in walk.maps if dim >= 0]
        texts = []
        sizes = {dim: size for (dim, _), size in zip(walk.maps, walk.shape, strict=True)}
        steps = dict(walk.maps)
        ones = all(source.shape[dim] == 1 for dim in range(source.ndim) if dim not in sizes)
        cuts = [_cut_text(walk.start[d], steps.get(d), sizes.get(d, 1), source.shape[d]) for d in range(source.ndim)]
        if any(cut != ":" for dim, cut in enumerate(cuts) if not (dim not in sizes and source.shape[dim] == 1)):
            texts.append(f"[{', '.join(cuts)}]")
            ones = True
        if walked != sorted(walked):
            order = sorted(walked)
            texts.append(f"transpose {tuple(order.index(dim) for dim in walked)}")
        repeats = [(axis, walk.shape[axis]) for axis in self._repeats if walk.shape[axis] != 1]
        texts += [f"repeat {times} on axis {axis}" for axis, times in repeats]
        if not texts or (not repeats and len(self._repeats) > 0) or not ones:
            texts.append(f"reshape {self.shape}")
        return ", ".join(texts)

    def _cut(self, box: Box) -> _Cut:
        """The input's box for an output box none of whose dimensions has to be read row by row."""
        walk = self.walk
        inner = [(first, first + 1) for first in walk.start]
        strides = [slice(None)] * len(inner)
        index: list[Any] = []
        stepped = False
        for (first, last), (dim, step) in zip(box, walk.maps, strict=True):
            if dim < 0:
                index.append(0)
                continue
            begin, end = walk.start[dim] + step * first, walk.start[dim] + step * (last - 1)
            flip = step < 0 and last - first > 1
            inner[dim] = (min(begin, end), max(begin, end) + 1)
            index.append(slice(None, None, -1) if flip else slice(None))
            if abs(step) > 1 and last - first > 1:
                strides[dim] = slice(None, None, abs(step))
                stepped = True
        # The ellipsis keeps what has no dimension left an array that can be written to.
        return _Cut(tuple(inner), (*index, Ellipsis), tuple(strides) if stepped else None)

    def _row_axis(self, box: Box) -> int:
        """The output axis to read index by index because the rows between its steps are large, or -1."""
        if all(-2 < step < 2 for _, step in self.walk.maps):
            return -1
        sizes = [1] * len(self.walk.start)
        for (first, last), (dim, step) in zip(box, self.walk.maps, strict=True):
            if dim >= 0:
                sizes[dim] = abs(step) * (last - first - 1) + 1
        found = (len(sizes), -1)
        for axis, ((first, last), (dim, step)) in enumerate(zip(box, self.walk.maps, strict=True)):
            if dim >= 0 and abs(step) > 1 and last - first > 1:
                row_bytes = math.prod(sizes[dim + 1 :]) * self._dtype.itemsize
                if (abs(step) - 1) * row_bytes >= _geometry.GAP_BYTES:
                    found = min(found, (dim, axis))
        return found[1]

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        axis = self._row_axis(box)
        if axis < 0:
            self.inputs[0]._requests(self._cut(box).box, found)
            return
        for row in _rows(box, axis):
            self._requests(row, found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        repeated = any(box[axis][1] - box[axis][0] > 1 for axis in self._repeats)
        # Copying along a repeat, NumPy keeps what it copies from aside where it cannot prove that the two do not
        # overlap.
        extra = _repeat_bytes(box, self._repeats, self._dtype) if repeated else 0
        axis = self._row_axis(box)
        if axis >= 0:
            return extra + sum(
                self._temp_bytes(row, 0) - (_repeat_bytes(row, self._repeats, self._dtype) if repeated else 0)
                for row in _rows(box, axis)
            )
        cut = self._cut(box)
        if cut.strides is not None:
            size = box_size(cut.box) * self._dtype.itemsize
            return extra + size + self.inputs[0]._temp_bytes(cut.box, len(cut.box))
        return extra + self.inputs[0]._temp_bytes(cut.box, self._contiguous_inside(contiguous_dims))

    def _contiguous_inside(self, contiguous_dims: int) -> int:
        """How many of the input's last dimensions lie in C order in a buffer of which `contiguous_dims` do."""
        count = 0
        for axis in reversed(range(len(self.walk.maps))):
            dim, step = self.walk.maps[axis]
            outside = len(self.walk.maps) - axis
            inside = len(self.walk.start) - dim
            if outside > contiguous_dims or step != 1 or inside != outside:
                break
            count = inside
        return count

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        axis = self._row_axis(box)
        if axis < 0:
            self._lower_cut(self._cut(box), out, lowered)
        else:
            first = box[axis][0]
            base = self._first_of_repeats(out)
            for row in _rows(tuple((0, 1) if a in self._repeats else pair for a, pair in enumerate(box)), axis):
                at = row[axis][0] - first
                self._lower(row, base[(*(slice(None),) * axis, slice(at, at + 1))], lowered)
        if any(out.shape[repeat] > 1 for repeat in self._repeats):
            lowered.finish.append(partial(_copy_along, out, self._repeats))

    def _first_of_repeats(self, out: np.ndarray) -> np.ndarray:
        return out[tuple(slice(0, 1) if axis in self._repeats else slice(None) for axis in range(out.ndim))]

    def _lower_cut(self, cut: _Cut, out: np.ndarray, lowered: Lowered) -> None:
        source = self.inputs[0]
        into = out[cut.at].transpose(self._axes)[(*self._expand, Ellipsis)]
        if cut.strides is None:
            source._lower(cut.box, into, lowered)
            return
        temp = np.empty(box_shape(cut.box), self._dtype)
        source._lower(cut.box, temp, lowered)
        lowered.finish.append(partial(np.copyto, into, temp[(*cut.strides, Ellipsis)]))


def strided(source: View, walk: Walk) -> View:
    """A walk over a view, simplified: no walk over a walk, no identity, no inputs that are left out."""
    if isinstance(source, Strided):
        source, walk = source.inputs[0], compose(source.walk, walk)
    if any(size == 1 and step not in (0, 1) for (_, step), size in zip(walk.maps, walk.shape, strict=True)):
        maps = tuple(
            (dim, 1 if dim >= 0 and size == 1 else step)
            for (dim, step), size in zip(walk.maps, walk.shape, strict=True)
        )
        walk = walk._replace(maps=maps)
    if walk == identity(source.shape):
        return source
    if 0 in walk.shape:
        return Strided(source, walk)
    simpler = source._select(walk)
    return Strided(source, walk) if simpler is None else simpler


def _cut_text(start: int, step: int | None, size: int, full: int) -> str:
    if step is None:
        return str(start)
    if step == 1:
        return ":" if size == full else f"{start}:{start + size}"
    last = start + step * (size - 1)
    stop = "" if step < 0 and last == 0 else last + (1 if step > 0 else -1)
    return f"{start}:{stop}:{step}"


def _rows(box: Box, axis: int) -> list[Box]:
    first, last = box[axis]
    return [(*box[:axis], (i, i + 1), *box[axis + 1 :]) for i in range(first, last)]


def _repeat_bytes(box: Box, repeats: tuple[int, ...], dtype: np.dtype) -> int:
    """The bytes of a box without its last repeated dimension: the largest source of one copy along a repeat."""
    sizes = [last - first for first, last in box]
    longest = [axis for axis in repeats if sizes[axis] > 1][-1]
    return math.prod(sizes) // sizes[longest] * dtype.itemsize


def _copy_along(out: np.ndarray, axes: tuple[int, ...]) -> None:
    """Copies index 0 along some axes to the rest of them."""
    for position, axis in enumerate(axes):
        if out.shape[axis] == 1:
            continue
        later = axes[position + 1 :]
        part = out[tuple(slice(0, 1) if a in later else slice(None) for a in range(out.ndim))]
        before = (slice(None),) * axis
        np.copyto(part[(*before, slice(1, None))], part[(*before, slice(0, 1))])


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
        return type(self)(strided(self.inputs[0], walk), self._dtype)

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
        checks = box_size(box) * (self.inputs[0].dtype.itemsize + 4)
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


def _is_small_int(dtype: np.dtype) -> bool:
    return dtype.name.lstrip("u").startswith("int") and dtype.itemsize == 1


def cast_into(out: np.ndarray, source: np.ndarray) -> None:
    """`out[...] = source.astype(out.dtype)` without warnings: who asks for a cast has asked for what it loses."""
    if source.dtype.kind == "c" and out.dtype.kind not in "cb":
        source = np.real(source)
    carrier = cast_carrier(source.dtype, out.dtype)
    with np.errstate(all="ignore"):
        np.copyto(out, source if carrier is None else source.astype(carrier), casting="unsafe")
