"""Keywords of a restore, each defined once as a field of `RestoreOptions`.

Functions that users call spell the keywords in their signatures, for `help()` and for editors, and take the defaults
from the fields (`strict: bool = RestoreOptions.strict`). `orbax_t5x.restore` documents them; others refer to it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.files.limits import check_limits, check_memory_limit
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.readers import Limits
from orbax_t5x.readers.detect import check_item
from orbax_t5x.text.progress_bar import Progress, check_progress
from orbax_t5x.transforms.patterns.table import Pattern, pattern_tuple
from orbax_t5x.trees.narrow import check_flag

_as_dtype = on_demand.function("orbax_t5x.transforms.dtype_names", "as_dtype")  # of a few restores

MEMORY_LIMIT_BYTES = 256 << 20
"""Host buffers in flight where no limit is given. Below about eight chunks of a chunked format in flight, chunks that
several shards need are decoded twice."""


BroadcastMode = Literal["auto"] | bool
"""Way in which leaves come to several processes: read by each, or in parts that their devices send each other."""


class AnyProcesses(Protocol):
    """`MultiprocessingOptions` of Orbax: the processes of a call."""

    primary_host: int | None
    active_processes: set[int] | None
    barrier_sync_key_prefix: str | None


class ExecuteKeywords(TypedDict, total=False):
    """Keywords of `RestorePlan.execute` for type checkers."""

    verify: Verify
    memory_limit_bytes: int | None
    progress: Progress | None
    broadcast: BroadcastMode


class SourceKeywords(TypedDict, total=False):
    """Keywords of every restore for type checkers."""

    item: str | None
    is_resuming: bool | None
    strict: bool
    dtype: Any
    allow_lossy_cast: bool
    limits: Limits | None
    fallback_for: Sequence[Pattern] | None


class PlanKeywords(SourceKeywords, total=False):
    """Keywords of `orbax_t5x.plan_restore` for type checkers."""

    fallback: Any
    multiprocessing_options: AnyProcesses | None


class RestoreKeywords(PlanKeywords, ExecuteKeywords, total=False):
    """Keywords of `orbax_t5x.restore` for type checkers."""


def memory_limit(memory_limit_bytes: int | None) -> int:
    """Returns the limit that is given, or the default."""
    return MEMORY_LIMIT_BYTES if memory_limit_bytes is None else memory_limit_bytes


def check_dtype(dtype: Any) -> None:
    """Raises TypeError for a `dtype` unknown to NumPy."""
    try:
        _as_dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: {error}" if isinstance(dtype, str) else f"dtype={dtype!r}: {error}") from None


def check_processes(processes: object) -> None:
    """Raises TypeError for other types than Orbax's `MultiprocessingOptions`."""
    if processes is not None and not hasattr(processes, "active_processes"):
        raise TypeError(f"multiprocessing_options={processes!r}: pass ocp.options.MultiprocessingOptions(…)")


# Not compared by value: a fallback may hold arrays.
@dataclasses.dataclass(eq=False, kw_only=True)
class RestoreOptions:
    """Options of a restore, checked; `orbax_t5x.restore` documents each.

    `multiprocessing_options` are the processes that restore together. `verify`, `memory_limit_bytes`, `progress` and
    `broadcast` decide how a plan is executed, and change no value. All others decide which bytes become which leaf.

    Raises:
      TypeError: `item` is no name, or another option has a value of another type.
      ValueError: an unknown `verify`, `progress` or `broadcast`, a limit below one byte, or a pattern that is no
        regular expression.
    """

    item: str | None = None
    fallback: Any = dataclasses.field(default=None, repr=False)
    is_resuming: bool | None = None
    strict: bool = True
    dtype: Any = None
    allow_lossy_cast: bool = False
    verify: Verify = "touched"
    memory_limit_bytes: int | None = None
    progress: Progress | None = None
    limits: Limits | None = None
    broadcast: BroadcastMode = "auto"
    fallback_for: Sequence[Pattern] | None = None
    multiprocessing_options: AnyProcesses | None = None

    def __post_init__(self) -> None:
        check_item(self.item)
        check_limits(self.limits)
        if self.is_resuming is not None:
            check_flag("is_resuming", self.is_resuming)
        check_flag("strict", self.strict)
        if self.dtype is not None:
            check_dtype(self.dtype)
        check_flag("allow_lossy_cast", self.allow_lossy_cast)
        if self.verify not in ("touched", "full", "off"):
            raise ValueError(f"verify must be 'touched', 'full' or 'off', not {self.verify!r}")
        check_memory_limit(self.memory_limit_bytes)
        check_progress(self.progress)
        broadcast: Any = self.broadcast
        # An array would be compared element by element.
        if not isinstance(broadcast, bool | np.bool_ | str) or broadcast not in ("auto", True, False):
            raise ValueError(f"broadcast must be 'auto', True or False, not {broadcast!r}")
        check_processes(self.multiprocessing_options)
        if isinstance(self.fallback, str | os.PathLike):
            raise TypeError(
                "fallback= is a tree of values or a function, and not a path; pass what orbax_t5x.restore returns"
            )
        if self.fallback_for is not None:
            self.fallback_for = pattern_tuple(self.fallback_for, "fallback_for")

    @staticmethod
    def among(arguments: Mapping[str, Any]) -> RestoreOptions:
        """Takes the options from `locals()`, or from `vars()` of an object."""
        return RestoreOptions(**{name: arguments[name] for name in _NAMES if name in arguments})

    def within(self, limit: int | None) -> RestoreOptions:
        """Returns the options with `memory_limit_bytes` at most `limit`."""
        if limit is None:
            return self
        given = limit if self.memory_limit_bytes is None else self.memory_limit_bytes
        return dataclasses.replace(self, memory_limit_bytes=min(given, limit))

    @property
    def limit(self) -> int:
        """`memory_limit_bytes`, or the default."""
        return memory_limit(self.memory_limit_bytes)


_NAMES = tuple([field.name for field in dataclasses.fields(RestoreOptions)])
