"""Reads and writes the blocks of a conversion, many at once within one byte budget."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from orbax_t5x.concurrency import Block, for_each_block, run_in_pool, waiting_pool
from orbax_t5x.handlers.type_handlers.stream import COPIES_PER_BLOCK, BlockOutput, memory_of_block
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.read import read_block
from orbax_t5x.operations.convert.output_format import OutputFormat, PlannedBlock
from orbax_t5x.operations.convert.safetensors_layout import TensorInFile
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.text.progress_bar import OnProgress

# At least this many bytes are in flight, however small the arrays are: with fewer, each block waits for a disk.
_LEAST_IN_FLIGHT = 16 << 20
# More of the largest blocks than cores that compress them take memory only; more small ones fit in the same bytes.
_MOST_LARGE_BLOCKS = max(2, os.cpu_count() or 1)


async def write_blocks(
    blocks: Sequence[PlannedBlock],
    output_format: OutputFormat,
    directory: Path,
    limit: int,
    progress: OnProgress | None,
) -> None:
    """Writes blocks, then compares all that was read with the source's checksums."""
    if not blocks:
        return
    stats = ReadStats("touched", limit)
    budget = min(limit, COPIES_PER_BLOCK * _bytes_in_flight(blocks))
    total = sum(block.nbytes for block in blocks)
    await for_each_block(_writes(blocks, output_format, directory, stats), budget, total, progress)
    for leaf in dict.fromkeys(leaf for block in blocks for leaf in block.array.view.leaves()):
        await leaf.verify_checksum(stats, stats.ranges(leaf))
    await run_in_pool(waiting_pool(), stats.check_watched)


def _writes(
    blocks: Sequence[PlannedBlock], output_format: OutputFormat, directory: Path, stats: ReadStats
) -> Iterator[Block]:
    """Yields the writing of each block."""
    outputs: dict[str, BlockOutput] = {}
    for block in blocks:
        array = block.array
        if array.key not in outputs:
            # The blocks of an array follow one another: those of the array before are in flight.
            outputs = {array.key: output_format.output(directory, array)}
        work = functools.partial(_write, block, outputs[array.key], directory, stats)
        yield Block(work, memory_of_block(array.view, block.box), block.nbytes, array.name)


async def _write(block: PlannedBlock, output: BlockOutput, directory: Path, stats: ReadStats) -> None:
    try:
        if await _copied(block, output, stats):
            return
    except Exception as error:
        raise_as_checkpoint_error(error, directory.parent, leaf=block.array.name)
    data = await read_block(block.array.view.node, block.box, stats)
    try:
        await output.write(block.box, data)
    except Exception as error:
        raise_as_checkpoint_error(error, directory.parent, leaf=block.array.name)


def _bytes_in_flight(blocks: Sequence[PlannedBlock]) -> int:
    largest_array = max(block.array.view.nbytes for block in blocks)
    largest_block = max(block.nbytes for block in blocks)
    return max(min(largest_array, _MOST_LARGE_BLOCKS * largest_block), _LEAST_IN_FLIGHT)


async def _copied(block: PlannedBlock, output: BlockOutput, stats: ReadStats) -> bool:
    """Copies a block between files if its bytes stay as they are; returns True if it did."""
    leaf = block.array.view.leaf
    if not (isinstance(output, TensorInFile) and isinstance(leaf, ByteRangeLeaf)) or leaf.is_remote:
        return False
    return await output.copy(block.box, leaf, stats) is not None
