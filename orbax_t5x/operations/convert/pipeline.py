"""Pipeline of blocks: read, written, made durable, noted.

One byte budget bounds the blocks in flight, and a block keeps its bytes until the journal has it: a kill never undoes
more than was in memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from orbax_t5x.concurrency import Block, for_each_block, reader_pool, run_in_pool
from orbax_t5x.handlers.type_handlers.stream import COPIES_PER_BLOCK, BlockOutput, memory_of_block
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.lazy import Leaf, ReadStats
from orbax_t5x.lazy.read import read_block
from orbax_t5x.operations.convert.journal import Journal, JournalEntry, SourceRange
from orbax_t5x.operations.convert.output_format import BlockStore
from orbax_t5x.operations.convert.partition import PlannedBlock
from orbax_t5x.operations.convert.safetensors_layout import TensorInFile
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.text.progress_bar import OnProgress

STOP_FILE = "stop"
"""Exists in the work directory of a conversion that has failed in one process: the others begin no further block."""

# At least this many bytes are in flight, however small the arrays are: with fewer, each block waits for a disk.
_LEAST_IN_FLIGHT = 16 << 20
# More of the largest blocks than cores that compress them take memory only; more small ones fit in the same bytes.
_MOST_LARGE_BLOCKS = max(2, os.cpu_count() or 1)


class BlockPipeline:
    """Writer of the blocks of a process."""

    def __init__(
        self,
        store: BlockStore,
        journal: Journal,
        work: Path,
        leaves: Mapping[Leaf, int],
        limit: int,
        progress: OnProgress | None,
    ):
        """Initializes a pipeline."""
        self._store = store
        self._journal = journal
        self._stop_file = work / STOP_FILE
        self._leaves = leaves
        self._limit = limit
        self._progress = progress
        self._stats = ReadStats("touched", limit)

    async def run(self, blocks: Sequence[PlannedBlock]) -> None:
        """Writes blocks."""
        limit = min(self._limit, COPIES_PER_BLOCK * _bytes_in_flight(blocks))
        total = sum(block.nbytes for block in blocks)
        await for_each_block(self._writes(blocks), limit, total, self._progress)

    def _writes(self, blocks: Sequence[PlannedBlock]) -> Iterator[Block]:
        """Yields the writing of each block, until another process has failed."""
        outputs: dict[str, BlockOutput] = {}
        for block in blocks:
            array = block.array
            if array.key not in outputs:
                # The blocks of an array follow one another: those of the array before are in flight.
                outputs = {array.key: self._store.output(array)}
            if self._stop_file.exists():
                return
            work = functools.partial(self._write, block, outputs[array.key])
            yield Block(work, memory_of_block(array.view, block.box), block.nbytes, array.name)

    async def _write(self, block: PlannedBlock, output: BlockOutput) -> None:
        view = block.array.view
        stats = self._stats.scoped()
        with self._naming_failures(block):
            crc = await _copied(block, output, stats)
        if crc is None:
            out = await read_block(view.node, block.box, stats)
            crc = await run_in_pool(reader_pool(), array_crc, out)
            with self._naming_failures(block):
                await output.write(block.box, out)
        with self._naming_failures(block):
            entry = JournalEntry(block.number, crc, self._read(view.leaves(), stats))
            await self._journal.add(entry, block.array, self._store.sync)

    @contextlib.contextmanager
    def _naming_failures(self, block: PlannedBlock) -> Generator[None, None, None]:
        """Raises a failure to write with work directory and leaf."""
        try:
            yield
        except Exception as error:
            raise_as_checkpoint_error(error, self._stop_file.parent, leaf=block.array.name)

    def _read(self, leaves: Sequence[Leaf], stats: ReadStats) -> tuple[SourceRange, ...]:
        return tuple(
            [
                SourceRange(self._leaves[leaf], covered)
                for leaf in leaves
                if leaf in self._leaves
                for covered in stats.ranges(leaf)
            ]
        )


def _bytes_in_flight(blocks: Sequence[PlannedBlock]) -> int:
    largest_array = max(block.array.view.nbytes for block in blocks)
    largest_block = max(block.nbytes for block in blocks)
    return max(min(largest_array, _MOST_LARGE_BLOCKS * largest_block), _LEAST_IN_FLIGHT)


async def _copied(block: PlannedBlock, output: BlockOutput, stats: ReadStats) -> int | None:
    """Copies a block between files; returns its checksum or None."""
    leaf = block.array.view.leaf
    if not (isinstance(output, TensorInFile) and isinstance(leaf, ByteRangeLeaf)) or leaf.is_remote:
        return None
    return await output.copy(block.box, leaf, stats)
