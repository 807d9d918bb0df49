"""Interface between a conversion and an output format.

Options, the arrays to write and their blocks, and the steps of writing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.handlers.type_handlers.stream import BlockOutput
from orbax_t5x.lazy import Box, View
from orbax_t5x.lazy.box import box_size
from orbax_t5x.lazy.chunks import grid_boxes
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.text.wording import leaves_text


@dataclasses.dataclass(frozen=True, eq=False)
class WriteOptions:
    """Options of `orbax_t5x.convert` and of safetensors files.

    Attributes:
      beside: contents of the files to put beside safetensors files, by name.
    """

    format: str = "orbax"
    dtype: Any = None
    overwrite: bool = False
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes
    progress: Progress | None = RestoreOptions.progress
    on_unsupported: Literal["error", "skip"] = "error"
    beside: Mapping[str, bytes] | None = None


class WriteSummary(NamedTuple):
    """Counts of a written checkpoint, and the leaves that were left out."""

    leaves: int
    bytes: int
    skipped: Mapping[str, tuple[tuple[int, ...], str]]


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedArray:
    """Array to write under `key` in blocks of shape `chunk`."""

    name: str
    key: str
    view: View
    chunk: tuple[int, ...]


class PlannedBlock(NamedTuple):
    """Box of an array that is read and written at once: one chunk."""

    array: PlannedArray
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return box_size(self.box) * self.array.view.dtype.itemsize


def cut_into_blocks(arrays: Iterable[PlannedArray]) -> list[PlannedBlock]:
    """Lists the blocks of all arrays, in order."""
    return [PlannedBlock(array, box) for array in arrays for box in grid_boxes(array.view.shape, array.chunk)]


class OutputFormat(Protocol):
    """A plan's views as a format stores them.

    Making it checks everything and writes nothing.

    Attributes:
      arrays: to write.
      most_compression: how many times smaller than its data a checkpoint may become.
    """

    arrays: Sequence[PlannedArray]
    most_compression: int

    def prepare(self, blocks: Path) -> None:
        """Prepares an empty directory for blocks."""

    def output(self, blocks: Path, array: PlannedArray) -> BlockOutput:
        """Opens an array in that directory for writing."""
        ...

    def finish(self, blocks: Path, directory: Path) -> WriteSummary:
        """Makes the complete checkpoint of the written blocks, durably."""
        ...


def nothing_to_write(plan: RestorePlan) -> UnsupportedCheckpointError:
    """Makes the error for a conversion that would write an empty checkpoint."""
    dropped = len(plan.dropped)
    reason = f"the transforms dropped all leaves ({leaves_text(dropped)})" if dropped else "the source has no leaves"
    return UnsupportedCheckpointError(f"there is nothing to write: {reason}")
