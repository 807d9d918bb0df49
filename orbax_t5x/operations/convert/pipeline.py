"""Pieces on their way: read from the source, written, made durable, noted in the journal.

One byte budget bounds what is on its way, and a piece keeps its share until the journal has it: what a kill undoes is
never more than was in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orbax_t5x.concurrency import Budget, LoopThread, call_carried, reader_pool, run_in_pool, wait_all
from orbax_t5x.handlers.type_handlers.stream import PIECE_COPIES, PIECES_IN_FLIGHT, Output
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.lazy import Leaf, ReadStats
from orbax_t5x.lazy.box import box_shape
from orbax_t5x.lazy.read import group_reads
from orbax_t5x.operations.convert.journal import Journal, JournalEntry, SourceRange
from orbax_t5x.operations.convert.partition import PlannedArray, PlannedPiece
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.text.progress_bar import OnProgress

STOP_FILE = "stop"
"""Stands in the work directory of a conversion that has failed in one process: the others begin no further piece."""

# At least this much is on its way, however small the arrays are: below it, each piece waits for a disk.
_LEAST_IN_FLIGHT = 16 << 20


class PieceStore(Protocol):
    """Where one process writes its pieces."""

    def output(self, array: PlannedArray) -> Output:
        """An array whose pieces can be written."""
        ...

    def sync(self, arrays: Sequence[PlannedArray]) -> None:
        """Makes the pieces of some arrays durable that were written; blocks."""
        ...


class PieceRun:
    """The pieces of one process."""

    def __init__(
        self,
        store: PieceStore,
        journal: Journal,
        work: Path,
        leaves: Mapping[Leaf, int],
        limit: int,
        progress: OnProgress | None,
    ):
        """Args: `leaves`: the numbers of the stored leaves in the plan; `limit`: bytes of host memory."""
        self._store = store
        self._journal = journal
        self._stop_file = work / STOP_FILE
        self._leaves = leaves
        self._limit = limit
        self._progress = progress
        self._stats = ReadStats("touched", limit)
        self._done = 0
        self._total = 0

    def run(self, pieces: Sequence[PlannedPiece]) -> None:
        """Writes the pieces; returns when all stand, or when another process has failed.

        Raises:
          CheckpointError: naming the leaf. Nothing is being written any more when it is raised.
        """
        if pieces:
            with LoopThread("orbax_t5x-write") as thread:
                thread.run(self._run(pieces))

    async def _run(self, pieces: Sequence[PlannedPiece]) -> None:
        self._total = sum(piece.nbytes for piece in pieces)
        largest = max(piece.array.view.nbytes for piece in pieces)
        budget = Budget(min(self._limit, PIECE_COPIES * max(largest, _LEAST_IN_FLIGHT)))
        await wait_all(self._moves(pieces, budget, asyncio.Semaphore(PIECES_IN_FLIGHT)))

    async def _moves(
        self, pieces: Sequence[PlannedPiece], budget: Budget, count: asyncio.Semaphore
    ) -> AsyncIterator[Coroutine[Any, Any, None]]:
        """The pieces, each as soon as the budget has room for it."""
        outputs: dict[str, Output] = {}
        for piece in pieces:
            array = piece.array
            if array.key not in outputs:
                # The pieces of an array follow one another: those of the one before are on their way.
                outputs = {array.key: self._store.output(array)}
            size = PIECE_COPIES * piece.nbytes + array.view.scratch_bytes(piece.box)
            await count.acquire()
            await budget.take(size)
            if self._stop_file.exists():
                return
            yield self._move(piece, outputs[array.key], size, budget, count)

    async def _move(
        self, piece: PlannedPiece, output: Output, size: int, budget: Budget, count: asyncio.Semaphore
    ) -> None:
        try:
            view = piece.array.view
            stats = self._stats.scoped()
            out = np.empty(box_shape(piece.box), view.dtype)
            lowered = view.lower(piece.box, out)
            await wait_all(leaf.read_into(requests, stats) for leaf, requests in group_reads(lowered.reads))
            for step in lowered.finish:
                step()
            crc = await run_in_pool(reader_pool(), array_crc, out)
            try:
                await output.write(piece.box, out)
                await self._journal.add(
                    JournalEntry(piece.number, crc, self._read(view.leaves(), stats)), piece.array, self._store.sync
                )
            except Exception as error:
                raise_as_checkpoint_error(error, self._stop_file.parent, leaf=piece.array.name)
            self._done += out.nbytes
            if self._progress is not None:
                call_carried(self._progress, self._done, self._total, piece.array.name)
        finally:
            budget.give(size)
            count.release()

    def _read(self, leaves: Sequence[Leaf], stats: ReadStats) -> tuple[SourceRange, ...]:
        return tuple(
            [
                SourceRange(self._leaves[leaf], part)
                for leaf in leaves
                if leaf in self._leaves
                for part in stats.ranges(leaf)
            ]
        )
