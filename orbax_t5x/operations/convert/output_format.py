"""What a format is to a conversion: arrays to write, a place for pieces, a look at pieces that stand, and the end.

The work directory of a conversion holds journals, and beside them what the format puts there. Pieces go into what
belongs to one journal, by its number, so that two processes, or one after a killed one, never write the same file at
the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orbax_t5x.operations.convert.journal import JournalEntry
from orbax_t5x.operations.convert.partition import PlannedArray, PlannedPiece
from orbax_t5x.operations.convert.pipeline import PieceStore
from orbax_t5x.operations.convert.writing import Written

PARTS = "parts"
"""The directory of a work directory in which pieces stand."""


class PieceFormat(Protocol):
    """A plan's views as one format stores them; making one checks everything and writes nothing.

    Attributes:
      arrays: what is written piece by piece, in order; every process has the same.
    """

    arrays: Sequence[PlannedArray]

    def prepare(self, work: Path) -> None:
        """Makes a work directory ready for pieces, whatever a killed conversion to this format left in it."""
        ...

    def store(self, work: Path, number: int) -> PieceStore:
        """Where the process that writes the journal of this number puts its pieces."""
        ...

    def check(self, work: Path, number: int, pieces: Mapping[PlannedPiece, int]) -> set[PlannedPiece]:
        """Reads pieces that a journal says stand, and removes all others of that number.

        Args:
          work: the work directory.
          number: of the journal.
          pieces: with the checksums that they should have.

        Returns:
          those that have them.
        """
        ...

    def finish(
        self, work: Path, directory: Path, entries: Mapping[PlannedPiece, JournalEntry], numbers: Collection[int]
    ) -> Written:
        """Makes the complete checkpoint of pieces that all stand, durably.

        Args:
          work: the work directory.
          directory: to make, inside of it.
          entries: of all pieces.
          numbers: of the journals that they are in.
        """
        ...
