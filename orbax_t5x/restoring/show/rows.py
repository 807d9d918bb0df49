"""The rows of a plan: what its table and its HTML both show, with repeated layers as one row.

Linear in the leaves; the bytes of a leaf are computed only for rows that are shown, since that asks every view for its
boxes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from orbax_t5x.lazy import Box
from orbax_t5x.lazy.box import box_size
from orbax_t5x.restoring.plan_data import PlanData, PlanEntry
from orbax_t5x.text.fold import fold, fold_names, times_text
from orbax_t5x.text.wording import (
    array_bytes,
    array_text,
    counted,
    leaves_text,
    mesh_text,
    plain,
    sharding_text,
    size_text,
)

# Rows shown; a plan that needs more is read by programs, not by people.
SHOWN_ROWS = 200
# Rows of unused or dropped names shown.
SHOWN_NAMES = 20
# Sources of one leaf that are named when they do not fold.
_SHOWN_SOURCES = 2
_WORDS = {"read": "read", "value": "constant", "fallback": "fallback", "keep": "kept as it is"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one line shows.

    Attributes:
      name: the leaf's, numbers that vary in braces.
      count: how many leaves the row stands for.
      array: dtype and shape of each.
      sharding: short.
      size: bytes that this process reads for all of them, as text; empty where nothing is read.
      source: where it comes from.
      how: what happens on the way; may be empty.
      action: of the entries.
    """

    name: str
    count: int
    array: str
    sharding: str
    size: str
    source: str
    how: str
    action: str

    @property
    def label(self) -> str:
        """The name with the count."""
        return self.name + times_text(self.count)


def plan_rows(plan: PlanData) -> tuple[list[Row], int]:
    """The rows to show, and how many leaves are not among them; constants have a section of their own."""
    entries = [entry for entry in plan.entries if entry.action != "value"]
    if plan.target.kind == "everything":
        # Without a target leaves come in the checkpoint's order, which scatters what belongs together.
        entries.sort(key=lambda entry: entry.name)
    told = [(entry_array(entry), entry_sharding(entry), entry.action) for entry in entries]
    folded = fold([(entry.name, entry_source(entry), entry_how(entry)) for entry in entries], told)
    rows: list[Row] = []
    for row in folded[:SHOWN_ROWS]:
        name, source, how = map(plain, row.texts)
        array, sharding, action = told[row.members[0]]
        size = size_text(sum(entry_bytes(entries[member]) for member in row.members)) if action == "read" else ""
        same = action == "read" and source == name
        rows.append(Row(name, len(row.members), array, sharding, size, "same name" if same else source, how, action))
    return rows, sum(len(row.members) for row in folded[SHOWN_ROWS:])


def entry_bytes(entry: PlanEntry) -> int:
    """Bytes of array data that this process needs for one leaf, each box once."""
    return sum(size for _, _, size in entry_reads(entry))


def entry_reads(entry: PlanEntry) -> list[tuple[str, Box, int]]:
    """Stored leaf, box and bytes of what this process reads for one leaf, each once."""
    if entry.view is None or entry.action != "read":
        return []
    found = {
        (id(leaf), box): (leaf.name, box, box_size(box) * leaf.dtype.itemsize)
        for wanted in entry.boxes()
        for leaf, box in entry.view.requests(wanted)
        if not leaf.is_value
    }
    return list(found.values())


def entry_array(entry: PlanEntry) -> str:
    """Dtype and shape; what is no array says so."""
    if entry.dtype is None:
        return "None" if entry.leaf is not None and entry.leaf.kind == "none" else "..."
    key = " key" if entry.leaf is not None and entry.leaf.kind == "key" else ""
    return array_text(entry.dtype, tuple(entry.shape)) + key


def entry_sharding(entry: PlanEntry) -> str:
    """The sharding, or where the leaf lives without one."""
    if entry.sharding is not None:
        return sharding_text(entry.sharding)
    kind = "" if entry.leaf is None else entry.leaf.kind
    return {"jax": "1 device", "key": "1 device", "numpy": "host", "scalar": "host"}.get(kind, "")


def entry_source(entry: PlanEntry) -> str:
    """The names of the stored leaves, folded; what is not read says what it is."""
    if entry.action != "read":
        return _WORDS[entry.action]
    if len(entry.sources) == 1:
        return entry.sources[0]
    folded = [row.texts[0] for row in fold_names(entry.sources)]
    more = f" and {len(folded) - _SHOWN_SOURCES} more" if len(folded) > _SHOWN_SOURCES else ""
    return " + ".join(folded[:_SHOWN_SOURCES]) + more


def entry_how(entry: PlanEntry) -> str:
    """What happens on the way, casts to the target's dtype and approximations included."""
    # What followed exactly is as it should be; a table full of "exact" would hide the others.
    fidelity = entry.fidelity if entry.fidelity in ("approximate", "reset") else ""
    return ", ".join(text for text in (entry.how, fidelity) if text)


def heading(plan: PlanData) -> list[str]:
    """What the plan is, in up to three lines."""
    sources = [
        (f"{name}: " if name else "")
        + f"{plain(checkpoint.path)} ({checkpoint.format}"
        + (f", step {checkpoint.step}" if checkpoint.step is not None else "")
        + ")"
        for name, checkpoint in plan.checkpoints.items()
    ]
    lines = [f"Restore plan: {leaves_text(len(plan.entries))} from {', '.join(sources)}"]
    counts = {word: sum(entry.action == action for entry in plan.entries) for action, word in _WORDS.items()}
    counts |= {"unused": len(plan.unused), "dropped": len(plan.dropped)}
    facts = [f"{count:,} {word}" for word, count in counts.items() if count]
    facts += [counted(len(plan.warnings), "warning")] if plan.warnings else []
    lines.append(" · ".join(facts) or "nothing to do")
    stored = {id(leaf): leaf for entry in plan.entries if entry.view is not None for leaf in entry.view.leaves()}
    whole = sum(array_bytes(leaf.dtype, leaf.shape) for leaf in stored.values() if not leaf.is_value)
    reads = f"This process reads {size_text(plan.bytes_to_read)}"
    # Where two leaves want one source in other cuts, parts of it are read twice, and this says nothing worth comparing.
    reads += f" of the {size_text(whole)} that these leaves take." if plan.bytes_to_read < whole else "."
    meshes = dict.fromkeys(text for text in (mesh_text(entry.sharding) for entry in plan.entries) if text)
    if meshes:
        reads += f" Mesh: {'; '.join(meshes)}."
    return [*lines, reads]


def outcome(plan: PlanData) -> str:
    """What the last execution read and checked; empty before one."""
    report = plan.report
    if report is None:
        return ""
    parts = [f"{size_text(report.bytes_read)} read in {report.seconds:.2f} s"]
    if report.gap_bytes:
        parts.append(f"{size_text(report.gap_bytes)} of gaps read over")
    if report.fill_chunks:
        parts.append(f"{counted(report.fill_chunks, 'chunk')} absent, filled")
    checks = (
        ("verified", report.verified),
        ("read only in part", report.unverified),
        ("without checksum", report.without_checksum),
    )
    parts += [f"{leaves_text(len(names))} {word}" for word, names in checks if names]
    return "Executed: " + ", ".join(parts) + "."


def name_sections(plan: PlanData) -> list[tuple[str, list[str], str]]:
    """Title, folded names and what is left out, for constants, unused and dropped leaves."""
    constants = {entry.name: entry_array(entry) for entry in plan.entries if entry.action == "value"}
    sections = [
        ("Constants: put there by a transform, not read", constants, "plan.entries"),
        ("Unused: in the checkpoint, without a place in the target", dict.fromkeys(plan.unused, ""), "plan.unused"),
        ("Dropped: taken out on purpose", dict.fromkeys(plan.dropped, ""), "plan.dropped"),
    ]
    return [(f"{title} ({len(names):,})", *_shown_names(names, where)) for title, names, where in sections if names]


def _shown_names(names: Mapping[str, str], where: str) -> tuple[list[str], str]:
    """Folded names, each with what is said of it, and a sentence for those that are not shown."""
    told = list(names.values())
    folded = fold([(name,) for name in names], told)
    shown = [plain(f"{row.label}  {told[row.members[0]]}".rstrip()) for row in folded[:SHOWN_NAMES]]
    left = sum(len(row.members) for row in folded[SHOWN_NAMES:])
    return shown, f"… and {left:,} more in `{where}`" if left else ""


def more_rows(count: int) -> str:
    """The sentence for leaves that are not shown."""
    return f"… and {leaves_text(count)} more: see `plan.entries` or `plan.to_json()`" if count else ""
