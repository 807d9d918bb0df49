"""The writing of a conversion.

Blocks of views are written into a private directory beside the destination, and what was read is compared with the
source's checksums. Then the format completes the checkpoint, which takes the destination's name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from orbax_t5x.concurrency import LoopThread
from orbax_t5x.errors import CheckpointIOError, Fix
from orbax_t5x.operations.convert.destination import Destination, made_parents
from orbax_t5x.operations.convert.orbax_output import OrbaxFormat
from orbax_t5x.operations.convert.output_format import OutputFormat, WriteOptions, WriteSummary, cut_into_blocks
from orbax_t5x.operations.convert.pipeline import write_blocks
from orbax_t5x.operations.convert.safetensors_output import SafetensorsFormat
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import OnProgress
from orbax_t5x.text.wording import size_text

FORMATS: dict[str, Callable[[RestorePlan, WriteOptions], OutputFormat]] = {
    "orbax": OrbaxFormat,
    "safetensors": SafetensorsFormat,
}
_BLOCKS_DIRECTORY = "blocks"


class ConversionJob:
    """Planned views, the format that stores them, and their destination."""

    def __init__(self, plan: RestorePlan, destination: Destination, writing: WriteOptions):
        """Checks that the format can store the plan."""
        self._destination = destination
        self._writing = writing
        self._format = FORMATS[writing.format](plan, writing)
        self._blocks = cut_into_blocks(self._format.arrays)

    def run(self, progress: OnProgress | None) -> WriteSummary:
        """Writes the checkpoint."""
        target = self._destination.target
        with made_parents(target.parent), WorkDirectory(target, self._destination.name) as work:
            return self._run(work, work.path / target.name, progress)

    def _run(self, work: WorkDirectory, complete: Path, progress: OnProgress | None) -> WriteSummary:
        self._destination.check(self._writing)
        self._check_space(work.path)
        directory = work.path / _BLOCKS_DIRECTORY
        directory.mkdir()
        self._format.prepare(directory)
        limit = memory_limit(self._writing.memory_limit_bytes)
        with LoopThread("orbax_t5x-write") as thread:
            thread.run(write_blocks(self._blocks, self._format, directory, limit, progress))
        summary = self._format.finish(directory, complete)
        self._destination.check(self._writing)
        self._destination.publish(work, complete, self._writing)
        return summary

    def _check_space(self, work: Path) -> None:
        """Raises CheckpointIOError if the disk has too little room for the checkpoint."""
        nbytes = sum(block.nbytes for block in self._blocks)
        disk = os.statvfs(work)
        free = disk.f_bavail * disk.f_frsize
        most = self._format.most_compression
        if disk.f_blocks and nbytes > free * most:
            compressed = f", and compression makes data {most} times smaller at most" if most > 1 else ""
            raise CheckpointIOError(
                f"{size_text(nbytes)} are to be written, but {size_text(free)} are free in {work.parent}{compressed}",
                path=self._destination.name,
                errno=errno.ENOSPC,
                fix=Fix("free space there, take another destination, or drop large leaves by a transform"),
            )
