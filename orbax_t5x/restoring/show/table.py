"""A plan as a table for a terminal: one line a row where that fits, else a few short ones. No name is ever cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from orbax_t5x.restoring.plan_data import PlanData
from orbax_t5x.restoring.show.rows import Row, heading, more_rows, name_sections, outcome, plan_rows
from orbax_t5x.text.table import terminal_width

# With more rows broken than this share, a table of one line a row is harder to read than one of two.
_LEAST_ON_ONE_LINE = 0.75
_GAP = 2


def table(plan: PlanData) -> str:
    """The plan for people, as wide as the terminal."""
    width = terminal_width()
    rows, left_out = plan_rows(plan)
    lines = heading(plan)
    shardings = {row.sharding for row in rows if row.array not in ("None", "...")}
    if len(shardings) == 1 and len(rows) > 1:
        lines[-1] += f" All {_placed(*shardings)}."
        rows = [_without_sharding(row) for row in rows]
    lines = [line for text in lines for line in _wrapped(text, width, "", "  ")]
    lines += ["", *(_wide(rows, width) or _narrow(rows, width))]
    if left_out:
        lines.append(more_rows(left_out))
    for title, names, more in name_sections(plan):
        lines += ["", *_wrapped(title + ":", width, "", "  "), *(f"  {name}" for name in names)]
        lines += [f"  {more}"] if more else []
    if plan.warnings:
        lines += ["", "Warnings:", *(line for text in plan.warnings for line in _wrapped(text, width, "  - ", "    "))]
    if outcome(plan):
        lines += ["", *_wrapped(outcome(plan), width, "", "  ")]
    return "\n".join(lines)


def _placed(sharding: str) -> str:
    known = {"host": "stay on the host as NumPy", "1 device": "go to one device"}
    return known.get(sharding, f"are sharded {sharding}")


def _without_sharding(row: Row) -> Row:
    return Row(row.name, row.count, row.array, "", row.size, row.source, row.how, row.action)


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    """Lines of text, broken at spaces only: a path or a name is copied by whoever reads this."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _wide(rows: Sequence[Row], width: int) -> list[str]:
    """One line a row (where it comes from on a second one where it must); empty where that is too many second lines."""
    heads = ("leaf", "array", "sharding", "reads")
    cells = [(row.label, row.array, row.sharding, row.size) for row in rows]
    columns = [column for column in range(4) if any(cell[column] for cell in cells)]
    widths = [max(len(heads[column]), *(len(cell[column]) for cell in cells)) for column in columns] if rows else []
    room = width - sum(widths) - _GAP * len(widths)
    details = [" · ".join(part for part in (row.source, row.how) if part) for row in rows]
    if not rows or sum(len(detail) <= room for detail in details) < _LEAST_ON_ONE_LINE * len(rows):
        return []

    def line(cell: Sequence[str], last: str) -> str:
        parts = [
            cell[column].rjust(size) if heads[column] == "reads" else cell[column].ljust(size)
            for column, size in zip(columns, widths, strict=True)
        ]
        return (" " * _GAP).join([*parts, last]).rstrip()

    lines = [line(heads, "from")]
    for row, cell, detail in zip(rows, cells, details, strict=True):
        if len(detail) <= room:
            lines.append(line(cell, detail))
        elif max(len(row.source), len(row.how)) <= room:
            lines += [line(cell, row.source), " " * (width - room) + row.how]
        else:
            lines += [line(cell, ""), *_wrapped(detail, width, "    ← ", "      ")]
    return lines


def _narrow(rows: Sequence[Row], width: int) -> list[str]:
    """A row on two lines, rarely more: the name, where it comes from, array and bytes at the right edge of either."""
    size_width = max((len(row.size) for row in rows), default=0)
    # Far to the right of short names nobody would find the numbers.
    longest = max((len(row.label) + len(row.array) + size_width + 2 * _GAP for row in rows), default=0)
    right_edge = min(width, longest)
    lines: list[str] = []
    for row in rows:
        right = f"{row.array}{' ' * _GAP}{row.size.rjust(size_width)}" if row.size else row.array
        edge = right_edge if row.size or size_width == 0 else right_edge - size_width - _GAP
        arrow = "← " if row.action == "read" else "· "
        # A no-break space keeps `P('data', None)` in one piece; textwrap knows it, terminals would copy it.
        details = " ·\xa0".join(part for part in (row.source, row.how, row.sharding.replace(" ", "\xa0")) if part)
        block = [row.label, *(line.replace("\xa0", " ") for line in _wrapped(details, width, "    " + arrow, "      "))]
        place = next((at for at, line in enumerate(block) if len(line) + _GAP + len(right) <= edge), len(block))
        if place == len(block):
            block.append("")
        block[place] += right.rjust(edge - len(block[place]))
        lines += block
    return lines
