"""A conversion by a process or by all processes of a job.

Every process makes the same plan and writes its work share of the blocks; the primary process owns the work directory,
checks what a killed conversion left there, and finishes. There are three barriers: when the primary has prepared the
work directory, when all blocks are durable, and when the result is in place. A process that fails sends its error at
the next barrier, and leaves a file that stops the others before it. All processes must see the same work directory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orbax_t5x.concurrency import LoopThread
from orbax_t5x.concurrency.cleanup import Cleanup
from orbax_t5x.errors import CheckpointIOError, Fix, Problem, RestorePlanError
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.multihost.agreement import Agreement
from orbax_t5x.operations.convert.destination import Destination, made_parents
from orbax_t5x.operations.convert.fingerprint import arrays_digest, conversion_digest
from orbax_t5x.operations.convert.journal import Journal, JournalEntry, journal_path, journals, read_journal
from orbax_t5x.operations.convert.orbax_output import OrbaxFormat
from orbax_t5x.operations.convert.output_format import OutputFormat, WriteOptions, WriteSummary
from orbax_t5x.operations.convert.partition import PlannedBlock, cut_into_blocks, divide_blocks
from orbax_t5x.operations.convert.pipeline import STOP_FILE, BlockPipeline
from orbax_t5x.operations.convert.safetensors_output import SafetensorsFormat
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import OnProgress
from orbax_t5x.text.wording import size_text

_logger = logging.getLogger(__name__)

FORMATS: dict[str, Callable[[RestorePlan, WriteOptions], OutputFormat]] = {
    "orbax": OrbaxFormat,
    "safetensors": SafetensorsFormat,
}


class _StartMessage(NamedTuple):
    """Message of the primary process to the others before writing.

    It has the name of the work directory, the digest of the conversion (or a unique text), the number of the primary's
    journal, which those of the others follow, and the numbers of the durable blocks.
    """

    directory: str
    conversion: str
    first: int
    kept: Sequence[int]


class ConversionJob:
    """Writer of a plan's views into a directory."""

    def __init__(self, plan: RestorePlan, destination: Destination, writing: WriteOptions, agreement: Agreement):
        """Checks that the plan can be stored."""
        self._plan = plan
        self._destination = destination
        self._target = destination.target
        group = agreement.group
        # The primary process is the first writer, and may be the only one.
        self._turn = (group.rank - group.primary_rank) % group.size
        self._is_primary = group.is_primary
        self._writers = group.size if destination.is_shared else 1
        self._writing = writing
        self._agreement = agreement
        self._format = FORMATS[writing.format](plan, writing)
        self._blocks = cut_into_blocks(self._format.arrays)
        self._limit = memory_limit(writing.memory_limit_bytes)
        self._entries: dict[int, JournalEntry] = {}
        self._numbers: set[int] = set()
        leaves = [leaf for array in self._format.arrays for leaf in array.view.leaves()]
        self._leaves = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
        mine = [destination.name, writing.format, writing.overwrite, arrays_digest(self._format.arrays)]
        if any(other != mine for other in agreement.of_all(mine)):
            message = "the processes of this conversion were given different sources, destinations or options"
            fix = "call convert with the same arguments on every process"
            raise RestorePlanError([Problem("provenance", None, message, Fix(fix))], path=destination.name)

    def run(self, cleanup: Cleanup, progress: OnProgress | None) -> WriteSummary:
        """Writes the checkpoint."""
        work = self._take_work_directory(cleanup) if self._is_primary else None
        start = _StartMessage(*self._agreement.of_primary(None if work is None else self._begin(work)))
        to_do = [block for block in self._blocks if block.number not in set(start.kept)]
        shares = divide_blocks(to_do, self._writers)
        if self._turn < len(shares):
            self._write(start, shares[self._turn], cleanup, progress)
        self._agreement.of_all(None)
        written = None
        if work is not None:
            numbers = [start.first + turn for turn, share in enumerate(shares) if share]
            written = self._finish(work, start, numbers, cleanup)
        leaves, nbytes, skipped, kept = self._agreement.of_primary(written)
        if work is None:
            self._format.note_finished()
        return WriteSummary(
            leaves, nbytes, {name: (tuple(shape), dtype) for name, (shape, dtype) in skipped.items()}, kept
        )

    # -- what the primary does before

    def _take_work_directory(self, cleanup: Cleanup) -> WorkDirectory:
        cleanup.enter(lambda: made_parents(self._target.parent))
        work = cleanup.enter(lambda: WorkDirectory(self._target, self._destination.name))
        cleanup.enter(lambda: self._destination.claim(work))
        # Disconnected processes may still be writing, and the work of a job that lost a process is kept.
        cleanup.callback(lambda: setattr(work, "is_kept", work.is_kept or self._agreement.lost_peer))
        self._destination.check(self._writing)
        return work

    def _begin(self, work: WorkDirectory) -> _StartMessage:
        conversion = conversion_digest(self._writing.format, self._format.arrays, self._plan.checkpoints)
        left = journals(work.path)
        found = {number: read_journal(path, conversion or "", len(self._blocks)) for number, path in left.items()}
        if conversion is None or not found or None in found.values():
            if found:
                _logger.info(
                    "%s begins anew: the killed conversion was another, or cannot be identified", self._destination.name
                )
            work.empty()
            found = {}
        (work.path / STOP_FILE).unlink(missing_ok=True)
        noted = {entry.block for entries in found.values() for entry in entries or ()}
        self._check_space(work.path, sum(block.nbytes for block in self._blocks if block.number not in noted))
        self._format.prepare(work.path)
        for number, entries in found.items():
            self._keep(work.path, number, entries or [])
        kept = sorted(self._entries)
        if found:
            nbytes = sum(self._blocks[number].nbytes for number in kept)
            _logger.info(
                "%s resumes a killed conversion: %s are written already", self._destination.name, size_text(nbytes)
            )
        return _StartMessage(work.path.name, conversion or uuid.uuid4().hex, max([0, *left]) + 1, kept)

    def _keep(self, work: Path, number: int, entries: Sequence[JournalEntry]) -> None:
        """Keeps the durable blocks of a journal."""
        mine = {self._blocks[entry.block]: entry for entry in entries if entry.block not in self._entries}
        good = self._format.check(work, number, {block: entry.crc for block, entry in mine.items()})
        self._entries |= {block.number: mine[block] for block in good}
        if good:
            self._numbers.add(number)

    def _check_space(self, work: Path, nbytes: int) -> None:
        """Refuses to begin if the disk will be full before the end."""
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

    # -- what every process does

    def _write(
        self, start: _StartMessage, share: Sequence[PlannedBlock], cleanup: Cleanup, progress: OnProgress | None
    ) -> None:
        if not share:
            return
        work = self._target.with_name(start.directory)
        number = start.first + self._turn
        journal = cleanup.enter(lambda: contextlib.closing(Journal(work, number, start.conversion)))
        thread = cleanup.enter(lambda: LoopThread("orbax_t5x-write"))
        try:
            store = self._format.store(work, number)
            thread.run(BlockPipeline(store, journal, work, self._leaves, self._limit, progress).run(share))
        except BaseException:
            if self._agreement.group.size > 1:
                with contextlib.suppress(OSError):
                    (work / STOP_FILE).touch()
            raise
        thread.close()
        journal.close()

    # -- what the primary does after

    def _finish(
        self, work: WorkDirectory, start: _StartMessage, numbers: Sequence[int], cleanup: Cleanup
    ) -> Sequence[Any]:
        kept = sum(self._blocks[number].nbytes for number in self._entries)
        for number in numbers:
            path = journal_path(work.path, number)
            for entry in read_journal(path, start.conversion, len(self._blocks)) or ():
                self._entries[entry.block] = entry
        missing = [block.array.name for block in self._blocks if block.number not in self._entries]
        if missing:
            message = "a block written by another process is not in its journal; do all see the same directory?"
            raise CheckpointIOError(message, path=work.path, leaf=missing[0])
        cleanup.enter(LoopThread).run(self._verify())
        directory = work.path / self._target.name
        entries = {block: self._entries[block.number] for block in self._blocks}
        leaves, nbytes, skipped, _ = self._format.finish(
            work.path, directory, entries, sorted({*self._numbers, *numbers})
        )
        self._destination.check(self._writing)
        self._destination.publish(work, directory, self._writing)
        return leaves, nbytes, dict(skipped), kept

    async def _verify(self) -> None:
        """Compares the source's checksums with everything read."""
        ranges: dict[int, list[ChecksummedRange]] = {}
        for entry in self._entries.values():
            for leaf, covered in entry.read:
                ranges.setdefault(leaf, []).append(covered)
        stats = ReadStats("touched", self._limit)
        for leaf, number in self._leaves.items():
            await leaf.verify_checksum(stats, ranges.get(number, ()))
