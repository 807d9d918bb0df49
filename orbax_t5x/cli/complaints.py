"""What went wrong, for standard error: the library's own texts, with this program's options for its keywords."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from orbax_t5x.errors import CheckpointError, Problem, RestorePlanError
from orbax_t5x.text.fold import fold
from orbax_t5x.text.table import terminal_width
from orbax_t5x.text.wording import counted, leaves_text, plain

# What the library tells programmers to pass, and what that is called here.
_OPTIONS = (
    ("add transforms=[ot.transforms.Translate()]", "pass --translate"),
    ("leave Translate out where", "pass --no-translate where"),
    ("overwrite=True replaces it", "--overwrite replaces it"),
    ('pass on_unsupported="skip"', "pass --on-unsupported skip"),
    ("allow_lossy_cast=True", "--allow-lossy-cast"),
    ("strict=False leaves", "--no-strict leaves"),
)
# More than this scroll the first one away; `plan --json` has them all.
_SHOWN_GROUPS = 12
_SHOWN_NAMES = 8


def complaint(error: CheckpointError) -> str:
    """The text of an error; of many problems those of repeated layers are one."""
    text = _problems_text(error) if isinstance(error, RestorePlanError) and error.problems else str(error)
    lines = "\n".join(plain(line) for line in text.splitlines())
    for keyword, option in _OPTIONS:
        lines = lines.replace(keyword, option)
    return lines


def _problems_text(error: RestorePlanError) -> str:
    problems = error.problems
    where = "" if error.path is None else f"{error.path}: "
    lines = [f"{where}{counted(len(problems), 'problem')} between the checkpoint, the transforms and the target"]
    groups = _groups(problems)
    for group in groups[:_SHOWN_GROUPS]:
        lines += _group_lines(group)
    left = sum(row.leaves for group in groups[_SHOWN_GROUPS:] for row in group)
    return "\n".join([*lines, f"… and {counted(left, 'problem')} more"] if left else lines)


class _Row(NamedTuple):
    """Problems that differ in the number of a layer alone: the first of them, and what to call them."""

    problem: Problem
    label: str
    message: str
    leaves: int


def _groups(problems: Sequence[Problem]) -> list[list[_Row]]:
    """Rows with the same message, whose fixes differ in the leaf's name alone."""
    folded = fold([(one.leaf or "", one.message) for one in problems], [one.kind for one in problems])
    groups: dict[tuple[str, str, str], list[_Row]] = {}
    for row in folded:
        problem = problems[row.members[0]]
        fix = problem.fix
        for name in (re.escape(problem.leaf), problem.leaf) if problem.leaf else ():
            fix = fix.replace(name, "")
        label = row.label if problem.leaf else ""
        groups.setdefault((problem.kind, row.texts[1], fix), []).append(
            _Row(problem, label, row.texts[1], len(row.members))
        )
    return list(groups.values())


def _group_lines(group: Sequence[_Row]) -> list[str]:
    first = group[0]
    count = sum(row.leaves for row in group)
    what = f"{leaves_text(count)}: " if first.label and len(group) > 1 else f"{first.label}: " if first.label else ""
    lines = _wrapped(f"[{first.problem.kind}] {what}{first.message}", "- ", "  ")
    if len(group) > 1:
        lines += [f"    {row.label}" for row in group[:_SHOWN_NAMES]]
        left = sum(row.leaves for row in group[_SHOWN_NAMES:])
        lines += [f"    … and {left} more"] if left else []
    if first.problem.fix:
        which = "fix" if count == 1 else "fix, for the first"
        lines += _wrapped(f"{which}: {first.problem.fix}", "  ", "    ")
    return lines


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        terminal_width(),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
