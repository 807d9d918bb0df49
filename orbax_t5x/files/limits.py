"""Limits on a checkpoint's claims to its opener's resources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, for_caller

_MIB = 1 << 20
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
      index_bytes: the largest index or list of leaves that is read whole, and the names in it together.
      header_bytes: the largest header of a safetensors file.
      json_bytes: the largest other JSON file: a model's configuration, the metadata of a step or of one array.
      entries: the most leaves in one checkpoint, values in one msgpack or pickle tree, and strings in one leaf.
      rank: the most dimensions of a leaf.
      nesting: the most levels of a tree, and so parts of a name between slashes.

    Example:
      >>> try:
      ...     ot.open_checkpoint(bundle, limits=ot.Limits(entries=10))
      ... except ot.errors.LimitExceededError as error:
      ...     "Limits.entries" in str(error)
      True
    """

    index_bytes: int = 256 * _MIB
    header_bytes: int = 100 * _MIB
    json_bytes: int = 16 * _MIB
    entries: int = 2_000_000
    rank: int = 32
    nesting: int = 64

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

    def require_entries(self, count: int, path: str) -> None:
        """Refuses too many leaves or values."""
        if count > self.entries:
            raise LimitExceededError(f"{count} entries, more than Limits.entries = {self.entries}", path=path)

    def require_name(self, name: str, path: str) -> None:
        """Refuses a name of too many levels, or one that has no UTF-8 form: escapes of JSON may make such."""
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CorruptCheckpointError(f"the name {name[:80]!r} holds half a character", path=path) from None
        if name.count("/") >= self.nesting:
            raise LimitExceededError(
                f"a name of {name.count('/') + 1} levels, more than Limits.nesting = {self.nesting}", path=path
            )
