"""The rows of a table as HTML for notebooks: self-contained, every text escaped, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from orbax_t5x.text.table import TableRow
from orbax_t5x.text.wording import plain

# Colours are those of the page, so that it can be dark; only weights and rules are ours. Names break after a '/'
# or, where they must, anywhere, so that no column is outside the page.
_STYLE = """
.orbax-t5x {font-size: 13px; line-height: 1.45; max-width: 100%; overflow-x: auto}
.orbax-t5x p {margin: 0 0 4px}
.orbax-t5x table {border-collapse: collapse; margin: 8px 0}
.orbax-t5x th, .orbax-t5x td {text-align: left; vertical-align: top; padding: 2px 12px 2px 0;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); background: none}
.orbax-t5x th {font-size: 13px}
.orbax-t5x td {font-family: ui-monospace, monospace; font-size: 12px; white-space: nowrap}
.orbax-t5x td.name {white-space: normal; overflow-wrap: anywhere; min-width: 20em}
.orbax-t5x .right {text-align: right}
.orbax-t5x .how {opacity: .65}
.orbax-t5x ul {margin: 2px 0 6px; padding-left: 20px; font-family: ui-monospace, monospace; font-size: 12px;
  overflow-wrap: anywhere; white-space: pre-line}
"""


def _escaped(text: str) -> str:
    """Returns text without markup, control characters and marks of direction; lines stay apart."""
    return escape("\n".join(map(plain, text.split("\n"))))


def html_fragment(parts: Iterable[str]) -> str:
    """Joins parts that are HTML already, with their style."""
    return f'<div class="orbax-t5x"><style>{_STYLE}</style>{"".join(parts)}</div>'


def html_paragraph(text: str, *, bold: bool = False) -> str:
    """Makes a paragraph of text."""
    return f"<p><b>{_escaped(text)}</b></p>" if bold else f"<p>{_escaped(text)}</p>"


def html_list(items: Iterable[str], title: str, *, is_open: bool = False) -> str:
    """Makes a list that opens and closes by a click on its title."""
    lines = "".join(f"<li>{_escaped(item)}</li>" for item in items)
    return f"<details{' open' if is_open else ''}><summary>{_escaped(title)}</summary><ul>{lines}</ul></details>"


def html_sections(sections: Iterable[tuple[str, Sequence[TableRow]]], heads: TableRow) -> list[str]:
    """Makes a table below a heading of each section."""
    return [part for heading, rows in sections for part in (html_paragraph(f"{heading}:"), html_table(rows, heads))]


def html_table(rows: Sequence[TableRow], heads: TableRow) -> str:
    """Makes a table; columns that no row fills are left out."""
    if not rows:
        return ""
    names = ["label", *(name for name in ("array", "placing", "size") if any(getattr(row, name) for row in rows))]
    names += ["source"] if any(row.origin for row in rows) else []
    head = "".join(f"<th{_class_of(name)}>{_escaped(getattr(heads, name))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row, name) for name in names)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _class_of(column: str) -> str:
    known = {"label": "name", "source": "name", "size": "right"}
    return f' class="{known[column]}"' if column in known else ""


def _cell(row: TableRow, column: str) -> str:
    text = _escaped(getattr(row, column))
    if column in ("label", "source"):
        text = text.replace("/", "/<wbr>")
    if column == "source":
        text = f'<span class="how">{text}</span>' if row.has_remark else text
        text += f' <span class="how">{_escaped(row.how)}</span>' if row.how else ""
    return f"<td{_class_of(column)}>{text}</td>"
