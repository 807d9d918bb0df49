"""Plans as tables for terminals and as HTML for notebooks.

Both show the same rows, with repeated layers as a single row. Linear in the leaves; the bytes of a leaf are computed
only for rows that are shown, since that asks every view for its boxes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.entries import (
    ACTION_WORDS,
    entry_array,
    entry_how,
    entry_sharding,
    entry_source,
    entry_why,
    why_text,
)
from orbax_t5x.restoring.show.filled import filled_patterns, filled_text, folded_subtrees
from orbax_t5x.text.code import code_lines, code_of
from orbax_t5x.text.fold import fold
from orbax_t5x.text.report import Page, Section
from orbax_t5x.text.table import TableRow
from orbax_t5x.text.wording import array_bytes, counted, leaves_text, listed, mesh_text, plain, size_text

# Rows shown; a plan that needs more is read by programs, not by people.
SHOWN_ROWS = 200
# Rows of unused or dropped names shown.
_SHOWN_NAMES = 20
# Subtrees shown for each reason.
_SHOWN_SUBTREES = 6
HEADS = TableRow("leaf", "array", "sharding", "reads", "from")
_SAME_NAME = "same name"
_PLACES = {"host": "stay on the host as NumPy", "1 device": "go to one device"}


def plan_rows(plan: RestorePlan) -> tuple[list[TableRow], str]:
    """Returns the rows to show, and a sentence on left-out leaves."""
    entries = [entry for entry in plan.entries if entry.action != "value"]
    if plan.target.kind == "everything":
        # Without a target leaves come in the checkpoint's order, which scatters what belongs together.
        entries.sort(key=lambda entry: entry.name)
    cells = [(entry_array(entry), entry_sharding(entry), entry.action) for entry in entries]
    folded = fold([(entry.name, entry_source(entry), entry_how(entry)) for entry in entries], cells)
    rows: list[TableRow] = []
    for row in folded[:SHOWN_ROWS]:
        name, source, how = map(plain, row.texts)
        array, sharding, action = cells[row.members[0]]
        size = size_text(sum(entries[member].bytes_to_read for member in row.members)) if action == "read" else ""
        is_same = action == "read" and source == name
        label = plain(row.label)
        source = _SAME_NAME if is_same else source
        rows.append(TableRow(label, array, sharding, size, source, how, has_remark=is_same or action != "read"))
    left = sum(len(row.members) for row in folded[SHOWN_ROWS:])
    return rows, f"… and {leaves_text(left)} more: see `plan.entries` or `plan.to_json()`" if left else ""


def without_common_sharding(rows: list[TableRow]) -> tuple[list[TableRow], str]:
    """Takes a sharding that all arrays have out of the rows."""
    shardings = {row.placing for row in rows if row.array not in ("None", "...")}
    if len(shardings) != 1 or len(rows) == 1:
        return rows, ""
    (sharding,) = shardings
    sentence = f" All {_PLACES.get(sharding, f'are sharded {sharding}')}."
    return [dataclasses.replace(row, placing="") for row in rows], sentence


def plan_heading(plan: RestorePlan) -> list[str]:
    """Summarizes the plan in three lines."""
    sources = [
        (f"{name}: " if name else "")
        + f"{plain(checkpoint.path)} ({checkpoint.format}"
        + (f", step {checkpoint.step}" if checkpoint.step is not None else "")
        + ")"
        for name, checkpoint in plan.checkpoints.items()
    ]
    counts = {word: sum(entry.action == action for entry in plan.entries) for action, word in ACTION_WORDS.items()}
    counts |= {"unused": len(plan.unused), "dropped": len(plan.dropped)}
    facts = [f"{count:,} {word}" for word, count in counts.items() if count]
    facts += [counted(len(plan.warnings), "warning")] if plan.warnings else []
    facts += [] if plan.migrations is None else [plain(str(plan.migrations))]
    leaves, facts_text = f"{leaves_text(len(plan.entries))} from {', '.join(sources)}", " · ".join(facts)
    if filled := filled_text(plan):
        counts_text = f"{leaves}: {facts_text}. From fallback: {filled_patterns(plan)}."
        return [f"Restore plan: {filled}", counts_text, _reads_text(plan)]
    return [f"Restore plan: {leaves}", facts_text or "nothing to do", _reads_text(plan)]


def _reads_text(plan: RestorePlan) -> str:
    stored = {leaf for entry in plan.entries if entry.view is not None for leaf in entry.view.leaves()}
    whole = sum(array_bytes(leaf.dtype, leaf.shape) for leaf in stored if not leaf.is_value)
    planning = plan.bytes_read_at_planning
    before = f"Transforms read {size_text(planning)} while the plan was made. " if planning else ""
    reads = f"{before}This process {'still ' if planning else ''}reads {size_text(plan.bytes_to_read)}"
    # Where two leaves want one source in other cuts, parts of it are read twice, and this says nothing worth comparing.
    reads += f" of the {size_text(whole)} that these leaves take." if plan.bytes_to_read < whole else "."
    meshes = dict.fromkeys(text for text in (mesh_text(entry.sharding) for entry in plan.entries) if text)
    return reads + (f" Mesh: {'; '.join(meshes)}." if meshes else "")


def plan_outcome(plan: RestorePlan) -> str:
    """Summarizes the last execution; empty before the first."""
    return "" if plan.report is None else f"Executed: {plan.report.summary()}."


def name_sections(plan: RestorePlan) -> Iterator[Section]:
    """Makes the sections beside the table."""
    if plan.found_rules:
        code = [line for one in plan.found_rules for line in code_lines(f"{code_of(one)},")]
        yield Section('Rules that "auto" found, as transforms to paste', code=code)
    if reasons := _reasons(plan):
        yield Section('Why "auto" took its leaves', names=reasons)
    constants = {entry.name: entry_array(entry) for entry in plan.entries if entry.action == "value"}
    unread = "" if plan.bytes_read_at_planning else ", not read"
    unused = "Unused: in the checkpoint, without a counterpart in the target"
    for title, names, where in (
        (f"Constants: put there by a transform{unread}", constants, "plan.entries"),
        (unused, dict.fromkeys(plan.unused, ""), "plan.unused"),
        ("Dropped: taken out on purpose", dict.fromkeys(plan.dropped, ""), "plan.dropped"),
    ):
        if names:
            yield Section(f"{title} ({len(names):,})", names=_shown_names(names, where))


def _reasons(plan: RestorePlan) -> list[str]:
    """Returns a line for each reason, with names folded to subtrees."""
    names: dict[str, list[str]] = {}
    for entry in plan.entries:
        if (why := entry_why(entry, plan)) is not None:
            names.setdefault(why_text(why), []).append(entry.name)
    every = [entry.name for entry in plan.entries]
    return [plain(f"{text}: {listed(folded_subtrees(found, every), _SHOWN_SUBTREES)}") for text, found in names.items()]


def _shown_names(remarks: Mapping[str, str], where: str) -> list[str]:
    """Folds names with remarks, and counts the hidden names."""
    texts = list(remarks.values())
    folded = fold([(name,) for name in remarks], texts)
    shown = [plain(f"{row.label}  {texts[row.members[0]]}".rstrip()) for row in folded[:_SHOWN_NAMES]]
    left = sum(len(row.members) for row in folded[_SHOWN_NAMES:])
    return [*shown, f"… and {left:,} more in `{where}`"] if left else shown


def plan_page(plan: RestorePlan) -> Page:
    """Returns the plan for people."""
    every_row, left_out = plan_rows(plan)
    rows, placed = without_common_sharding(every_row)
    title, counts, reads = plan_heading(plan)
    sections = [Section(rows=rows, left_out=left_out), *name_sections(plan)]
    return Page(HEADS, title, [counts, reads + placed], sections, plan.warnings, plan_outcome(plan))
