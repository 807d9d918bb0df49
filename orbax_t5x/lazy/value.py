"""Leaves outside checkpoints: arrays in memory, behind functions, or unknown yet.

A value leaf refers to the caller's array and copies nothing before it is read. Of a sharded `jax.Array` only the shards
of this process that a box touches are brought to the host. An array behind a function is read whole for any box: its
function cannot return less. Placeholders stand for values that are known, or computed, later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from orbax_t5x.concurrency import carry, reader_pool, run_in_pool
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy.array import LazyArray
from orbax_t5x.lazy.box import Box, box_size, box_slices, intersect, slices_within
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats


class ValueLeaf(BlockingLeaf):
    """Constant: a NumPy or JAX array, a scalar, or text."""

    is_value = True

    def __init__(self, value: Any, name: str | None = None):
        self.value = value
        self.name: str = "<value>" if name is None else name
        self._array: Any = value if is_jax_array(value) else _to_numpy(value)
        self.shape: tuple[int, ...] = tuple(self._array.shape)
        try:
            self.dtype: np.dtype = np.dtype(self._array.dtype)
        except TypeError:
            raise TypeError(
                f"{self.name}: {self._array.dtype} is no NumPy dtype; for typed keys pass `jax.random.key_data(keys)`"
            ) from None

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return 0

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        if is_jax_array(self._array):
            self._copy_shards(requests)
        else:
            _copy_boxes(self._array, requests)

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        await run_in_pool(reader_pool(), self.read_blocking, requests, stats)

    def _copy_shards(self, requests: Sequence[Request]) -> None:
        wanted = [box_size(box) for box, _ in requests]
        seen: set[Box] = set()
        for shard in self._array.addressable_shards:
            place = tuple(part.indices(size)[:2] for part, size in zip(shard.index, self.shape, strict=True))
            if place in seen:
                continue
            seen.add(place)
            shared = [intersect(box, place) for box, _ in requests]
            if not any(part is not None for part in shared):
                continue
            data = np.asarray(shard.data)
            for i, ((box, out), part) in enumerate(zip(requests, shared, strict=True)):
                if part is not None:
                    out[slices_within(part, box)] = data[slices_within(part, place)]
                    wanted[i] -= box_size(part)
        if any(wanted):
            raise ValueError(
                f"{self.name}: parts of this jax.Array are on devices of other processes; pass one of which each "
                "process addresses what it needs"
            )

    def __repr__(self) -> str:
        return f"ValueLeaf({self.name!r}, shape={self.shape}, dtype={self.dtype.name})"


class OpaqueLeaf(BlockingLeaf):
    """Leaf of a lazy array of the get_fn kind."""

    def __init__(self, array: LazyArray, name: str | None = None):
        self.array = array
        self.name: str = "<function>" if name is None else name
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype = array.dtype
        # It can only be read whole: a caller that cuts reads to size must not call the function for each of them.
        self.chunks: tuple[int, ...] | None = array.shape

    @property
    def working_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Counts the whole array for any box."""
        return math.prod(self.shape) * self.dtype.itemsize if boxes else 0

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Does `read_into` in the calling thread."""
        if requests:
            self._fill(self.array.get(), requests, stats)

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Reads the whole array and copies the boxes out of it."""
        if requests:
            value = await carry(self.array.get_async())
            await run_in_pool(reader_pool(), self._fill, value, requests, stats)

    def _fill(self, value: Any, requests: Sequence[Request], stats: ReadStats) -> None:
        value = np.asarray(value)
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LeafMismatchError(
                f"declared as {self.dtype.name} of shape {self.shape}, but the function gave {value.dtype.name} of "
                f"shape {value.shape}",
                leaf=self.name,
            )
        stats.count(value.nbytes)
        _copy_boxes(value, requests)

    def __repr__(self) -> str:
        return f"OpaqueLeaf({self.name!r}, {self.array!r})"


class PlaceholderLeaf(BlockingLeaf):
    """Array without elements yet; it cannot be read."""

    is_value = True
    _reason: str

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype):
        self.name = name
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = dtype

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Returns 0: no byte of a checkpoint is read."""
        return 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Raises ValueError."""
        self.read_blocking(requests, stats)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Raises ValueError."""
        raise ValueError(self._reason.format(self.name))


class UnfilledLeaf(PlaceholderLeaf):
    """Room that a transform leaves for elements that only a restore knows."""

    _reason = "elements of {} are known only in a restore (ot.restore(…, fallback=…))"


class ComputedLeaf(PlaceholderLeaf):
    """Array that a fallback function computes with JAX.

    `key_dtype` is that of typed PRNG keys, whose shape and dtype are those of their uint32 data.
    """

    _reason = "{}: what a fallback function returns is computed when a plan is executed"

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype, key_dtype: Any = None):
        super().__init__(name, shape, dtype)
        self.key_dtype = key_dtype


def has_unfilled(leaves: Sequence[Leaf]) -> bool:
    """Reports whether a leaf is a placeholder that `fill` has to replace."""
    for leaf in leaves:  # Asked for every leaf of a plan: any() costs three times as much.
        if isinstance(leaf, UnfilledLeaf):
            return True
    return False


def is_jax_array(value: Any) -> bool:
    """Tests for a `jax.Array`, without importing JAX."""
    return hasattr(value, "addressable_shards")


def _copy_boxes(array: np.ndarray, requests: Sequence[Request]) -> None:
    for box, out in requests:
        out[...] = array[box_slices(box)]


def _to_numpy(value: Any) -> np.ndarray:
    array = np.asarray(value, dtype=object) if isinstance(value, str | bytes) else np.asarray(value)
    if array.dtype.kind in "SU":
        return array.astype(object)
    if array.dtype == object and not isinstance(value, np.ndarray | str | bytes):
        raise TypeError(f"{value!r} of type {type(value).__name__} is no array")
    return array
