"""The report of a verification, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from orbax_t5x.text.fold import fold
from orbax_t5x.text.html import html_fragment, html_paragraph, html_sections
from orbax_t5x.text.table import TableRow, table_lines, terminal_width
from orbax_t5x.text.wording import array_text, leaves_text, plain, size_text

Status = Literal["ok", "damaged", "no checksum", "unreadable"]
HOLDS = "its checksum holds"
NOTHING = "nothing to compare with"
"""Reasons that add nothing to the status."""
STATUSES: tuple[Status, ...] = ("damaged", "unreadable", "no checksum", "ok")

_WORDS = {"no checksum": "without checksum"}


@dataclasses.dataclass(frozen=True)
class LeafVerification:
    """Verification of a leaf.

    Attributes:
      name: of the leaf.
      shape, dtype: of the array; the dtype by its name.
      status: "ok": all its bytes were read and their checksums hold, or it has no elements. "damaged": they do not, or
        what was read contradicts the format. "no checksum": it was read, and there is nothing to compare with.
        "unreadable": it could not be read, for another reason than damage.
      reason: what held, or what is wrong.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    status: Status
    reason: str


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """Report of `orbax_t5x.verify`; `print(report)` is a table.

    Attributes:
      path: what was opened.
      format: of the checkpoint.
      leaves: in the order of their names.
      bytes_read: of array data.
      seconds: wall time.
    """

    path: str
    format: str
    leaves: tuple[LeafVerification, ...]
    bytes_read: int
    seconds: float

    @property
    def status(self) -> Literal["ok", "damaged", "no checksum"]:
        """The whole checkpoint's.

        Damaged where some leaf is or cannot be read, else ok where some leaf was compared. Of a leaf without elements
        nothing can be compared.
        """
        if any(leaf.status in ("damaged", "unreadable") for leaf in self.leaves):
            return "damaged"
        is_compared = any(leaf.status == "ok" and 0 not in leaf.shape for leaf in self.leaves)
        return "ok" if is_compared else "no checksum"

    def summary(self) -> str:
        """Returns the counts in a line."""
        counts = collections.Counter(leaf.status for leaf in self.leaves)
        parts = [f"{leaves_text(counts[status])} {_WORDS.get(status, status)}" for status in STATUSES if counts[status]]
        read = f"{size_text(self.bytes_read)} read in {self.seconds:.1f} s"
        return ", ".join([*(parts or ["no leaves"]), read])

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {**dataclasses.asdict(self), "status": self.status}

    def lines(self, width: int) -> list[str]:
        """Formats the table, with the damaged leaves first.

        Leaves whose names differ in a single number share a line.
        """
        lines = [f"{plain(self.path)}: {self.format}"]
        for heading, rows in self._sections():
            lines += ["", f"{heading}:", *table_lines(rows, width)]
        return [*lines, "", self.summary()]

    def _sections(self) -> Iterator[tuple[str, list[TableRow]]]:
        for status in STATUSES:
            some = [leaf for leaf in self.leaves if leaf.status == status]
            if some:
                yield status, list(_verified_rows(some))

    def _repr_html_(self) -> str:
        parts = [html_paragraph(self.summary(), bold=True), html_paragraph(f"{self.path}: {self.format}")]
        parts += html_sections(self._sections(), TableRow("leaf", "array", source="reason"))
        return html_fragment(parts, "verification")

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))


def _verified_rows(leaves: Sequence[LeafVerification]) -> Iterator[TableRow]:
    folded = fold([(leaf.name, leaf.reason) for leaf in leaves], [(leaf.dtype, leaf.shape) for leaf in leaves])
    for row in folded:
        leaf = leaves[row.members[0]]
        array = array_text(np.dtype(leaf.dtype), leaf.shape)
        reason = "" if leaf.reason in (HOLDS, NOTHING) else plain(row.texts[1])
        yield TableRow(plain(row.label), array, source=reason, has_remark=True)
