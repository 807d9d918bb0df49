"""Plans as tables for terminals and as HTML for notebooks; both show the same rows."""

from __future__ import annotations

from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.rows import (
    HEADS,
    name_sections,
    plan_heading,
    plan_outcome,
    plan_rows,
    without_common_sharding,
)
from orbax_t5x.text.html import html_fragment, html_list, html_paragraph, html_table
from orbax_t5x.text.table import name_lines, table_lines, terminal_width, wrapped
from orbax_t5x.text.wording import plain


def plan_table(plan: RestorePlan) -> str:
    """Returns the plan as a table as wide as the terminal."""
    width = terminal_width()
    every_row, left_out = plan_rows(plan)
    rows, placed = without_common_sharding(every_row)
    title, counts, reads = plan_heading(plan)
    lines = [line for text in (title, counts, reads + placed) for line in wrapped(text, width, rest="  ")]
    lines += ["", *table_lines(rows, width, HEADS)]
    lines += [left_out] if left_out else []
    for section, names in name_sections(plan):
        lines += ["", *wrapped(f"{section}:", width, rest="  ")]
        lines += [line for name in names for line in name_lines(f"  {name}", width, "      ")]
    if plan.warnings:
        lines += ["", "Warnings:"]
        lines += [line for text in plan.warnings for line in wrapped(plain(text), width, "  - ", "    ")]
    if done := plan_outcome(plan):
        lines += ["", *wrapped(done, width, rest="  ")]
    return "\n".join(lines)


def plan_html(plan: RestorePlan) -> str:
    """Returns the plan as an HTML fragment."""
    every_row, left_out = plan_rows(plan)
    rows, placed = without_common_sharding(every_row)
    title, counts, reads = plan_heading(plan)
    parts = [html_paragraph(title, bold=True), html_paragraph(counts), html_paragraph(reads + placed)]
    if plan.warnings:
        parts.append(html_list(plan.warnings, f"Warnings ({len(plan.warnings)})", is_open=True))
    parts.append(html_table(rows, HEADS))
    if left_out:
        parts.append(html_paragraph(left_out))
    parts += [html_list(names, section) for section, names in name_sections(plan)]
    if done := plan_outcome(plan):
        parts.append(html_paragraph(done))
    return html_fragment(parts, "restore plan")
