"""A plan as HTML for notebooks: one self-contained fragment, every text escaped, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from orbax_t5x.restoring.plan_data import PlanData
from orbax_t5x.restoring.show.rows import Row, heading, more_rows, name_sections, outcome, plan_rows

# Colours are those of the page, so that it can be dark; only weights and rules are ours.
_STYLE = """
.orbax-t5x-plan {font-size: 13px; line-height: 1.45; max-width: 100%; overflow-x: auto}
.orbax-t5x-plan p {margin: 0 0 4px}
.orbax-t5x-plan table {border-collapse: collapse; margin: 8px 0}
.orbax-t5x-plan th, .orbax-t5x-plan td {text-align: left; vertical-align: top; padding: 2px 12px 2px 0;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); background: none}
.orbax-t5x-plan th {font-size: 13px}
.orbax-t5x-plan td {font-family: ui-monospace, monospace; font-size: 12px; white-space: nowrap}
.orbax-t5x-plan .right {text-align: right}
.orbax-t5x-plan .how {opacity: .65}
.orbax-t5x-plan ul {margin: 2px 0 6px; padding-left: 20px; font-family: ui-monospace, monospace; font-size: 12px}
"""


def html(plan: PlanData) -> str:
    """The plan as an HTML fragment."""
    title, *facts = heading(plan)
    rows, left_out = plan_rows(plan)
    parts = [f"<p><b>{escape(title)}</b></p>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    if plan.warnings:
        parts.append(f"<p><b>Warnings</b></p>{_list(plan.warnings)}")
    parts.append(_table(rows))
    if left_out:
        parts.append(f"<p>{escape(more_rows(left_out))}</p>")
    for heading_text, names, more in name_sections(plan):
        items = [*names, more] if more else names
        parts.append(f"<details><summary>{escape(heading_text)}</summary>{_list(items)}</details>")
    if outcome(plan):
        parts.append(f"<p>{escape(outcome(plan))}</p>")
    return f'<div class="orbax-t5x-plan"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    heads = '<th>leaf</th><th>array</th><th>sharding</th><th class="right">reads</th><th>from</th>'
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(_row(row) for row in rows)}</tbody></table>"


def _row(row: Row) -> str:
    how = f' <span class="how">{escape(row.how)}</span>' if row.how else ""
    source = escape(row.source)
    if row.action != "read" or row.source == "same name":
        source = f'<span class="how">{source}</span>'
    return (
        f"<tr><td>{escape(row.label)}</td><td>{escape(row.array)}</td><td>{escape(row.sharding)}</td>"
        f'<td class="right">{escape(row.size)}</td><td>{source}{how}</td></tr>'
    )


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
