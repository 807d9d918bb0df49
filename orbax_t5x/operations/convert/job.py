"""One conversion, by one process or by all processes of a job together.

Each process plans alike and writes its share of the pieces; the first one, the primary, keeps the work directory, looks
at what a killed conversion left in there, and finishes. They meet three times: when the primary has prepared the work
directory, when all pieces stand, and when the result is in place. Whoever fails tells the others at the next meeting,
and leaves a file by which they stop before it. The work directory must be one that all processes see.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orbax_t5x.concurrency import LoopThread
from orbax_t5x.errors import CheckpointIOError, Fix, Problem, RestorePlanError
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.multihost.agreement import Agreement
from orbax_t5x.operations.convert.destination import check_destination, make_parents
from orbax_t5x.operations.convert.fingerprint import arrays_digest, conversion_digest
from orbax_t5x.operations.convert.journal import Journal, JournalEntry, journal_path, journals, read_journal
from orbax_t5x.operations.convert.orbax_output import OrbaxFormat
from orbax_t5x.operations.convert.output_format import PieceFormat
from orbax_t5x.operations.convert.partition import PlannedPiece, cut, share_out
from orbax_t5x.operations.convert.pipeline import STOP_FILE, PieceRun
from orbax_t5x.operations.convert.safetensors_output import SafetensorsFormat
from orbax_t5x.operations.convert.work_directory import WorkDirectory, work_directory_of
from orbax_t5x.operations.convert.writing import WriteOptions, Written
from orbax_t5x.restoring.options import MEMORY_LIMIT_BYTES
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.progress_bar import OnProgress
from orbax_t5x.text.wording import size_text

_logger = logging.getLogger(__name__)

FORMATS: dict[str, Callable[[RestorePlan, WriteOptions], PieceFormat]] = {
    "orbax": OrbaxFormat,
    "safetensors": SafetensorsFormat,
}
PRIMARY = 0
"""The process that keeps the work directory."""


class _Beginning(NamedTuple):
    """What the primary tells the others before they write.

    Attributes:
      conversion: its digest, or a text that no other has.
      first: the number of the primary's journal; those of the others follow.
      kept: the numbers of the pieces that stand.
    """

    conversion: str
    first: int
    kept: Sequence[int]


class CollectiveConversion:
    """Writes what a plan holds into a directory."""

    def __init__(self, plan: RestorePlan, target: Path, writing: WriteOptions, agreement: Agreement):
        """Checks that the plan can be stored, and that all processes are about to write the same.

        Raises:
          UnsupportedCheckpointError: leaves that the format cannot store.
          RestorePlanError: `dtype` does not fit, or the processes were given different arguments.
        """
        self._plan = plan
        self._target = target
        self._writing = writing
        self._agreement = agreement
        self._format = FORMATS[writing.format](plan, writing)
        self._pieces = cut(self._format.arrays)
        self._limit = MEMORY_LIMIT_BYTES if writing.memory_limit_bytes is None else writing.memory_limit_bytes
        self._is_primary = jax.process_index() == PRIMARY
        self._entries: dict[int, JournalEntry] = {}
        self._numbers: set[int] = set()
        leaves = [leaf for array in self._format.arrays for leaf in array.view.leaves()]
        self._leaves = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
        mine = [str(target), writing.format, writing.overwrite, arrays_digest(self._format.arrays)]
        if any(other != mine for other in agreement.of_all(mine)):
            message = "the processes of this conversion were given different sources, destinations or options"
            fix = "call convert with the same arguments on every process"
            raise RestorePlanError([Problem("provenance", None, message, Fix(fix))], path=target)

    def run(self, stack: contextlib.ExitStack, progress: OnProgress | None) -> Written:
        """Writes.

        Args:
          stack: tidies up; it ends after the other processes know of a failure.
          progress: called with the bytes of this process's share.

        Raises:
          CheckpointError: the source, the destination, or another process failed.
        """
        work = self._take_work_directory(stack) if self._is_primary else None
        start = _Beginning(*self._agreement.of_primary(None if work is None else self._begin(work)))
        to_do = [piece for piece in self._pieces if piece.number not in set(start.kept)]
        shares = share_out(to_do, jax.process_count())
        self._write(start, shares[jax.process_index()], progress)
        self._agreement.of_all(None)
        written = None
        if work is not None:
            numbers = [start.first + process for process, share in enumerate(shares) if share]
            written = self._finish(work, start, numbers)
        leaves, nbytes, skipped, kept = self._agreement.of_primary(written)
        return Written(leaves, nbytes, {name: (tuple(shape), dtype) for name, (shape, dtype) in skipped.items()}, kept)

    # -- what the primary does before

    def _take_work_directory(self, stack: contextlib.ExitStack) -> WorkDirectory:
        made = make_parents(self._target.parent)
        stack.callback(_remove_empty, made)
        work = stack.enter_context(WorkDirectory(self._target))
        # Others may be writing that nobody can reach; and what a job that lost a process has done is to be kept.
        stack.callback(lambda: setattr(work, "is_kept", self._agreement.is_parted))
        check_destination(self._target, self._writing)
        return work

    def _begin(self, work: WorkDirectory) -> _Beginning:
        conversion = conversion_digest(self._writing.format, self._format.arrays, self._plan.checkpoints)
        left = journals(work.path)
        found = {number: read_journal(path, conversion or "") for number, path in left.items()}
        if conversion is None or not found or None in found.values():
            if found:
                _logger.info("%s is begun anew: a killed conversion there was another, or cannot be told", self._target)
            work.empty()
            found = {}
        (work.path / STOP_FILE).unlink(missing_ok=True)
        self._format.prepare(work.path)
        for number, entries in found.items():
            self._keep(work.path, number, entries or [])
        kept = sorted(self._entries)
        if found:
            nbytes = sum(self._pieces[number].nbytes for number in kept)
            _logger.info("%s is gone on with: %s stand already", self._target, size_text(nbytes))
        return _Beginning(conversion or uuid.uuid4().hex, max([0, *left]) + 1, kept)

    def _keep(self, work: Path, number: int, entries: Sequence[JournalEntry]) -> None:
        """Keeps the pieces of one journal that stand."""
        mine = {
            self._pieces[entry.piece]: entry
            for entry in entries
            if entry.piece < len(self._pieces) and entry.piece not in self._entries
        }
        good = self._format.check(work, number, {piece: entry.crc for piece, entry in mine.items()})
        self._entries |= {piece.number: mine[piece] for piece in good}
        if good:
            self._numbers.add(number)

    # -- what every process does

    def _write(self, start: _Beginning, share: Sequence[PlannedPiece], progress: OnProgress | None) -> None:
        if not share:
            return
        work = work_directory_of(self._target)
        number = start.first + jax.process_index()
        journal = Journal(work, number, start.conversion)
        try:
            store = self._format.store(work, number)
            PieceRun(store, journal, work, self._leaves, self._limit, progress).run(share)
        except BaseException:
            if jax.process_count() > 1:
                with contextlib.suppress(OSError):
                    (work / STOP_FILE).touch()
            raise
        finally:
            journal.close()

    # -- what the primary does after

    def _finish(self, work: WorkDirectory, start: _Beginning, numbers: Sequence[int]) -> Sequence[Any]:
        kept = sum(self._pieces[number].nbytes for number in self._entries)
        for number in numbers:
            for entry in read_journal(journal_path(work.path, number), start.conversion) or ():
                self._entries[entry.piece] = entry
        missing = [piece.array.name for piece in self._pieces if piece.number not in self._entries]
        if missing:
            message = (
                "a piece that another process wrote is not in its journal here; is the directory one and the same?"
            )
            raise CheckpointIOError(message, path=work.path, leaf=missing[0])
        with LoopThread() as thread:
            thread.run(self._verify())
        directory = work.path / self._target.name
        entries = {piece: self._entries[piece.number] for piece in self._pieces}
        leaves, nbytes, skipped, _ = self._format.finish(
            work.path, directory, entries, sorted({*self._numbers, *numbers})
        )
        check_destination(self._target, self._writing)
        work.put_in_place(directory)
        return leaves, nbytes, dict(skipped), kept

    async def _verify(self) -> None:
        """Compares the source's checksums with all that was read of it, by all processes and before a kill."""
        parts: dict[int, list[ChecksummedRange]] = {}
        for entry in self._entries.values():
            for leaf, part in entry.read:
                parts.setdefault(leaf, []).append(part)
        stats = ReadStats("touched", self._limit)
        for leaf, number in self._leaves.items():
            await leaf.verify_checksum(stats, parts.get(number, ()))


def _remove_empty(directories: Sequence[Path]) -> None:
    """Removes directories that were made for nothing, innermost first."""
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            directory.rmdir()
