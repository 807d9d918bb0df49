"""The report of a comparison, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from orbax_t5x.operations.diff.values import LargestDifference
from orbax_t5x.text.report import Page, Report, counts_text, status_sections
from orbax_t5x.text.table import TableRow
from orbax_t5x.text.wording import counted, size_text

DiffStatus = Literal["equal", "only in a", "only in b", "shape", "dtype", "values", "damaged", "unreadable"]
_HEADINGS = {
    "damaged": "damaged",
    "unreadable": "unreadable",
    "only in a": "only in a",
    "only in b": "only in b",
    "shape": "other shapes",
    "dtype": "other dtypes",
    "values": "other values",
}
_STATUSES = {
    **_HEADINGS,
    "shape": "of other shape",
    "dtype": "of other dtype",
    "values": "with other values",
    "equal": "equal",
}


@dataclasses.dataclass(frozen=True)
class LeafDiff:
    """Comparison of the leaves of a name.

    Attributes:
      name: of the leaf, after the transforms.
      status: "only in a", "only in b"; "shape": the shapes differ, so values are not compared; "values": elements
        differ by more than the tolerance, whatever the dtypes; "dtype": only the dtypes differ; "damaged": a checksum
        does not hold, or what was read contradicts the format; "unreadable": another failure; else "equal".
      shape_a, shape_b: of each side; None where it has no such leaf.
      dtype_a, dtype_b: likewise, by their names.
      size: how many elements were compared.
      differing: how many of them differ by more than the tolerance.
      one_nan: how many of those are NaN on only one side.
      absolute: the largest `|a - b|`; None where nothing differs, and for text.
      relative: the largest `|a - b| / |b|`, likewise.
      reason: why a leaf is damaged or cannot be read, or why values were not compared; else empty.
    """

    name: str
    status: DiffStatus
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    dtype_a: str | None
    dtype_b: str | None
    size: int = 0
    differing: int = 0
    one_nan: int = 0
    absolute: LargestDifference | None = None
    relative: LargestDifference | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class DiffReport(Report):
    """Report of `orbax_t5x.diff`; `print(report)` is a table.

    Attributes:
      a, b: what was opened.
      rules: the transforms that were applied to `a`, as text.
      leaves: in the order of their names.
      values: whether values were compared.
      atol, rtol: what was still equal.
      warnings: what the transforms warned of.
      bytes_read: of array data, of both sides.
      seconds: wall time.
      strict: whether leaves that only one side has are a difference.
    """

    a: str
    b: str
    rules: tuple[str, ...]
    leaves: tuple[LeafDiff, ...]
    values: bool
    atol: float
    rtol: float
    warnings: tuple[str, ...]
    bytes_read: int
    seconds: float
    strict: bool = True

    @property
    def equal(self) -> bool:
        """True if names, shapes, dtypes and compared values are equal.

        If not `strict`, of the leaves that both sides have, which must be some.
        """
        ignored = () if self.strict else ("only in a", "only in b")
        compared = [leaf.status for leaf in self.leaves if leaf.status not in ignored]
        return all(status == "equal" for status in compared) and (bool(compared) or not self.leaves)

    def summary(self) -> str:
        """Returns the counts in a line."""
        read = f"{size_text(self.bytes_read)} read in {self.seconds:.1f} s"
        return f"{counts_text(self.leaves, _STATUSES)}, {read if self.values else 'values not compared'}"

    def to_json(self) -> dict[str, Any]:
        """See `Report.to_json`."""
        return {**super().to_json(), "equal": self.equal}

    def page(self) -> Page:
        """Returns the contents for people; equal leaves are counted."""
        heads = [f"a: {self.a}", f"b: {self.b}", *(f"a is mapped by {rule}" for rule in self.rules)]
        sections = status_sections(self.leaves, _HEADINGS, _arrays_text, lambda some, why: why or _values_text(some))
        columns = TableRow("leaf", "array", source="difference")
        return Page(columns, "", heads, sections, self.warnings, self.summary())


def _arrays_text(leaf: LeafDiff) -> str:
    a, b = _array_text(leaf.dtype_a, leaf.shape_a), _array_text(leaf.dtype_b, leaf.shape_b)
    return a or b if a == b or not a or not b else f"{a} → {b}"


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return "" if dtype is None or shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _values_text(leaves: Sequence[LeafDiff]) -> str:
    """Describes how far leaves are apart."""
    differing, size = sum(leaf.differing for leaf in leaves), sum(leaf.size for leaf in leaves)
    if not differing and not any(leaf.absolute for leaf in leaves):
        return "values equal" if size else ""
    parts = [f"{differing:,} of {counted(size, 'element')}"]
    if one_nan := sum(leaf.one_nan for leaf in leaves):
        parts.append(f"{one_nan:,} NaN on one side")
    parts += [text for kind in ("absolute", "relative") if (text := _largest_text(kind, leaves))]
    return ", ".join(parts)


def _largest_text(kind: Literal["absolute", "relative"], leaves: Sequence[LeafDiff]) -> str:
    found = [(largest, leaf.name) for leaf in leaves if (largest := getattr(leaf, kind)) is not None]
    if not found:
        return ""
    largest, name = max(found, key=lambda pair: pair[0].value)
    where = "" if not largest.index else f" at [{','.join(map(str, largest.index))}]"
    of = f" of {name}" if len(leaves) > 1 else ""
    values = f" ({_number_text(largest.a)} → {_number_text(largest.b)})" if kind == "absolute" else ""
    return f"{kind} ≤ {_number_text(largest.value)}{where}{of}{values}"


def _number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | complex) else str(value)
