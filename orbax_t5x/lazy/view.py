"""Views: frozen nodes over leaves that compose without reading, and say which boxes of which leaves they need.

A view is a shape, a dtype and its inputs. Composing one checks shapes and dtypes at once and reads nothing. `requests`
tells what reading a box will read; `lower` turns a box and a buffer into requests on leaves, which write into (views
of) that buffer wherever the node only moves elements, and a list of steps to run after the reads: casts, copies,
averages, checks. `temp_bytes` bounds what lowering and those steps allocate. Views are immutable, compare by identity,
and may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from orbax_t5x.concurrency import CarriedError, run_in_pool
from orbax_t5x.lazy.array import LazyArray
from orbax_t5x.lazy.box import Box, box_shape, full_box
from orbax_t5x.lazy.geometry import Walk
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read import read_views

# What the constructors of views write their fields with: views refuse it otherwise.
freeze = object.__setattr__

# Inputs of a stack, and things done to them, that a description names.
_SHOWN_INPUTS = 4
_Reads = list[tuple[Leaf, Request]]


class Lowered(NamedTuple):
    """A box of a view as work on leaves.

    Attributes:
      reads: what to read; all of it before the first step of `finish`. A request stays valid as long as its buffer is
        referenced.
      finish: steps to run in order, each once. They may raise `LeafMismatchError`.
    """

    reads: _Reads
    finish: list[Callable[[], None]]


def _is_empty(box: Box) -> bool:
    for first, last in box:  # Called for every leaf of a plan: any() costs three times as much.
        if first >= last:
            return True
    return False


class View(LazyArray):
    """A lazy array that composes: indexing, transposing, reshaping and casting give views, `get()` reads."""

    __slots__ = ("inputs",)

    inputs: tuple[View, ...]

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, inputs: tuple[View, ...] = ()):
        freeze(self, "_shape", shape)
        freeze(self, "_dtype", dtype)
        freeze(self, "inputs", inputs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot be deleted")

    # Composing.

    def __getitem__(self, key: Any) -> View:
        """Basic indexing: integers, slices with any step, None and '...'."""
        return _compose.index(self, key)

    @property
    def T(self) -> View:
        """The dimensions in reverse order."""
        return _compose.transpose(self, None)

    def transpose(self, *axes: Any) -> View:
        """The dimensions in another order, as `numpy.ndarray.transpose` takes it."""
        return _compose.transpose(
            self, axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes or None
        )

    def reshape(self, *shape: Any) -> View:
        """The same elements in C order under another shape; one size may be -1."""
        return _compose.reshape(self, shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape)

    def astype(self, dtype: Any) -> View:
        """The elements cast as NumPy's `astype` does; the same dtype is the same view."""
        return _compose.astype(self, dtype)

    def cast_checked(self, dtype: Any) -> View:
        """Like `astype`, but reading raises `LeafMismatchError` where a value does not survive the round trip."""
        return _compose.cast_checked(self, dtype)

    def _select(self, walk: Walk) -> View | None:
        """This view under a walk as something simpler than a walk over it, or None.

        The walk is not the identity, and some element is left.
        """
        return None

    def _walked(self, walk: Walk) -> View:
        return _compose.walked(self, walk)

    # Reading.

    def get(self) -> np.ndarray:
        """Reads the whole view into a new array."""
        out = np.empty(self._shape, self._dtype)
        read_views([(self, full_box(self._shape), out)])
        return out

    async def get_async(self) -> np.ndarray:
        """Reads the whole view without blocking the event loop."""
        try:
            return await run_in_pool(None, self.get)
        except CarriedError as carried:
            raise carried.error from None

    def item(self) -> Any:
        """The one element as a Python scalar; reads it."""
        if self.size != 1:
            raise ValueError(f"only an array of one element is a scalar, this one has shape {self._shape}")
        return self.get().item()

    def __bool__(self) -> bool:
        """The truth of a single element, which is read."""
        if self.size != 1:
            raise ValueError(
                f"the truth of a lazy array of shape {self._shape} is ambiguous; use `is None` to test for presence"
            )
        return bool(self.get().reshape(())[()])

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of an array of rank 0")
        return self._shape[0]

    def __iter__(self) -> Iterator[View]:
        if not self._shape:
            raise TypeError("iteration over an array of rank 0")
        return (self[i] for i in range(self._shape[0]))

    # What plans and executors use.

    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves that this view is made of, each once, in order."""
        found: dict[int, Leaf] = {}
        stack: list[View] = [self]
        seen: set[int] = set()
        while stack:
            view = stack.pop()
            if id(view) not in seen:
                seen.add(id(view))
                view._add_leaves(found)
                stack.extend(reversed(view.inputs))
        return tuple(found.values())

    def _add_leaves(self, found: dict[int, Leaf]) -> None:
        """Adds the leaves of this node itself."""

    @property
    def is_value(self) -> bool:
        """Whether all of it is in memory: a constant, no checkpoint is read."""
        return all(leaf.is_value for leaf in self.leaves())

    @property
    def value(self) -> Any:
        """The constant itself where the view is one as it was given, else what reading gives."""
        return self.get()

    def requests(self, box: Box) -> list[tuple[Leaf, Box]]:
        """The boxes of leaves that reading a box will read; pure, nothing is read.

        `lower` asks for the same elements; it may cut one of these boxes into several where its buffer is scattered.
        """
        found: list[tuple[Leaf, Box]] = []
        if not _is_empty(box):
            self._requests(box, found)
        return found

    def temp_bytes(self, box: Box, contiguous_dims: int = 0) -> int:
        """An upper bound for the memory that lowering and finishing a box takes beside the buffer.

        Args:
          box: what is to be read.
          contiguous_dims: how many of the last dimensions of the buffer lie in C order without gaps between them; its
            rank for a
            C-contiguous one. More of them mean less memory; 0 is always right.
        """
        return 0 if _is_empty(box) else self._temp_bytes(box, contiguous_dims)

    def lower(self, box: Box, out: np.ndarray) -> Lowered:
        """Turns reading a box into requests on leaves and steps after them.

        Args:
          box: within the shape.
          out: filled once all is done; this view's dtype, the shape of the box, any strides.
        """
        if out.shape != box_shape(box) or (out.dtype is not self._dtype and out.dtype != self._dtype):
            raise ValueError(f"a buffer of shape {out.shape} and dtype {out.dtype} for box {box} of {self!r}")
        lowered = Lowered([], [])
        if out.size:
            self._lower(box, out, lowered)
        return lowered

    def describe(self) -> str:
        """What was done to the leaves, as short text for people; empty for a bare leaf."""
        texts: list[str] = []
        view: View = self
        follows = ""
        while True:
            text = view._describe()
            # Of several reshapes in a row only the last one's result is seen.
            if text and not (text.startswith("reshape") and follows.startswith("reshape")):
                texts.append(text)
                follows = text
            if len(view.inputs) > 1:
                texts.append(_inputs_text([one.describe() for one in view.inputs]))
                break
            if not view.inputs:
                break
            view = view.inputs[0]
        return ", ".join(text for text in reversed(texts) if text)

    def __repr__(self) -> str:
        names = [leaf.name for leaf in self.leaves()]
        of = repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "nothing"
        text = self.describe()
        extra = f", {text}" if text else ""
        return f"{type(self).__name__}(shape={self._shape}, dtype={self._dtype.name}, of={of}{extra})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    # What a node kind implements; boxes hold at least one element, `out` fits.

    def _describe(self) -> str:
        raise NotImplementedError

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        raise NotImplementedError

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        raise NotImplementedError

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        raise NotImplementedError


def _inputs_text(texts: list[str]) -> str:
    """What was done to each of several inputs: once where it is the same for all, else with the inputs' numbers."""
    inputs_of: dict[str, list[str]] = {}
    for number, text in enumerate(texts, 1):
        inputs_of.setdefault(text, []).append(str(number))
    if len(inputs_of) == 1:
        return texts[0]
    parts = [
        f"{text} of input{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:_SHOWN_INPUTS])}"
        + (f" and {len(numbers) - _SHOWN_INPUTS} more" if len(numbers) > _SHOWN_INPUTS else "")
        for text, numbers in inputs_of.items()
        if text
    ]
    left = len(parts) - _SHOWN_INPUTS
    return "; ".join(parts[:_SHOWN_INPUTS]) + (f"; and {left} other ways" if left > 0 else "")


# Down here because the node kinds are subclasses of `View` and its methods make them.
from orbax_t5x.lazy import compose as _compose  # noqa: E402
