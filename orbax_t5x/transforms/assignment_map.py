"""T5X's assignment map: rules from target names to checkpoint names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix
from orbax_t5x.transforms.base import FollowingOnRequest, Given
from orbax_t5x.transforms.by_rules import note_unused
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.patterns.table import (
    Rule,
    expand,
    expand_match,
    pattern_text,
    rule_table,
    rule_text,
    rule_tuple,
)
from orbax_t5x.trees.flat import FlatState

# T5X lists every name of the checkpoint. Up to here so do we; beyond it the text would hide the rest of the error.
_LISTED_NAMES = 200
# Looking for close names scans the checkpoint, so only the first rules get it.
_EXPLAINED_NAMES = 10
_WORD = re.compile(r"[A-Za-z]+")


class _MissingParameter(NamedTuple):
    """A parameter that a rule asks for and the state dict lacks."""

    name: str
    wanted: str
    rule: Rule
    match: re.Match[str]


@dataclasses.dataclass(frozen=True)
class AssignmentMap(FollowingOnRequest):
    r"""T5X's assignment map: rules from target names to checkpoint names.

    A rule is (pattern of target names, replacement). The replacement, with the groups of the match filled in, is
    the name in the state dict; None leaves the target leaf out. Target names without a rule keep the leaf of their
    own name. Leaves that no rule takes stay, unless a rule leaves out their name. Two targets may take one leaf,
    and rules may swap and rotate names.

    In a restore a leaf that nothing takes gives way to a rule that puts another under its name. Called by hand the
    result is T5X's: that leaf stays, the rule has no effect, and a warning is logged.

    Attributes:
      rules: pairs (regex, replacement or None); a regex must match a whole name.
      require_all_rules_match: whether a rule that decides nothing is an error.

    Example:
      >>> rename = ot.transforms.AssignmentMap([(r"decoder/(.*)", r"encoder/\1")])
      >>> rename({"encoder": {"w": 1}}, {"decoder": {"w": ...}})
      {'decoder': {'w': 1}}
    """

    rules: Given[Iterable[Rule], tuple[Rule, ...]]
    require_all_rules_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rule_tuple(self.rules, "AssignmentMap"))

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return self._assign(state, target, diagnostics, rules_win=True)

    def _by_hand(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        if self.follow:
            return super()._by_hand(state, target, diagnostics)
        return self._assign(state, target, diagnostics, rules_win=False)

    def _assign(
        self, state: FlatState, target: FlatState, diagnostics: Diagnostics, *, rules_win: bool
    ) -> dict[str, Any]:
        table = rule_table(tuple(pattern for pattern, _ in self.rules))
        texts = [rule_text("AssignmentMap", rule) for rule in self.rules]
        used: set[int] = set()
        left_out: set[str] = set()
        taken: set[str] = set()
        missing: list[_MissingParameter] = []
        new = NewState(diagnostics)
        for name in target:
            found = table.first(name)
            if found is None:
                if name in state:
                    new.put(name, state[name], name)
                    taken.add(name)
                continue
            index, match = found
            used.add(index)
            replacement = self.rules[index][1]
            if replacement is None:
                left_out.add(name)
                continue
            wanted = expand(match, replacement, texts[index], diagnostics)
            if wanted is None:
                continue
            if wanted in state:
                new.put(name, state[wanted], wanted, texts[index])
                taken.add(wanted)
            else:
                missing.append(_MissingParameter(name, wanted, self.rules[index], match))
        if missing and rules_win:
            _note_missing(missing, sorted(state), diagnostics)
        elif missing:
            _note_missing_by_hand(missing[0], sorted(state), diagnostics)
        self._note_unused(used, list(target), diagnostics)
        flat = new.finish()
        for name, value in state.items():
            if name in taken or name in left_out or (name in flat and rules_win):
                continue
            if name in flat:
                diagnostics.warnings.append(
                    f"AssignmentMap keeps the checkpoint's {name!r}, as T5X does: no rule takes it, so the rule for "
                    "its name has no effect"
                )
            flat[name] = value
        return flat

    def _note_unused(self, used: set[int], names: list[str], diagnostics: Diagnostics) -> None:
        patterns = tuple(pattern for pattern, _ in self.rules)
        used_patterns = {patterns[index] for index in used}
        unused = list(dict.fromkeys(pattern_text(pattern) for pattern in patterns if pattern not in used_patterns))
        if unused and self.require_all_rules_match:
            closest = ClosestNames(names)
            near = [f"{text!r}: {found}" for text in unused[:_EXPLAINED_NAMES] if (found := closest.to(text))]
            message = f"Unused patterns in `assignment_map`: {{{', '.join(map(repr, unused))}}}"
            text = "write patterns that match a whole target name that no earlier rule matches"
            fix = Fix(text + (f" (closest: {'; '.join(near)})" if near else ""))
            ways = Fix.any_of(fix, Fix.in_program("pass require_all_rules_match=False"))
            diagnostics.problem("unused_rule", None, message, ways)
        else:
            note_unused(
                rule_table(patterns), used, names, diagnostics, owner="AssignmentMap", required=False, what="the target"
            )


def _note_missing(missing: Sequence[_MissingParameter], names: Sequence[str], diagnostics: Diagnostics) -> None:
    """Records a problem for each rule that asks for absent leaves."""
    closest = ClosestNames(names)
    by_rule: dict[Rule, list[_MissingParameter]] = {}
    for one in missing:
        by_rule.setdefault(one.rule, []).append(one)
    for count, (rule, found) in enumerate(by_rule.items()):
        near = closest.to(found[0].wanted) if count < _EXPLAINED_NAMES else []
        others = "" if len(found) == 1 else f", nor do {len(found) - 1:,} others that the rule asks for"
        message = (
            f"{rule_text('AssignmentMap', rule)}: parameter {found[0].wanted!r} does not exist in restore checkpoint"
        )
        message += others + (f"; closest: {', '.join(near)}" if near else "")
        leaf = found[0].name if len(found) == 1 else None
        diagnostics.problem("missing", leaf, message, _corrected_rule(found, near, frozenset(names)))
        diagnostics.explained.update(one.name for one in found)


def _note_missing_by_hand(missing: _MissingParameter, names: Sequence[str], diagnostics: Diagnostics) -> None:
    """Records T5X's text with every name."""
    near = ClosestNames(names).to(missing.wanted)
    shown = list(names) if len(names) <= _LISTED_NAMES else [*names[:_LISTED_NAMES], f"… {len(names)} in all"]
    message = f"Parameter {missing.wanted!r} does not exist in restore checkpoint. Must be one of: {shown}"
    diagnostics.problem("missing", missing.name, message, _corrected_rule([missing], near, frozenset(names)))


def _corrected_rule(missing: Sequence[_MissingParameter], near: Sequence[str], names: frozenset[str]) -> Fix:
    """Suggests a correction of a rule."""
    pattern, replacement = pattern_text(missing[0].rule[0]), missing[0].rule[1]
    assert replacement is not None  # a rule with None asks for nothing
    mended = _corrected_template(replacement, [one.match for one in missing], near, names)
    if mended is not None:
        return Fix.writing(pattern, mended)
    closest = f" (closest: {', '.join(near)})" if near and len(missing) == 1 else ""
    return Fix.any_of(
        Fix(f"correct the replacement {replacement!r}{closest}"),
        Fix.setting("write None in its place and give {} values for the leaf", fallback=...),
    )


def _corrected_template(
    template: str, matches: Sequence[re.Match[str]], closest: Iterable[str], names: Collection[str]
) -> str | None:
    """Corrects a template's only word that no match finds."""
    words = _WORD.findall(expand_match(matches[0], template))
    found: set[str] = set()
    for name in closest:
        wanted = _WORD.findall(name)
        changed = {(word, other) for word, other in zip(words, wanted, strict=False) if word != other}
        if len(words) != len(wanted) or len(changed) != 1:
            continue
        word, other = changed.pop()
        # No letter before or after, and no group's number or name: `\\g<word>` stays.
        mended = re.sub(rf"(?<![A-Za-z\\<]){word}(?![A-Za-z>])", other, template)
        if mended != template and all(expand_match(match, mended) in names for match in matches):
            found.add(mended)
    return found.pop() if len(found) == 1 else None
