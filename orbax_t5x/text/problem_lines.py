"""Many problems as a few lines.

Problems of a kind that differ only in a number or in the leaf share an entry. The lines are always fewer than
`MOST_LINES`: every kind keeps its first entries, and a line counts the problems that are not shown. A long list inside
a message, such as all names of a checkpoint, is cut.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Hashable, Sequence

from orbax_t5x.text.code import code_lines
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.fold import Folded, fold
from orbax_t5x.text.problem import Problem
from orbax_t5x.text.table import wrapped
from orbax_t5x.text.wording import counted, leaves_text, plain, with_full_stop

MOST_LINES = 56
# Entries of all kinds together, where no kind has fewer than three.
_MOST_ENTRIES = 20
# Messages of this length are read; longer ones are lists of names.
_MOST_CHARACTERS = 600
# A fix of this length is repeated, and one of this on one line; longer code has a line for each literal.
_SHORT_FIX = 100
_LONGEST_FIX = 300
_AS_ABOVE = "as above"
_CODE_INDENT = "  "
_CODE = re.compile(r"(?:transforms|fallback_for)=\[")


@dataclasses.dataclass(slots=True)
class ProblemGroup:
    """Problems with a common kind, message and fix, and folded leaves."""

    first: Problem
    kind: str
    message: str
    fix: str
    leaves: list[Folded]
    count: int

    def sentence(self, most_characters: int | None) -> str:
        """Returns the message after the leaf or the number of leaves."""
        labels = [plain(row.label) for row in self.leaves]
        where = f"{labels[0]}: " if len(labels) == 1 else f"{leaves_text(self.count)}: " if labels else ""
        return with_full_stop(where + _cut_text(self.message, most_characters))

    def lines(
        self, width: int | None, most_leaves: int, most_characters: int | None, shown_fixes: set[str]
    ) -> list[str]:
        """Returns the message and the fix; a long one only once, of which `shown_fixes` takes note."""
        labels = [plain(row.label) for row in self.leaves]
        text = f"[{self.kind}] {self.sentence(most_characters)}"
        first, *others = map(plain, text.splitlines())
        lines = wrapped(first, width, rest="  ")
        lines += [line for other in others for line in wrapped(other, width, "  ", "  ")]
        fix = _AS_ABOVE if self.fix in shown_fixes else self.fix
        lines += _fix_lines(f"Fix: {plain(fix)}", width) if fix else []
        shown_fixes.update([self.fix] if len(self.fix) > _SHORT_FIX else [])
        if len(labels) > 1:
            lines += [f"    {label}" for label in labels[:most_leaves]]
            left = sum(len(row.members) for row in self.leaves[most_leaves:])
            lines += [f"    … and {leaves_text(left)} more"] if left and most_leaves else []
        return lines


def problem_lines(
    problems: Sequence[Problem],
    *,
    width: int | None = None,
    all_in: str = "`.problems`",
    fix_text: Callable[[Fix], str] = str,
) -> list[str]:
    """Returns fewer than `MOST_LINES` lines for people."""
    entries_of: dict[str, list[ProblemGroup]] = {}
    for entry in problem_groups(problems, fix_text):
        entries_of.setdefault(entry.kind, []).append(entry)
    # The message of a single problem is shown whole: there is nothing that it could hide.
    most_characters = None if len(problems) == 1 else _MOST_CHARACTERS
    lines: list[str] = []
    for most_entries, most_leaves in ((max(3, _MOST_ENTRIES // max(1, len(entries_of))), 6), (3, 3), (1, 1), (1, 0)):
        lines, shown_fixes = [], set[str]()
        for kind, entries in entries_of.items():
            for entry in entries[:most_entries]:
                lines += entry.lines(width, most_leaves, most_characters, shown_fixes)
            if left := sum(entry.count for entry in entries[most_entries:]):
                lines.append(f"… and {counted(left, 'problem')} more of kind [{kind}]: see {all_in}")
        if len(lines) < MOST_LINES:
            return lines
        lines = _with_short_code(lines)
        if len(lines) < MOST_LINES:
            return lines
    return [*lines[: MOST_LINES - 2], f"… and more: see {all_in}"]


def problem_groups(problems: Sequence[Problem], fix_text: Callable[[Fix], str] = str) -> Collection[ProblemGroup]:
    """Groups problems that differ in a leaf's origin or name."""
    texts = [(one.leaf or "", one.message.removesuffix(one.source), one.source) for one in problems]
    folded = fold(texts, [one.kind for one in problems])
    entries: dict[Hashable, ProblemGroup] = {}
    for row in folded:
        first = problems[row.members[0]]
        fix = first.fix
        _, message, source = row.texts
        entry = entries.get((first.kind, message, fix))
        if entry is None:
            text = "" if fix is None else fix_text(fix)
            entry = ProblemGroup(first, first.kind, message + source, text, [], 0)
            entries[first.kind, message, fix] = entry
        elif entry.message != message + source:
            entry.message = message
        entry.count += len(row.members)
        if first.leaf:
            entry.leaves.append(row)
    return entries.values()


def _fix_lines(text: str, width: int | None) -> list[str]:
    """Returns the lines of a fix; code that is too long for one stands below, and is never cut."""
    code = _CODE.search(text) if len(text) > min(_LONGEST_FIX, width or _LONGEST_FIX) else None
    if code is None:
        return wrapped(text, width, "  ", "  ")
    start = code.start()
    first, *others = code_lines(text[start:], _CODE_INDENT)
    last = _fix_lines(others.pop().lstrip(), width) if others else []
    return [f"  {text[:start]}{first.lstrip()}", *others, *last]


def _with_short_code(lines: list[str]) -> list[str]:
    """Joins the lines of each code again."""
    joined: list[str] = []
    for line in lines:
        if joined and _is_code(joined[-1]):
            joined[-1] += line.lstrip()
        else:
            joined.append(line)
    return joined


def _is_code(line: str) -> bool:
    return _CODE.search(line) is not None and line.rstrip()[-1:] in tuple("[({,")


def _cut_text(text: str, most_characters: int | None) -> str:
    left = 0 if most_characters is None else len(text) - most_characters
    return text if left <= 0 else f"{text[:most_characters]}… ({left:,} characters more)"
