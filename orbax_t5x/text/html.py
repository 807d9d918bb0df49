"""Tables as HTML for notebooks, on light and dark pages.

It is self-contained, and every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from orbax_t5x.text.table import INDENT, TableRow
from orbax_t5x.text.wording import plain

# Colours are those of the page, so that it can be dark; only weights, rules and tints are ours. Names break after a '/'
# or, where they must, anywhere, arrays between words only; on a narrow page the cells of a row stand below its name:
# nothing lies outside.
_STYLE = """
.orbax-t5x {font-size: 13px; line-height: 1.45; max-width: 100%; overflow-wrap: anywhere}
.orbax-t5x p {margin: 0 0 4px}
.orbax-t5x table {border-collapse: collapse; margin: 8px 0; max-width: 100%}
.orbax-t5x th, .orbax-t5x td {text-align: left; vertical-align: top; padding: 2px 12px 2px 0;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); background: none}
.orbax-t5x th {font-size: 13px}
.orbax-t5x td {font-family: ui-monospace, monospace; font-size: 12px; white-space: nowrap}
.orbax-t5x td.name {white-space: normal; overflow-wrap: anywhere; min-width: 14em}
.orbax-t5x .right {text-align: right}
.orbax-t5x .how {opacity: .75}
.orbax-t5x ul {margin: 2px 0 6px; padding-left: 20px; font-family: ui-monospace, monospace; font-size: 12px;
  white-space: pre-line}
.orbax-t5x ol {margin: 4px 0; padding-left: 24px}
.orbax-t5x li {margin-bottom: 4px}
.orbax-t5x pre {margin: 2px 0 8px; padding: 6px 8px; font-size: 12px; white-space: pre-wrap; user-select: all;
  background: color-mix(in srgb, currentColor 7%, transparent); color: inherit; border-radius: 4px}
@media (max-width: 700px) {
  .orbax-t5x td.name {min-width: 0}
  .orbax-t5x td:not(.right) {white-space: normal}
  .orbax-t5x td:not(.name) {overflow-wrap: break-word}
  .orbax-t5x .wide thead {position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden}
  .orbax-t5x .wide, .orbax-t5x .wide tbody {display: block}
  .orbax-t5x .wide tr {display: block; padding: 3px 0;
    border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent)}
  .orbax-t5x .wide td {display: inline; border: 0}
  .orbax-t5x .wide td.name {display: block}
  .orbax-t5x .wide td:not(:first-child) {padding-left: 16px}
}
"""
_INDENT_EMS = 1.2


def _escaped(text: str) -> str:
    """Escapes text, without control characters and marks of direction."""
    return escape("\n".join(map(plain, text.split("\n"))))


def html_fragment(parts: Iterable[str], label: str) -> str:
    """Joins HTML parts and their style to a labelled region."""
    head = f'<div class="orbax-t5x" role="region" aria-label="{_escaped(label)}"><style>{_STYLE}</style>'
    return f"{head}{''.join(parts)}</div>"


def html_code(text: str) -> str:
    """Makes a block of code that a click selects."""
    return f"<pre><code>{_escaped(text)}</code></pre>"


def html_paragraph(text: str, *, bold: bool = False, before: str = "") -> str:
    """Makes a paragraph of text, with bold text `before` it."""
    begin = f"<b>{_escaped(before)}</b>" if before else ""
    return f"<p><b>{_escaped(text)}</b></p>" if bold else f"<p>{begin}{_escaped(text)}</p>"


def html_items(items: Iterable[str]) -> str:
    """Makes a numbered list of HTML."""
    return f"<ol>{''.join(f'<li>{item}</li>' for item in items)}</ol>"


def html_list(items: Iterable[str], title: str, *, is_open: bool = False) -> str:
    """Makes a list that a click on its title opens."""
    lines = "".join(f"<li>{_escaped(item)}</li>" for item in items)
    return f"<details{' open' if is_open else ''}><summary>{_escaped(title)}</summary><ul>{lines}</ul></details>"


def html_table(rows: Sequence[TableRow], heads: TableRow) -> str:
    """Makes a table; columns that no row fills are left out."""
    if not rows:
        return ""
    names = ["label", *(name for name in ("array", "placing", "size") if any(getattr(row, name) for row in rows))]
    names += ["source"] if any(row.origin for row in rows) else []
    head = "".join(f'<th scope="col"{_class_of(name)}>{_escaped(getattr(heads, name))}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_html_cell(row, name) for name in names)}</tr>" for row in rows)
    kind = ' class="wide"' if "source" in names else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _class_of(column: str) -> str:
    known = {"label": "name", "source": "name", "size": "right"}
    return f' class="{known[column]}"' if column in known else ""


def _html_cell(row: TableRow, column: str) -> str:
    text = _escaped(getattr(row, column).lstrip(" "))
    if column in ("label", "source"):
        text = text.replace("/", "/<wbr>")
    if column == "source":
        text = f'<span class="how">{text}</span>' if row.has_remark else text
        text += f' <span class="how">{_escaped(row.how)}</span>' if row.how else ""
    if not text and column != "label":
        return "<td></td>"
    label = getattr(row, column)
    levels = (len(label) - len(label.lstrip(" "))) / len(INDENT) if column == "label" else 0
    indent = f' style="padding-left: {levels * _INDENT_EMS:.1f}em"' if levels else ""
    return f"<td{_class_of(column)}{indent}>{text}</td>"
