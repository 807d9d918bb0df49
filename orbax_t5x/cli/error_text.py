"""The text of an error for standard error: the library's own, with this program's options for its keywords."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable

from orbax_t5x.cli.fixes import options_for
from orbax_t5x.errors import CheckpointError, Fix, Problem, RestorePlanError, problems_heading
from orbax_t5x.text.problem_lines import problem_lines
from orbax_t5x.text.table import terminal_width
from orbax_t5x.text.wording import plain

_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_RULE = rf"\((?P<rule>{_TEXT}), (?P<name>{_TEXT})\)"
_ASSIGNMENT = rf"ot\.transforms\.AssignmentMap\(\[{_RULE}\]\)"


def _transforms(match: re.Match[str]) -> str:
    chain = match[1] if match[1].startswith("[") else f"[{match[1]}]"
    return options_for(chain) or match[0]


def _rule(match: re.Match[str]) -> str:
    """A rule in Python's words as a line of the file of rules."""
    pattern, replacement = match["rule"], match["name"]
    return json.dumps([ast.literal_eval(pattern), ast.literal_eval(replacement)], ensure_ascii=False)


# What the library says to programmers, and what that is called here; the first that fits a text is applied first.
_OPTIONS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), option)
    for pattern, option in (
        (r"(?:add|pass) transforms=(\[.*\])", _transforms),
        (r"leave Translate out where", "pass --no-translate where"),
        (r"overwrite=True replaces it", "--overwrite replaces it"),
        (r'pass on_unsupported="skip"', "pass --on-unsupported skip"),
        (rf"pass dtype={_TEXT} for the model's parameters, or ", "pass "),
        (r"allow_lossy_cast=True", "--allow-lossy-cast"),
        (
            r"strict=False leaves (\w+) unread; ot\.transforms\.Drop\(pattern\) says so in the rules",
            r"--no-strict leaves \1 unread",
        ),
        (rf"map it with ({_ASSIGNMENT})", _transforms),
        (rf"write the rule as {_RULE}", lambda match: f"write the rule as {_rule(match)}"),
        (r"; None in its place leaves the leaf to fallback= values", ""),
        (r"put None in the target there, or give fallback= values", "choose another --target"),
        (r"give fallback= values, or put \.\.\. in the target to leave it out", "choose another --target"),
        (r"; or pass require_all_rules_match=False", ""),
        (r"is_resuming=False", "--resuming no"),
        (r"is_resuming=True", "--resuming yes"),
        (r"item=(?=')", "--item "),
        (r"item=", "--item"),
    )
)
# What has no option here can be done in a program.
_PYTHON = re.compile(r"\bot\.\w|\b[a-z_]+=(?=[\w'\"(\[{. ]|$)|\b(?:Reshape|Transpose|Split)\b")
# Dimensions of a pack look like keywords.
_RULE_PACK = re.compile(r"--rules \S+")


def error_text(error: CheckpointError) -> str:
    """The text of an error; problems that are alike are one entry."""
    if not isinstance(error, RestorePlanError) or not error.problems:
        return plain_lines(_with_options(str(error)))
    where = "" if error.path is None else f"{error.path}: "
    problems = [problem_with_options(problem) for problem in error.problems]
    lines = problem_lines(problems, width=terminal_width(), all_in="`plan --json`")
    return plain_lines("\n".join([where + problems_heading(problems), *lines]))


def plain_lines(text: str) -> str:
    """A text without what a terminal obeys, in its lines."""
    return "\n".join(plain(line) for line in text.splitlines())


def problem_with_options(problem: Problem) -> Problem:
    """The problem with a fix that this program's user can follow, or that says it needs Python."""
    fix = None if problem.fix is None else _with_options(str(problem.fix))
    if fix is not None and _PYTHON.search(_RULE_PACK.sub("", fix)):
        fix = f"in Python, {fix}"
    return dataclasses.replace(problem, message=_with_options(problem.message), fix=None if fix is None else Fix(fix))


def _with_options(text: str) -> str:
    for pattern, option in _OPTIONS:
        text = pattern.sub(option, text)
    return text
