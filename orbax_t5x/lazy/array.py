"""`LazyArray`, T5X's base class, and its two children.

The children call a function to get their value.

A lazy array knows its shape and dtype and holds no data; `get()` reads it. These kinds read whole, however little is
wanted: a function is opaque. Views (`view.py`) are the kind that reads boxes. No thread is made before the first
`get_async`.
"""

from __future__ import annotations

import abc
import concurrent.futures
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np

from orbax_t5x.concurrency import CarriedError, function_pool, run_in_pool, run_on_read_thread
from orbax_t5x.concurrency.carried import call_of_user
from orbax_t5x.errors import for_caller
from orbax_t5x.trees.narrow import is_mapping


class LazyArray(abc.ABC):
    """Unread array of known shape and dtype.

    The value comes from `get()`. Subclass it and implement `get` and `get_async`, or use one of its kinds.

    Example:
      >>> with ot.open_checkpoint(bundle) as checkpoint:
      ...     table = checkpoint.tree()["shared"]["embedding"]
      ...     isinstance(table, ot.LazyArray), table.shape, table[:2].get().shape
      (True, (128, 16), (2, 16))
    """

    def __init__(self, shape: Sequence[int], dtype: Any, get_fn: Callable[[], Any]):
        """Holds a function that reads.

        Args:
          shape: of the array.
          dtype: of the array; what `get_fn` returns is cast to it if it differs.
          get_fn: returns the array, or an awaitable of it, as the subclass requires.
        """
        self._shape = tuple(int(size) for size in shape)
        self._dtype = np.dtype(dtype)
        self._get_fn = get_fn

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype (`ml_dtypes`' included); object for strings."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the value in memory, from shape and dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    def astype(self, dtype: Any) -> LazyArray:
        """Returns the same array in another dtype; nothing is read."""
        return type(self)(self._shape, dtype, self._get_fn)

    @abc.abstractmethod
    def get(self) -> Any:
        """Reads the array."""

    @abc.abstractmethod
    async def get_async(self) -> Any:
        """Reads the array without blocking the event loop."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the array, for `np.asarray(array)`."""
        if copy is False:
            raise ValueError("a lazy array has no memory to share: reading it always makes a new array")
        return np.asarray((self if dtype is None else self.astype(dtype)).get())

    def _no_arithmetic(self, other: Any = None) -> Any:
        """Raises a TypeError that names the alternative.

        With a NumPy array, NumPy computes, which reads this array.
        """
        if hasattr(other, "__array__") and not isinstance(other, LazyArray):
            return NotImplemented
        raise TypeError(
            "a lazy array is not read yet and takes no arithmetic: np.asarray(array) reads it; in a restore, "
            "transforms compute (ot.transforms.Cast, Average, AddLowRank)"
        )

    __neg__ = __abs__ = _no_arithmetic
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _no_arithmetic
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _no_arithmetic

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name})"

    def _as_declared(self, value: Any) -> Any:
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        return value if value.dtype == self._dtype else value.astype(self._dtype)


class _FunctionPool:
    """Class attribute with the pool, made on first use."""

    def __get__(self, instance: object, owner: type) -> concurrent.futures.Executor:
        return function_pool()


class LazyThreadPoolArray(LazyArray):
    """Lazy array with a blocking `get_fn`.

    `get_async` calls it in a pool of threads.

    Attributes:
      executor: the pool, one for all such arrays unless a subclass (or an assignment to the class) sets another.

    Example:
      >>> array = ot.LazyThreadPoolArray((2, 3), np.float32, lambda: np.ones((2, 3)))
      >>> array, array.get().dtype
      (LazyThreadPoolArray(shape=(2, 3), dtype=float32), dtype('float32'))
    """

    executor: ClassVar[Any] = _FunctionPool()

    def get(self) -> Any:
        """Calls the function, and casts to the declared dtype."""
        try:
            value = call_of_user(self._get_fn)
        except StopIteration as error:
            raise for_caller(RuntimeError("the function of a lazy array raised StopIteration")) from error
        return self._as_declared(value)

    async def get_async(self) -> Any:
        """Calls the function in a thread of `executor`; casts likewise."""
        try:
            return await run_in_pool(self.executor, self.get)
        except CarriedError as carried:
            # The caller's own event loop decides what becomes of it.
            raise carried.error from None


class LazyAwaitableArray(LazyArray):
    """Lazy array with a `get_fn` that returns an awaitable.

    A coroutine, or a TensorStore future.

    Example:
      >>> async def read():
      ...     return np.arange(3)
      >>> ot.LazyAwaitableArray((3,), np.float32, read).get()
      array([0., 1., 2.], dtype=float32)
    """

    @classmethod
    def from_array(cls, array: Any, get_fn: Callable[[], Awaitable[Any]], dtype: Any = None) -> Self:
        """Returns a lazy array with the shape of an array.

        Args:
          array: anything with shape and dtype.
          get_fn: reads the value.
          dtype: that of the lazy array; None for the array's own.
        """
        return cls(array.shape, array.dtype if dtype is None else dtype, get_fn)

    @classmethod
    def from_tensor_store_spec(
        cls, ts_spec: Any, get_fn: Callable[[], Awaitable[Any]], dtype: Any = None, *, bfloat16_as_uint16: bool = False
    ) -> Self:
        """Makes a lazy array from a TensorStore spec.

        The shape is the spec's; the spec is not opened.

        Args:
          ts_spec: a `tensorstore.Spec`, or its JSON form.
          get_fn: reads what the spec describes.
          dtype: that of the lazy array; None for the one that the spec records.
          bfloat16_as_uint16: the spec comes from a checkpoint that stores bfloat16 as the same bits in uint16 (version
            2 of T5X's format). A uint16 array is then bfloat16, and what `get_fn` returns is reinterpreted. The dtype
            does not record.

        Raises:
          ValueError: the spec records no shape, or no dtype where none is given.
        """
        shape, stored_dtype = _spec_shape_dtype(ts_spec, dtype)
        if bfloat16_as_uint16 and stored_dtype == np.uint16:
            stored_dtype, get_fn = np.dtype(ml_dtypes.bfloat16), _Bfloat16Bits(get_fn)
        return cls(shape, stored_dtype if dtype is None else dtype, get_fn)

    @classmethod
    def from_tensor_store_spec_or_array(
        cls,
        maybe_ts_spec: Any,
        get_fn: Callable[[], Awaitable[Any]],
        dtype: Any = None,
        *,
        bfloat16_as_uint16: bool = False,
    ) -> Self:
        """Calls `from_tensor_store_spec` for a spec, `from_array` for an array."""
        if isinstance(maybe_ts_spec, Mapping) or hasattr(maybe_ts_spec, "to_json"):
            return cls.from_tensor_store_spec(maybe_ts_spec, get_fn, dtype, bfloat16_as_uint16=bfloat16_as_uint16)
        return cls.from_array(maybe_ts_spec, get_fn, dtype)

    def get(self) -> Any:
        """Awaits the function in another thread's event loop."""
        found: list[Any] = []

        async def read() -> None:
            found.append(await self.get_async())

        run_on_read_thread(read())
        return found[0]

    async def get_async(self) -> Any:
        """Awaits the function, and casts to the declared dtype."""
        try:
            value = await self._get_fn()
        except BaseException as error:
            for_caller(error)
            raise
        return self._as_declared(value)


class _Bfloat16Bits:
    """A get_fn that reads a uint16 result as bfloat16 bits."""

    def __init__(self, get_fn: Callable[[], Awaitable[Any]]):
        self._get_fn = get_fn

    async def __call__(self) -> Any:
        value = await self._get_fn()
        return np.asarray(value).view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value


def _spec_shape_dtype(ts_spec: Any, default_dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    json: Mapping[str, Any] = ts_spec if is_mapping(ts_spec) else ts_spec.to_json()
    metadata: Mapping[str, Any] = json.get("metadata") or {}
    shape = metadata.get("shape", metadata.get("dimensions"))
    dtype = metadata.get("dtype", metadata.get("data_type", metadata.get("dataType", json.get("dtype"))))
    if not isinstance(dtype, str):
        dtype = default_dtype
    if shape is None or dtype is None:
        raise ValueError(
            f"the TensorStore spec records no {'shape' if shape is None else 'dtype'}: metadata {dict(metadata)}"
        )
    return tuple(shape), np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
