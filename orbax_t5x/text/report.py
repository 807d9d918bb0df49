"""Reports as text and JSON."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from orbax_t5x.text.fold import fold
from orbax_t5x.text.html import html_text
from orbax_t5x.text.table import TableRow, name_lines, table_lines, terminal_width, wrapped
from orbax_t5x.text.wording import leaves_text, plain

_HEADS = TableRow("leaf", "array")


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Part of a page: a table, names, or code.

    `left_out` is a sentence on hidden rows; `code` are lines to paste, which are never wrapped.
    """

    heading: str = ""
    rows: Sequence[TableRow] = ()
    names: Sequence[str] = ()
    left_out: str = ""
    code: Sequence[str] = ()

    def text_lines(self, width: int, heads: TableRow) -> Iterator[str]:
        """Returns the lines for a terminal."""
        yield from wrapped(f"{self.heading}:", width, rest="  ") if self.heading else ()
        yield from table_lines(self.rows, width, None if self.heading else heads)
        yield from (line for name in self.names for line in name_lines(f"  {name}", width, "      "))
        yield from (f"  {line}" for line in self.code)
        yield from [self.left_out] if self.left_out else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Contents of a report, in the order of its text.

    Attributes:
      heads: headings of the tables' columns.
    """

    heads: TableRow = _HEADS
    title: str = ""
    head: Sequence[str] = ()
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    end: str = ""

    def text(self, width: int | None = None) -> str:
        """Returns the page as text, as wide as the terminal."""
        width = width or terminal_width()
        head = [self.title, *self.head] if self.title else self.head
        lines = [line for text in head for line in wrapped(plain(text), width, rest="  ")]
        for section in self.sections:
            lines += ["", *section.text_lines(width, self.heads)]
        if self.warnings:
            lines += ["", "Warnings:"]
            lines += [line for text in self.warnings for line in wrapped(plain(text), width, "  - ", "    ")]
        return "\n".join([*lines, *(["", *wrapped(self.end, width, rest="  ")] if self.end else [])])


@dataclasses.dataclass(frozen=True)
class Report:
    """Base of reports, which are dataclasses that make a page."""

    def page(self) -> Page:
        """Returns the contents for people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values.

        Numbers that JSON lacks are text: "inf", "nan", complex numbers.
        """
        return json_values(dataclasses.asdict(self))

    def __str__(self) -> str:
        return self.page().text()

    def _repr_html_(self) -> str:
        return html_text(str(self))


class ReportedLeaf(Protocol):
    """Result for a leaf: its status, and the reason for it."""

    @property
    def name(self) -> str:
        """The leaf's name."""
        ...

    @property
    def status(self) -> str:
        """A short word for the result."""
        ...

    @property
    def reason(self) -> str:
        """The reason of the status; may be empty."""
        ...


_Leaf = TypeVar("_Leaf", bound=ReportedLeaf)


def counts_text(leaves: Iterable[ReportedLeaf], statuses: Mapping[str, str]) -> str:
    """Counts leaves by status; `statuses` has the words."""
    counts = collections.Counter(leaf.status for leaf in leaves)
    parts = [f"{leaves_text(counts[status])} {words}" for status, words in statuses.items() if counts[status]]
    return ", ".join(parts) or "no leaves"


def status_sections(
    leaves: Sequence[_Leaf],
    headings: Mapping[str, str],
    array: Callable[[_Leaf], str],
    remark: Callable[[Sequence[_Leaf], str], str],
) -> list[Section]:
    """Makes a section of folded leaves for each status.

    `remark` gets the leaves of a row and their folded reason.
    """

    def rows(some: Sequence[_Leaf]) -> Iterator[TableRow]:
        arrays = [array(leaf) for leaf in some]
        for row in fold([(leaf.name, leaf.reason) for leaf in some], arrays):
            text = remark([some[member] for member in row.members], row.texts[1])
            yield TableRow(plain(row.label), arrays[row.members[0]], source=plain(text), has_remark=True)

    found = {status: [leaf for leaf in leaves if leaf.status == status] for status in headings}
    return [Section(headings[status], list(rows(some))) for status, some in found.items() if some]


def json_values(value: Any) -> Any:
    """Converts numbers that JSON lacks to text, in dicts and lists, too."""
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in cast("Sequence[Any]", value)]
    is_json = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)
