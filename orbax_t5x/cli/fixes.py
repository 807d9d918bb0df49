"""Fixes as options of the command line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orbax_t5x.cli.rule_packs import AUTO
from orbax_t5x.rules import RulePack
from orbax_t5x.rules.finding import Answers
from orbax_t5x.rules.pack import PackCall
from orbax_t5x.text.fix import Fix
from orbax_t5x.transforms import AssignmentMap, Translate

_OTHER_TARGET = "choose another --target"
# The option for each keyword argument that has one, by the value to set.
_OPTIONS: Mapping[str, Callable[[Any], str | None]] = {
    "strict": lambda value: None if value else "--no-strict",
    "allow_lossy_cast": lambda value: "--allow-lossy-cast" if value else None,
    "is_resuming": lambda value: f"--resuming {'yes' if value else 'no'}",
    "overwrite": lambda value: "--overwrite" if value else None,
    "on_unsupported": lambda value: f"--on-unsupported {value}",
    "item": lambda value: "--item" if value is ... else f"--item {value}",
    "transforms": lambda value: _option_of_transforms(value),
}


def _option_of_transforms(value: Any) -> str | None:
    if isinstance(value, Answers):
        # The option's first sign ends the source's name.
        return None if any("=" in old for old, _ in value.given) else given_options(value.given)
    return f"--rules {AUTO}" if value == AUTO else None if value else "--no-translate and no rules"


def given_options(answers: Iterable[tuple[str, str]]) -> str:
    """Returns answers as options."""
    return shlex.join(part for old, new in answers for part in ("--given", f"{old}={new}"))


def fix_text(fix: Fix) -> str:
    """Returns the text of a fix."""
    texts = [text for way in fix.ways if (text := _way_text(way)) is not None]
    return ", or ".join(dict.fromkeys(texts)) if texts else f"in Python, {fix.text}"


def _way_text(way: Fix) -> str | None:
    """Returns the text of a fix without alternatives, or None."""
    given = way.arguments.get("transforms")
    transforms = given if isinstance(given, tuple) else way.transforms
    if transforms:
        is_all = way.arguments.keys() <= {"transforms"}
        return _transforms_text(transforms) if is_all else None
    if way.arguments:
        options = [_OPTIONS.get(name, lambda _: None)(value) for name, value in way.arguments.items()]
        return None if None in options else way.words.replace("{}", " ".join(filter(None, options)))
    if way.removed is not None:
        return f"pass --no-translate {way.words}" if way.removed == Translate() else None
    if way.rule is not None:
        return f"write the rule as {_rule_text(way.rule)}"
    return {"anywhere": way.text, "program": None, "target": _OTHER_TARGET}[way.scope]


def _transforms_text(transforms: tuple[Any, ...]) -> str | None:
    """Returns the options for transforms, or None."""
    texts = [_transform_text(transform) for transform in transforms]
    return None if None in texts else " and ".join(filter(None, texts))


def _transform_text(transform: Any) -> str | None:
    call = transform.call if isinstance(transform, RulePack) else None
    if transform == Translate():
        return "pass --translate"
    if call is not None:
        return f"pass --rules {_pack_text(call)}"
    if isinstance(transform, AssignmentMap) and transform.require_all_rules_match:
        rules = [_rule_text(rule) for rule in transform.rules]
        return f"give the {'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)} by --map"
    return None


def _pack_text(call: PackCall) -> str:
    """Writes a rule pack as `--rules` takes it."""
    given = ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in call.arguments
    )
    return f"{call.function}{f':{given}' if given else ''}{':inverse' if call.is_inverse else ''}"


def _rule_text(rule: tuple[Any, str | None]) -> str:
    """Returns a rule as a line of the file of rules."""
    pattern, replacement = rule
    return json.dumps(
        [pattern.pattern if isinstance(pattern, re.Pattern) else pattern, replacement], ensure_ascii=False
    )
