"""Views: lazy arrays over nodes that compose without reading.

Composing a view checks shapes and dtypes at once and reads nothing: each operation gives a view over another node.
Views are immutable, compare by identity, and may be used from any thread.

The data of a typed PRNG key are a few uint32 along a last dimension that the keys' own array does not have. While
transforms run, a view has the shape of the keys: its elements are records of that data, which nodes can move, but not
compute with.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Concatenate, NoReturn, ParamSpec, Self

import numpy as np

from orbax_t5x.concurrency import CarriedError, guarded, run_in_pool
from orbax_t5x.files.memory import empty_array, naming_memory_errors
from orbax_t5x.lazy.array import LazyArray
from orbax_t5x.lazy.box import Box, IndexMap, basic_index, full_box, normalize_axis, reshape_target
from orbax_t5x.lazy.cast import Mismatch, cast_node, leaf_mismatch, mapped_node
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node, leaf_node
from orbax_t5x.lazy.read import read_boxes
from orbax_t5x.lazy.read_stats import ReadStats, Verify
from orbax_t5x.lazy.strided import reshaped, strided
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf

_Arguments = ParamSpec("_Arguments")
_Composed = Callable[Concatenate["View", _Arguments], "View"]


def _sound(compose: _Composed[_Arguments]) -> _Composed[_Arguments]:
    """Raises the error of a broken leaf before that of a composition."""

    @functools.wraps(compose)
    def composed(self: View, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> View:
        try:
            return compose(self, *arguments, **keywords)
        except (IndexError, TypeError, ValueError):
            # The shape and dtype of such a leaf may be unknown.
            for leaf in self.leaves():
                leaf.raise_error()
            raise

    return composed


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class View(LazyArray):
    """Lazy array that composes.

    Indexing, transposing, reshaping and casting give views, `get()` reads.

    Attributes:
      node: what it is made of.
    """

    node: Node

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.node.shape

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype (`ml_dtypes`' included); object for strings."""
        return self.node.dtype

    # Composing.

    @_sound
    def __getitem__(self, key: Any) -> View:
        """Applies integers, slices with any step, None and '...'."""
        return self._with(strided(self.node, basic_index(key, self.shape)))

    @property
    def T(self) -> View:
        """The dimensions in reverse order."""
        return self.transpose()

    @_sound
    def transpose(self, *axes: Any) -> View:
        """Reorders the dimensions, as `numpy.ndarray.transpose` does."""
        given: Any = axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes or None
        shape, rank = self.shape, self.ndim
        order = tuple(reversed(range(rank))) if given is None else tuple(normalize_axis(axis, rank) for axis in given)
        if sorted(order) != list(range(rank)):
            raise ValueError(f"axes {order} are no permutation of the {rank} axes of shape {shape}")
        maps = tuple((axis, 1) for axis in order)
        return self._with(strided(self.node, IndexMap((0,) * rank, maps, tuple(shape[axis] for axis in order))))

    @_sound
    def reshape(self, *shape: Any) -> View:
        """Reshapes in C order; a single size may be -1."""
        new: Any = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
        return self._with(reshaped(self.node, reshape_target(self.shape, tuple(new))))

    @_sound
    def astype(self, dtype: Any) -> View:
        """Casts as NumPy's `astype` does; the same dtype is the same view."""
        return self._with(cast_node(self.node, np.dtype(dtype)))

    def map(self, fn: Callable[[np.ndarray], Any], name: str | None = None) -> View:
        """Applies an elementwise NumPy function, box by box; nothing is read.

        Args:
          fn: takes and returns an array of any shape; a call without elements tells the dtype of the result.
          name: shown in plans; None: the function's own.

        Raises:
          TypeError: the function returns no array.
          ValueError: the function changes the shape.

        Example:
          >>> ot.stack([np.zeros(2)], 0).map(np.exp, name="exp").get()
          array([[1., 1.]])
        """
        shown = name or getattr(fn, "__name__", type(fn).__name__)
        return self._with(mapped_node(self.node, fn, f"map {shown}"))

    def cast_checked(self, dtype: Any, mismatch: Mismatch = leaf_mismatch) -> View:
        """Casts like `astype`, and checks values when reading."""
        return self._with(cast_node(self.node, np.dtype(dtype), mismatch))

    def _with(self, node: Node) -> View:
        return self if node is self.node else View(node)

    # Reading.

    def place_of_errors(self) -> tuple[str | None, str | None]:
        """Returns the path and the name of the first leaf."""
        leaf = self.leaves()[0]
        return leaf.path or None, leaf.name

    @guarded
    def get(self) -> np.ndarray:
        """Reads the whole view into a new array."""
        out = self.allocate()
        read_boxes([(self.node, full_box(self.shape), out)])
        return out

    def allocate(self) -> np.ndarray:
        """Allocates an uninitialised array that reading the whole view can fill."""
        leaves = self.leaves()
        for leaf in leaves:
            leaf.raise_error()
        with naming_memory_errors(leaves[0].path, leaves[0].name):
            return empty_array(self.shape, self.dtype)

    async def get_async(self) -> np.ndarray:
        """Reads the whole view without blocking the event loop."""
        try:
            return await run_in_pool(None, self.get)
        except CarriedError as carried:
            raise carried.error from None

    def item(self) -> Any:
        """Reads the only element as a Python scalar."""
        if self.size != 1:
            raise ValueError(f"only an array of one element is a scalar, this one has shape {self.shape}")
        return self.get().item()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array of rank 0")
        return self.shape[0]

    # Python calls these without a request to read.

    def __bool__(self) -> NoReturn:
        self._refuse("the truth of a lazy array would read it: use `is None` to test for presence, `.item()` to read")

    def __int__(self) -> NoReturn:
        self._refuse("int() of a lazy array would read it: use `.item()`")

    def __float__(self) -> NoReturn:
        self._refuse("float() of a lazy array would read it: use `.item()`")

    def __iter__(self) -> NoReturn:
        self._refuse("iterating over a lazy array would read it row by row: use `.get()`, or index it")

    def _refuse(self, text: str) -> NoReturn:
        raise TypeError(f"{text} ({self!r})")

    # What plans and executors use.

    @property
    def leaf(self) -> Leaf | None:
        """The leaf if the view is all of it, or None."""
        return self.node.own_leaf

    def leaves(self) -> tuple[Leaf, ...]:
        """Lists the leaves of this view, each once, in order."""
        return self.node.leaves()

    @property
    def is_value(self) -> bool:
        """True if all of it is in memory, and nothing is read."""
        return all(leaf.is_value for leaf in self.leaves())

    @property
    def value(self) -> Any:
        """The constant as given, or the array that `get` reads."""
        leaf = self.leaf
        return leaf.value if isinstance(leaf, ValueLeaf) else self.get()

    def requests(self, box: Box) -> list[tuple[Leaf, Box]]:
        """Returns the boxes of leaves that reading a box will read."""
        return self.node.requests(box)

    def scratch_bytes(self, box: Box, like: np.ndarray | None = None) -> int:
        """Returns the memory for a box beside the buffer."""
        return self.node.scratch_bytes(box, like)

    def lower(self, box: Box, out: np.ndarray) -> Lowering:
        """Lowers reading a box to requests on leaves and steps."""
        return self.node.lower(box, out)

    def describe(self) -> str:
        """Describes all operations on the leaves, for people."""
        return self.node.describe()

    def __repr__(self) -> str:
        return f"View({self.node.summary()})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def as_view(value: Any, name: str | None = None) -> View:
    """Makes a view of anything that holds an array.

    Args:
      value: a view (returned as it is), a `Leaf`, a lazy array of the get_fn kind, an array or a scalar.
      name: what errors and plans call it where it has no name of its own.
    """
    if isinstance(value, View):
        return value
    if isinstance(value, Leaf):
        return View(leaf_node(value))
    leaf = OpaqueLeaf(value, name) if isinstance(value, LazyArray) else ValueLeaf(value, name)
    return View(leaf_node(leaf))


def read_views(items: Iterable[tuple[View, Box, np.ndarray]], verify: Verify = "touched") -> ReadStats:
    """Fills buffers with boxes of views."""
    return read_boxes([(view.node, box, out) for view, box, out in items], verify)


def repeat(view: Any, times: int, axis: int) -> View:
    """Repeats an array on a new axis: `numpy.repeat(numpy.expand_dims(a, axis), times, axis)`; read once.

    Example:
      >>> ot.repeat(np.arange(2), 3, axis=0).get()
      array([[0, 1],
             [0, 1],
             [0, 1]])
    """
    old = as_view(view)
    at = normalize_axis(axis, old.ndim + 1)
    count = operator.index(times)
    if count < 0:
        raise ValueError(f"repeat {count} times: negative counts are not allowed")
    maps = tuple((dim, 1) for dim in range(old.ndim))
    shape = (*old.shape[:at], count, *old.shape[at:])
    return View(strided(old.node, IndexMap((0,) * old.ndim, (*maps[:at], (-1, 0), *maps[at:]), shape)))


def broadcast_to(view: Any, shape: Sequence[int] | int) -> View:
    """Broadcasts an array to a shape by NumPy's rules.

    Every element is read once.

    Raises:
      ValueError: naming both shapes where they do not fit.

    Example:
      >>> ot.broadcast_to(np.arange(3), (2, 3)).get()
      array([[0, 1, 2],
             [0, 1, 2]])
    """
    old = as_view(view)
    new = tuple(operator.index(size) for size in (shape if isinstance(shape, Iterable) else (shape,)))
    lead = len(new) - old.ndim
    fits = lead >= 0 and all(size in (1, wanted) for size, wanted in zip(old.shape, new[lead:], strict=True))
    if not fits or any(size < 0 for size in new):
        raise ValueError(f"cannot broadcast an array of shape {old.shape} to shape {new}")
    maps = [(-1, 0)] * lead
    maps += [(dim, 1) if old.shape[dim] == new[lead + dim] else (-1, 0) for dim in range(old.ndim)]
    node = strided(old.node, IndexMap((0,) * old.ndim, tuple(maps), new))
    return old if node is old.node else View(node)


_FIELD = "prng_key_data"


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeysNode(Node):
    """Keys made of the input, their data [..., words]; make it with `as_keys`."""

    def describe_step(self) -> str:
        return "PRNG keys"

    def _data_box(self, box: Box) -> Box:
        return (*box, (0, self.input.shape[-1]))

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(self._data_box(box), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        self.input.add_work(self._data_box(box), out[_FIELD], lowered)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyDataNode(Node):
    """Data [..., words] of the input's keys; make it with `key_data`."""

    def describe_step(self) -> str:
        return "key data"

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box[:-1], found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        first, last = box[-1]
        keys = lowered.read(self.input, box[:-1])
        lowered.add_step(partial(np.copyto, out, keys[_FIELD][..., first:last]))


def is_keys(view: View) -> bool:
    """Reports whether the elements of a view are PRNG keys."""
    return view.dtype.names == (_FIELD,)


def as_keys(view: View) -> View:
    """Returns the keys of a view of their data."""
    if isinstance(view.node, KeyDataNode):
        return View(view.node.input)
    leaf = view.node.own_leaf
    if leaf is None or leaf.prng_impl is None or not view.shape:
        return view
    dtype = np.dtype([(_FIELD, view.dtype, (view.shape[-1],))])
    return View(KeysNode(view.shape[:-1], dtype, (view.node,)))


def key_data(view: View) -> View:
    """Returns the data of a view of keys."""
    if not is_keys(view):
        return view
    if isinstance(view.node, KeysNode):
        return View(view.node.input)
    field = view.dtype[_FIELD]
    return View(KeyDataNode((*view.shape, *field.shape), field.base, (view.node,)))
