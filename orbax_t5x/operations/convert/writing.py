"""What the writers of a conversion take and give, whatever their format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.restoring.options import ReadOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.text.wording import leaves_text


@dataclasses.dataclass(frozen=True, eq=False)
class WriteOptions:
    """How a conversion writes; `orbax_t5x.convert` says what the first six mean.

    Attributes:
      format, dtype, overwrite, memory_limit_bytes, progress, on_unsupported: as there.
      config: what stands in the config.json beside safetensors files; None: there is none.
    """

    format: str = "orbax"
    dtype: Any = None
    overwrite: bool = False
    memory_limit_bytes: int | None = ReadOptions.memory_limit_bytes
    progress: Progress | None = ReadOptions.progress
    on_unsupported: Literal["error", "skip"] = "error"
    config: bytes | None = None


class Written(NamedTuple):
    """What is in the directory now.

    Attributes:
      leaves: how many arrays.
      bytes: of their data, decoded.
      skipped: (shape, dtype name) of what was left out, by name.
      kept_bytes: how many of the bytes a killed conversion had written.
    """

    leaves: int
    bytes: int
    skipped: Mapping[str, tuple[tuple[int, ...], str]]
    kept_bytes: int = 0


def nothing_to_write(plan: RestorePlan) -> UnsupportedCheckpointError:
    """The error of a conversion that would write an empty checkpoint."""
    dropped = len(plan.dropped)
    reason = (
        f"the transforms left out all that there was ({leaves_text(dropped)})"
        if dropped
        else "the source has no leaves"
    )
    return UnsupportedCheckpointError(f"there is nothing to write: {reason}")
