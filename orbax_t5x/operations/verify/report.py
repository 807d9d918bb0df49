"""The report of a verification, as data and as text."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from orbax_t5x.text.report import Page, Report, counts_text, status_sections
from orbax_t5x.text.table import TableRow
from orbax_t5x.text.wording import array_text, size_text

Status = Literal["ok", "damaged", "no checksum", "unreadable"]
HOLDS = "its checksum holds"
NOTHING = "nothing to compare with"
"""Reasons that add nothing to the status."""
STATUSES = {"damaged": "damaged", "unreadable": "unreadable", "no checksum": "without checksum", "ok": "ok"}


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
class VerifyReport(Report):
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
        return f"{counts_text(self.leaves, STATUSES)}, {size_text(self.bytes_read)} read in {self.seconds:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {**super().to_json(), "status": self.status}

    def page(self) -> Page:
        """Returns the contents for people, with the damaged leaves first."""
        sections = status_sections(
            self.leaves,
            {status: status for status in STATUSES},
            lambda leaf: array_text(np.dtype(leaf.dtype), leaf.shape),
            lambda _, why: "" if why in (HOLDS, NOTHING) else why,
        )
        heads = TableRow("leaf", "array", source="reason")
        return Page(heads, "", [f"{self.path}: {self.format}"], sections, end=self.summary())
