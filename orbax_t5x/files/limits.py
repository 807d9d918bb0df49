"""Limits on a checkpoint's claims to its opener's resources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeGuard

import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, for_caller
from orbax_t5x.files.memory import require_memory

_MIB = 1 << 20
# What is charged for a leaf beside its name. It takes some 400 bytes, but all that `Limits.entries` permits are listed.
LEAF_BYTES = 64
# Sizes of arrays are signed 64-bit numbers everywhere below.
_MAX_BYTES = (1 << 63) - 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_memory_limit(limit: object) -> None:
    """Checks a `memory_limit_bytes`; None means the default."""
    if limit is None:
        return
    if not _is_number(limit):
        raise for_caller(TypeError(f"memory_limit_bytes is a number of bytes, such as 1 << 30, not {limit!r}"))
    if not limit >= 1:
        raise for_caller(ValueError(f"memory_limit_bytes must be at least 1, not {limit}"))


def check_limits(limits: object) -> None:
    """Checks a `limits`; None means `Limits()`."""
    if limits is not None and not isinstance(limits, Limits):
        raise for_caller(TypeError(f"limits= is an orbax_t5x.Limits(name=bound, …) or None, not {limits!r}"))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on the claims of a file's headers.

    A claim beyond its bound is a `LimitExceededError`, before anything is allocated. All are positive numbers: a bound
    of zero or less is a ValueError, because nothing could be opened under it, and what is no number is a TypeError.

    Attributes:
      index_bytes: the largest index, header or list of leaves that is read whole.
      metadata_bytes: how much memory the leaves of one opening may take together, with their names, texts and errors,
        and the metadata that are kept; a text that many leaves share counts once.
      json_bytes: the largest other JSON file: a model's configuration, the metadata of a step or of one array.
      block_bytes: the largest decompressed SSTable block.
      entries: the most leaves in one checkpoint, and the most strings in one leaf.
      rank: the most dimensions of a leaf.
      name_bytes: the longest name of a leaf, in UTF-8.
      name_levels: the most parts of a name between slashes: a tree of the leaves is nested so deep.
      msgpack_depth: the deepest nesting of a msgpack tree.
      chunk_bytes: the largest chunk of a chunked format (zarr), decoded; to read one element
        takes memory for all of it. Never more than this process can have, whatever is set here.
      chunks: the most chunks of one read that are asked for one by one: a remote store that keeps them as files has no
        list of them, and one that is absent may hold the fill value.
      io_timeout_secs: how long one read of a remote store may take.

    Example:
      >>> try:
      ...     ot.open_checkpoint(bundle, limits=ot.Limits(entries=10))
      ... except ot.errors.LimitExceededError as error:
      ...     "Limits.entries" in str(error)
      True
    """

    index_bytes: int = 256 * _MIB
    metadata_bytes: int = 256 * _MIB
    json_bytes: int = 16 * _MIB
    block_bytes: int = 64 * _MIB
    entries: int = 2_000_000
    rank: int = 32
    name_bytes: int = 4096
    name_levels: int = 64
    msgpack_depth: int = 64
    chunk_bytes: int = 2048 * _MIB
    chunks: int = 1 << 18
    io_timeout_secs: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_number(value):
                raise TypeError(f"Limits({field.name}={value!r}): a limit is a number")
            if not value > 0:
                raise ValueError(f"Limits({field.name}={value!r}): a limit must be positive")

    def require_shape(self, shape: Sequence[int], dtype: np.dtype) -> None:
        """Refuses too many dimensions, or uncountably many bytes.

        A zero among the sizes counts as one: NumPy takes (0, 2**62) for too large, too, and other dimensions of such an
        array may be read by themselves.
        """
        if len(shape) > self.rank:
            self.require_rank(len(shape))
        if math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES:
            raise CorruptCheckpointError(f"{dtype.name} of shape {list(shape)} has more bytes than can be counted")

    def require_rank(self, rank: int) -> None:
        """Refuses an array of too many dimensions."""
        if rank > self.rank:
            raise LimitExceededError(f"{rank} dimensions, more than Limits.rank = {self.rank}")

    def require_name(self, name: str, path: str) -> None:
        """Charges a leaf and its name; refuses long or deep names."""
        nbytes = len(name.encode())
        if nbytes > self.name_bytes:
            self.require_name_length(nbytes, path)
        charge_metadata(LEAF_BYTES + nbytes, path)
        if name.count("/") >= self.name_levels:
            raise LimitExceededError(
                f"a name of {name.count('/') + 1} levels, more than Limits.name_levels = {self.name_levels}", path=path
            )

    def require_name_length(self, nbytes: int, path: str) -> None:
        """Refuses a name's length before the name is joined."""
        if nbytes > self.name_bytes:
            raise LimitExceededError(f"a name of more than Limits.name_bytes = {self.name_bytes} bytes", path=path)

    def require_chunk(self, nbytes: int, what: str) -> None:
        """Refuses a chunk that takes too much memory."""
        if nbytes > self.chunk_bytes:
            raise LimitExceededError(f"{what} takes {nbytes} bytes, more than Limits.chunk_bytes = {self.chunk_bytes}")
        require_memory(nbytes, what)


# Of an opening: `Limits.metadata_bytes`, and what is left of it.
_BUDGET: ContextVar[list[int] | None] = ContextVar("orbax_t5x_metadata_budget", default=None)


@contextmanager
def metadata_budget(limits: Limits) -> Generator[None, None, None]:
    """Bounds the metadata of an opening by `Limits.metadata_bytes`."""
    token = _BUDGET.set([limits.metadata_bytes, limits.metadata_bytes])
    try:
        yield
    finally:
        _BUDGET.reset(token)


def charge_metadata(nbytes: int, path: str) -> None:
    """Takes memory that stays as long as the checkpoint."""
    budget = _BUDGET.get()
    if budget is None:
        return
    budget[1] -= nbytes
    if budget[1] < 0:
        raise LimitExceededError(
            f"leaves, names, texts and errors take more than Limits.metadata_bytes = {budget[0]}", path=path
        )
