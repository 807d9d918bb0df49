"""Interface between a conversion and an output format.

Options, the arrays to write, and the steps of writing. The work directory of a conversion holds journals, and beside
them the format's own files. Blocks go into files that belong to one journal, by its number, so that two processes, or
one after a killed one, never write the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.handlers.type_handlers.stream import BlockOutput
from orbax_t5x.operations.convert.journal import JournalEntry
from orbax_t5x.operations.convert.partition import PlannedArray, PlannedBlock
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.text.wording import leaves_text

BLOCKS_DIRECTORY = "blocks"
"""The directory with the written blocks, in a work directory."""


@dataclasses.dataclass(frozen=True, eq=False)
class WriteOptions:
    """Options of `orbax_t5x.convert` and of safetensors files.

    Attributes:
      beside: contents of the files to put beside safetensors files, by name.
      max_file_bytes: of data in one safetensors file, or one tensor; None for Transformers' own bound.
    """

    format: str = "orbax"
    dtype: Any = None
    overwrite: bool = False
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes
    progress: Progress | None = RestoreOptions.progress
    on_unsupported: Literal["error", "skip"] = "error"
    beside: Mapping[str, bytes] | None = None
    max_file_bytes: int | None = None

    def with_files_of(self, max_bytes: int) -> WriteOptions:
        """Returns these options with a bound on the size of a file."""
        return dataclasses.replace(self, max_file_bytes=max_bytes)


class WriteSummary(NamedTuple):
    """Summary of the written directory.

    Leaves, bytes, what was skipped, and what a killed conversion had written.
    """

    leaves: int
    bytes: int
    skipped: Mapping[str, tuple[tuple[int, ...], str]]
    kept_bytes: int = 0


class BlockStore(Protocol):
    """The files to which a process writes its blocks."""

    def output(self, array: PlannedArray) -> BlockOutput:
        """Opens an array for writing blocks."""
        ...

    def sync(self, arrays: Sequence[PlannedArray]) -> None:
        """Makes the written blocks of some arrays durable; blocks."""
        ...


class OutputFormat(Protocol):
    """A plan's views as a format stores them.

    Making it checks everything and writes nothing.

    Attributes:
      arrays: to write.
      most_compression: how many times smaller than its data a checkpoint may become.
    """

    arrays: Sequence[PlannedArray]
    most_compression: int

    def prepare(self, work: Path) -> None:
        """Prepares a work directory for blocks.

        A killed conversion to this format may have left anything in it.
        """
        ...

    def store(self, work: Path, number: int) -> BlockStore:
        """Returns the store of this journal's process."""
        ...

    def check(self, work: Path, number: int, blocks: Mapping[PlannedBlock, int]) -> set[PlannedBlock]:
        """Reads a journal's blocks; returns the sound blocks.

        All other blocks of its number are removed.
        """
        ...

    def finish(
        self, work: Path, directory: Path, entries: Mapping[PlannedBlock, JournalEntry], numbers: Collection[int]
    ) -> WriteSummary:
        """Makes the complete checkpoint of written blocks, durably.

        `numbers` are those of journals.
        """
        ...

    def note_finished(self) -> None:
        """Counts a call of `finish` by another process.

        It does nothing if no library counts.
        """


def nothing_to_write(plan: RestorePlan) -> UnsupportedCheckpointError:
    """Makes the error for a conversion that would write an empty checkpoint."""
    dropped = len(plan.dropped)
    reason = f"the transforms dropped all leaves ({leaves_text(dropped)})" if dropped else "the source has no leaves"
    return UnsupportedCheckpointError(f"there is nothing to write: {reason}")
