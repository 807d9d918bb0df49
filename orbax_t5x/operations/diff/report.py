"""The report of a comparison, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from orbax_t5x.operations.diff.values import LargestDifference
from orbax_t5x.text.fold import fold
from orbax_t5x.text.html import html_fragment, html_list, html_paragraph, html_sections
from orbax_t5x.text.table import TableRow, table_lines, terminal_width
from orbax_t5x.text.wording import counted, leaves_text, plain, size_text

DiffStatus = Literal["equal", "only in a", "only in b", "shape", "dtype", "values", "damaged", "unreadable"]
_STATUSES: tuple[DiffStatus, ...] = (
    "damaged",
    "unreadable",
    "only in a",
    "only in b",
    "shape",
    "dtype",
    "values",
    "equal",
)
_HEADINGS = {"shape": "other shapes", "dtype": "other dtypes", "values": "other values"}


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
class DiffReport:
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
        counts = collections.Counter(leaf.status for leaf in self.leaves)
        parts = [_count_text(status, counts[status]) for status in _STATUSES if counts[status]] or ["no leaves"]
        read = f"{size_text(self.bytes_read)} read in {self.seconds:.1f} s"
        return ", ".join([*parts, read if self.values else "values not compared"])

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values.

        Numbers that JSON lacks are text: "inf", "nan", complex numbers.
        """
        return _finite_json({**dataclasses.asdict(self), "equal": self.equal})

    def lines(self, width: int) -> list[str]:
        """Formats the table.

        Equal leaves are counted; leaves whose names differ in a single number share a line.
        """
        lines = [f"a: {plain(self.a)}", f"b: {plain(self.b)}"]
        lines += [f"a is mapped by {plain(rule)}" for rule in self.rules]
        lines += [f"warning: {plain(warning)}" for warning in self.warnings]
        for heading, rows in self._sections():
            lines += ["", f"{heading}:", *table_lines(rows, width)]
        return [*lines, "", self.summary()]

    def _sections(self) -> Iterator[tuple[str, list[TableRow]]]:
        for status in _STATUSES[:-1]:
            some = [leaf for leaf in self.leaves if leaf.status == status]
            if some:
                yield _HEADINGS.get(status, status), list(_diff_rows(some))

    def _repr_html_(self) -> str:
        heads = [f"a: {self.a}", f"b: {self.b}", *(f"a is mapped by {rule}" for rule in self.rules)]
        parts = [html_paragraph(self.summary(), bold=True), *map(html_paragraph, heads)]
        parts += [html_list(self.warnings, "Warnings", is_open=True)] if self.warnings else []
        parts += html_sections(self._sections(), TableRow("leaf", "array", source="difference"))
        return html_fragment(parts, "comparison")

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))


def _count_text(status: DiffStatus, count: int) -> str:
    if status in ("shape", "dtype"):
        return f"{leaves_text(count)} of other {status}"
    return f"{leaves_text(count)} with other values" if status == "values" else f"{leaves_text(count)} {status}"


def _finite_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_json(item) for item in value]
    is_json = (
        value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_json else str(value)


def _diff_rows(leaves: Sequence[LeafDiff]) -> Iterator[TableRow]:
    arrays = [_arrays_text(leaf) for leaf in leaves]
    for row in fold([(leaf.name, leaf.reason) for leaf in leaves], arrays):
        some = [leaves[member] for member in row.members]
        remark = plain(row.texts[1]) or _values_text(some)
        yield TableRow(plain(row.label), arrays[row.members[0]], source=remark, has_remark=True)


def _arrays_text(leaf: LeafDiff) -> str:
    a, b = _array_text(leaf.dtype_a, leaf.shape_a), _array_text(leaf.dtype_b, leaf.shape_b)
    return a or b if a == b or not a or not b else f"{a} → {b}"


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return "" if dtype is None or shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _values_text(leaves: Sequence[LeafDiff]) -> str:
    """Describes how far leaves are apart.

    Of several, all together, and the worst of them by name.
    """
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
    of = f" of {plain(name)}" if len(leaves) > 1 else ""
    values = f" ({_number_text(largest.a)} → {_number_text(largest.b)})" if kind == "absolute" else ""
    return f"{kind} ≤ {_number_text(largest.value)}{where}{of}{values}"


def _number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | complex) else str(value)
