"""Cuts arrays into blocks and divides them among processes.

Pure geometry. A block is read, written and noted in a journal at once: one chunk of one array. All processes of a
conversion, and a later one that resumes it, cut alike, so that the number of a block means the same to each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orbax_t5x.concurrency import balanced_shares
from orbax_t5x.lazy import Box, View
from orbax_t5x.lazy.box import box_size
from orbax_t5x.lazy.chunks import grid_boxes as chunk_boxes

# Whole groups are assigned to one process while each is at most this fraction of a process's work: larger groups would
# leave some processes without work.
_GROUPS_PER_PROCESS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedArray:
    """Array to write under `key` in blocks of shape `chunk`.

    Arrays of one `group` are stored in one file, and best written by one process.
    """

    name: str
    key: str
    view: View
    chunk: tuple[int, ...]
    group: str = ""


class PlannedBlock(NamedTuple):
    """A chunk of an array: its box and its block number."""

    number: int
    array: PlannedArray
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return box_size(self.box) * self.array.view.dtype.itemsize


def cut_into_blocks(arrays: Iterable[PlannedArray]) -> list[PlannedBlock]:
    """Lists the blocks of all arrays, in order."""
    boxes = ((array, box) for array in arrays for box in chunk_boxes(array.view.shape, array.chunk))
    return [PlannedBlock(number, array, box) for number, (array, box) in enumerate(boxes)]


def divide_blocks(blocks: Sequence[PlannedBlock], count: int) -> list[list[PlannedBlock]]:
    """Divides the blocks among `count` processes, balanced by bytes."""
    if count == 1:
        return [list(blocks)]
    most = math.ceil(sum(block.nbytes for block in blocks) / count)
    shares = balanced_shares(_undivided(blocks, most), _nbytes, count)
    return [sorted(itertools.chain(*share), key=lambda block: block.number) for share in shares]


def _undivided(blocks: Sequence[PlannedBlock], most: int) -> Iterable[list[PlannedBlock]]:
    """Yields groups of blocks for a single process each."""
    for group, members in itertools.groupby(blocks, key=lambda block: block.array.group):
        together = list(members)
        if group and _nbytes(together) * _GROUPS_PER_PROCESS <= most:
            yield together
            continue
        for _, of_array in itertools.groupby(together, key=lambda block: id(block.array)):
            array_blocks = list(of_array)
            if _nbytes(array_blocks) <= most:
                yield array_blocks
            else:
                yield from ([block] for block in array_blocks)


def _nbytes(blocks: Sequence[PlannedBlock]) -> int:
    return sum(block.nbytes for block in blocks)
