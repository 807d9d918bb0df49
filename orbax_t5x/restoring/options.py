"""Keywords of a restore, defined once: those that decide the plan, and those that decide how it is read.

`restore`, `plan_restore`, `RestorePlan.execute`, `TrainStateRestore` and `convert` spell these keywords in their
signatures, for `help()` and for editors; each takes its defaults from the fields here (`strict: bool =
PlanOptions.strict`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np

from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.readers import Limits
from orbax_t5x.readers.detect.user_path import check_item
from orbax_t5x.storage.limits import check_limits, check_memory_limit
from orbax_t5x.text.progress_bar import Progress, check_progress
from orbax_t5x.transforms.patterns.table import Pattern, pattern_tuple
from orbax_t5x.trees.narrow import check_flag

MEMORY_LIMIT_BYTES = 256 << 20
"""Host buffers in flight where no limit is given. Below about eight chunks of a chunked format in flight, chunks that
several shards need are decoded twice."""


BroadcastMode = Literal["auto"] | bool
"""Way in which leaves come to several processes that need them: read by each, or by one that sends them."""


def memory_limit(memory_limit_bytes: int | None) -> int:
    """Returns the limit that is given, or the default."""
    return MEMORY_LIMIT_BYTES if memory_limit_bytes is None else memory_limit_bytes


def check_dtype(dtype: Any) -> None:
    """Raises TypeError for a `dtype` that NumPy does not know; None is the target's own."""
    try:
        np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype={dtype!r}: {error}") from None


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


@dataclasses.dataclass(frozen=True, eq=False)
class _FromKeywords:
    """Options that can be taken from an object with attributes of the same names."""

    @classmethod
    def of(cls, keywords: Any) -> Self:
        """Takes the options from an object (`TrainStateRestore`) with attributes of the same names."""
        return cls(**{field.name: getattr(keywords, field.name) for field in dataclasses.fields(cls)})


# Not compared by value: a fallback may hold arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class PlanOptions(_FromKeywords):
    """Keywords that decide which bytes become which leaf.

    Attributes:
      item: which item of an Orbax step.
      fallback: values for target leaves that the checkpoint lacks: a tree like the target or its state dict, or a
        function that returns one, under the same rules. What it computes with JAX is computed under `jax.jit`, and only
        what is missing; NumPy arrays and Python scalars that it returns are taken as they are.
      is_resuming: the transforms were applied already; None decides by the record in the checkpoint.
      strict: a leaf of the checkpoint without a counterpart in the target is a problem.
      dtype: replaces the target's dtype only for floating-point model parameters.
      allow_lossy_cast: permits conversions that may lose values.
      limits: what a file's headers may claim; None: `Limits()`.
      fallback_for: regexes; the fallback fills only target leaves whose whole name one of them matches. None: it fills
        all that are missing, with a warning where model parameters are, and a problem where nothing is restored.

    Raises:
      TypeError: `item` is no name, or another keyword has a value of another type.
      ValueError: a pattern is no regular expression.
    """

    item: str | None = None
    fallback: Any = dataclasses.field(default=None, repr=False)
    is_resuming: bool | None = None
    strict: bool = True
    dtype: Any = None
    allow_lossy_cast: bool = False
    limits: Limits | None = None
    fallback_for: Sequence[Pattern] | None = None

    def __post_init__(self) -> None:
        check_item(self.item)
        check_limits(self.limits)
        if self.is_resuming is not None:
            check_flag("is_resuming", self.is_resuming)
        check_flag("strict", self.strict)
        check_dtype(self.dtype)
        check_flag("allow_lossy_cast", self.allow_lossy_cast)
        if self.fallback_for is not None:
            object.__setattr__(self, "fallback_for", pattern_tuple(self.fallback_for, "fallback_for"))


@dataclasses.dataclass(frozen=True, eq=False)
class ReadOptions(_FromKeywords):
    """Keywords that decide how a plan is executed; none of them changes a value.

    Attributes:
      verify: "touched": checksums wherever the bytes read cover what they cover; "full": the rest is read, once;
        "off".
      memory_limit_bytes: host buffers in flight, None for `MEMORY_LIMIT_BYTES`; a larger item is read by itself.
        Chunks that are decoded meanwhile have as much memory of their own.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, from one thread at a time; "bar" shows a bar on a
        terminal, and nothing without one.
      broadcast: with several processes, True: each stored byte is read by one of them and sent to those that need it.
        False: each reads what it needs. "auto": one of both for each leaf, by requests and bytes and the store. Every
        process passes the same. With one process nothing changes.

    Raises:
      ValueError: an unknown `verify`, `progress` or `broadcast`, or a limit below one byte.
      TypeError: the limit is no number.
    """

    verify: Verify = "touched"
    memory_limit_bytes: int | None = None
    progress: Progress | None = None
    broadcast: BroadcastMode = "auto"

    def __post_init__(self) -> None:
        if self.verify not in ("touched", "full", "off"):
            raise ValueError(f"verify must be 'touched', 'full' or 'off', not {self.verify!r}")
        check_memory_limit(self.memory_limit_bytes)
        check_progress(self.progress)
        if not isinstance(self.broadcast, bool | np.bool_) and not _is_auto(self.broadcast):
            raise ValueError(f"broadcast must be 'auto', True or False, not {self.broadcast!r}")

    def within(self, limit: int | None) -> Self:
        """Returns the options with `memory_limit_bytes` at most `limit`, and `limit` itself where it is not given."""
        if limit is None:
            return self
        given = limit if self.memory_limit_bytes is None else self.memory_limit_bytes
        return dataclasses.replace(self, memory_limit_bytes=min(given, limit))

    @property
    def limit(self) -> int:
        """`memory_limit_bytes`, or the default."""
        return memory_limit(self.memory_limit_bytes)


@dataclasses.dataclass(eq=False, kw_only=True)
class RestoreKeywords:
    """All of these keywords as fields, for the classes that hold the arguments of a restore."""

    item: str | None = PlanOptions.item
    fallback: Any = dataclasses.field(default=PlanOptions.fallback, repr=False)
    is_resuming: bool | None = PlanOptions.is_resuming
    strict: bool = PlanOptions.strict
    dtype: Any = PlanOptions.dtype
    allow_lossy_cast: bool = PlanOptions.allow_lossy_cast
    verify: Verify = ReadOptions.verify
    memory_limit_bytes: int | None = ReadOptions.memory_limit_bytes
    progress: Progress | None = ReadOptions.progress
    limits: Limits | None = PlanOptions.limits
    broadcast: BroadcastMode = ReadOptions.broadcast
    fallback_for: Sequence[Pattern] | None = PlanOptions.fallback_for
