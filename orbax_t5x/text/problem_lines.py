"""Many problems as a few lines: those of one kind that differ only in a number or in the leaf are one entry.

The lines are always fewer than `MOST_LINES`: every kind keeps its first entries, and a line counts the problems that
are not shown. A long list inside a message, such as all names of a checkpoint, is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

from orbax_t5x.text.fix import Fix
from orbax_t5x.text.fold import Folded, fold
from orbax_t5x.text.problem import Problem
from orbax_t5x.text.table import wrapped
from orbax_t5x.text.wording import counted, ended, leaves_text, plain

MOST_LINES = 56
# Entries of all kinds together, where no kind has fewer than three.
_MOST_ENTRIES = 20
# Messages of this length are read; longer ones are lists of names.
_MOST_CHARACTERS = 600


@dataclasses.dataclass(slots=True)
class _ProblemGroup:
    """Problems of one kind with one message, with their `leaves` folded; the fix may be only the first's."""

    kind: str
    message: str
    fix: str
    fix_names_leaf: bool
    leaves: list[Folded]
    count: int

    def lines(self, width: int | None, most_leaves: int, most_characters: int | None) -> list[str]:
        """Returns the message and the fix; the leaves below where there are several rows of them."""
        labels = [plain(row.label) for row in self.leaves]
        where = f"{labels[0]}: " if len(labels) == 1 else f"{leaves_text(self.count)}: " if labels else ""
        text = ended(f"[{self.kind}] {where}{_cut(self.message, most_characters)}")
        if self.fix:
            heading = "Fix, for the first" if self.fix_names_leaf and self.count > 1 else "Fix"
            text += f"\n{heading}: {_cut(self.fix, most_characters)}"
        first, *others = map(plain, text.splitlines())
        lines = wrapped(first, width, "  - ", "    ")
        lines += [line for other in others for line in wrapped(other, width, "    ", "    ")]
        if len(labels) > 1:
            lines += [f"      {label}" for label in labels[:most_leaves]]
            left = sum(len(row.members) for row in self.leaves[most_leaves:])
            lines += [f"      … and {leaves_text(left)} more"] if left and most_leaves else []
        return lines


def problem_lines(
    problems: Sequence[Problem],
    *,
    width: int | None = None,
    all_in: str = "`.problems`",
    fix_text: Callable[[Fix], str] = str,
) -> list[str]:
    """Returns the lines for people, fewer than `MOST_LINES`; `all_in` has all of them, for what is not shown."""
    entries_of: dict[str, list[_ProblemGroup]] = {}
    for entry in _entries(problems, fix_text):
        entries_of.setdefault(entry.kind, []).append(entry)
    # The message of a single problem is shown whole: there is nothing that it could hide.
    most_characters = None if len(problems) == 1 else _MOST_CHARACTERS
    lines: list[str] = []
    for most_entries, most_leaves in ((max(3, _MOST_ENTRIES // max(1, len(entries_of))), 6), (3, 3), (1, 1), (1, 0)):
        lines = []
        for kind, entries in entries_of.items():
            for entry in entries[:most_entries]:
                lines += entry.lines(width, most_leaves, most_characters)
            if left := sum(entry.count for entry in entries[most_entries:]):
                lines.append(f"  … and {counted(left, 'problem')} more of kind [{kind}]: see {all_in}")
        if len(lines) < MOST_LINES:
            return lines
    return [*lines[: MOST_LINES - 2], f"  … and more: see {all_in}"]


def _entries(problems: Sequence[Problem], fix_text: Callable[[Fix], str]) -> Iterable[_ProblemGroup]:
    """Groups problems whose messages differ only in where a leaf is from, and whose fixes only in its name."""
    texts = [(one.leaf or "", one.message.removesuffix(one.source), one.source) for one in problems]
    folded = fold(texts, [one.kind for one in problems])
    entries: dict[Hashable, _ProblemGroup] = {}
    for row in folded:
        first = problems[row.members[0]]
        fix = first.fix
        _, message, source = row.texts
        shared = None if fix is None else fix.without(first.leaf)
        entry = entries.get((first.kind, message, shared))
        if entry is None:
            names_leaf = fix is not None and shared != fix.without(None)
            text = "" if fix is None else fix_text(fix)
            entry = _ProblemGroup(first.kind, message + source, text, names_leaf, [], 0)
            entries[first.kind, message, shared] = entry
        elif entry.message != message + source:
            entry.message = message
        entry.count += len(row.members)
        if first.leaf:
            entry.leaves.append(row)
    return entries.values()


def _cut(text: str, most_characters: int | None) -> str:
    left = 0 if most_characters is None else len(text) - most_characters
    return text if left <= 0 else f"{text[:most_characters]}… ({left:,} characters more)"
