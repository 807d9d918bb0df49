"""What a conversion writes, cut into pieces, and which process writes which: pure geometry.

A piece is what is read, written and noted in a journal at once: one chunk of one array. All processes of a conversion,
and a later one that goes on with it, cut alike, so that a piece's number means the same to each.
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

# Whole groups are shared out while each is at most this part of a process's share: larger ones would leave some
# processes without work.
_GROUP_PART = 4


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedArray:
    """One array to write.

    Attributes:
      name: for errors and progress.
      key: under which the format stores it.
      view: what to read.
      chunk: the shape of its pieces.
      group: arrays of one group lie in one file, and best go to one process.
    """

    name: str
    key: str
    view: View
    chunk: tuple[int, ...]
    group: str = ""


class PlannedPiece(NamedTuple):
    """One chunk of one array.

    Attributes:
      number: of the piece, among those of all arrays.
      array: that it belongs to.
      box: its place in the array.
    """

    number: int
    array: PlannedArray
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return box_size(self.box) * self.array.view.dtype.itemsize


def cut(arrays: Iterable[PlannedArray]) -> list[PlannedPiece]:
    """The pieces of all arrays, in order."""
    boxes = ((array, box) for array in arrays for box in chunk_boxes(array.view.shape, array.chunk))
    return [PlannedPiece(number, array, box) for number, (array, box) in enumerate(boxes)]


def share_out(pieces: Sequence[PlannedPiece], count: int) -> list[list[PlannedPiece]]:
    """Which pieces each of `count` processes writes, balanced by bytes.

    Arrays stay whole, and groups of small arrays too; only an array larger than a process's share is cut.
    """
    if count == 1:
        return [list(pieces)]
    share = math.ceil(sum(piece.nbytes for piece in pieces) / count)
    shares = balanced_shares(_lots(pieces, share), _nbytes, count)
    return [sorted(itertools.chain(*lots), key=lambda piece: piece.number) for lots in shares]


def _lots(pieces: Sequence[PlannedPiece], share: int) -> Iterable[list[PlannedPiece]]:
    """What is given away together."""
    for group, members in itertools.groupby(pieces, key=lambda piece: piece.array.group):
        together = list(members)
        if group and _nbytes(together) * _GROUP_PART <= share:
            yield together
            continue
        for _, of_array in itertools.groupby(together, key=lambda piece: id(piece.array)):
            lot = list(of_array)
            if _nbytes(lot) <= share:
                yield lot
            else:
                yield from ([piece] for piece in lot)


def _nbytes(pieces: Sequence[PlannedPiece]) -> int:
    return sum(piece.nbytes for piece in pieces)
