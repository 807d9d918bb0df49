"""T5X's assignment map: rules on target names say which leaf of the checkpoint each gets."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.patterns.table import Rule, expand, pattern_text, rule_table, rule_text, rule_tuple
from orbax_t5x.transforms.patterns.unused import note_unused
from orbax_t5x.transforms.state import NewState
from orbax_t5x.trees.flat import FlatState

# T5X lists every name of the checkpoint. Up to here so do we; beyond it the text would hide the rest of the error.
_LISTED_NAMES = 200
# Looking for close names scans the checkpoint, so only the first missing ones get it.
_EXPLAINED_NAMES = 10


@dataclasses.dataclass(frozen=True)
class AssignmentMap(Transform):
    """T5X's assignment map: for every target name the first rule that matches it says which checkpoint leaf it gets.

    A rule is (pattern of target names, replacement). The replacement, with the groups of the match filled in, is
    the name in the state dict; None leaves the target leaf out. Target names without a rule keep the leaf of their
    own name. Leaves that no rule takes stay, unless a rule leaves out their name. Two targets may take one leaf,
    and rules may swap and rotate names.

    In a restore a leaf that nothing takes gives way to a rule that puts another under its name. Called by hand the
    answer is T5X's: that leaf stays and the rule has no effect.

    Attributes:
      rules: pairs (regex, replacement or None); a regex must match a whole name.
      require_all_rules_match: whether a rule that decides nothing is an error.
    """

    rules: tuple[Rule, ...]
    require_all_rules_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rule_tuple(self.rules, "AssignmentMap"))

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        return self._assign(state, target, diagnostics, rules_win=True)

    def _by_hand(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return self._assign(state, target, diagnostics, rules_win=False)

    def _assign(
        self, state: FlatState, target: FlatState, diagnostics: Diagnostics, *, rules_win: bool
    ) -> dict[str, Any]:
        table = rule_table(tuple(pattern for pattern, _ in self.rules))
        texts = [rule_text("AssignmentMap", rule) for rule in self.rules]
        used: set[int] = set()
        left_out: set[str] = set()
        taken: set[str] = set()
        missing: list[tuple[str, str, Rule]] = []
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
                missing.append((name, wanted, self.rules[index]))
        self._note_missing(missing, state, diagnostics)
        self._note_unused(used, list(target), diagnostics)
        flat = new.finish()
        for name, value in state.items():
            if name not in taken and name not in left_out and not (name in flat and rules_win):
                flat[name] = value
        return flat

    def _note_missing(self, missing: list[tuple[str, str, Rule]], state: FlatState, diagnostics: Diagnostics) -> None:
        if not missing:
            return
        names = sorted(state)
        closest = ClosestNames(names)
        shown = names if len(names) <= _LISTED_NAMES else [*names[:_LISTED_NAMES], f"… {len(names)} in all"]
        for count, (name, wanted, rule) in enumerate(missing):
            near = closest.to(wanted) if count < _EXPLAINED_NAMES else []
            listed = f"Must be one of: {shown}" if count == 0 or len(names) <= _LISTED_NAMES else f"Closest: {near}"
            better = f"({re.escape(name)!r}, {near[0]!r})" if near else f"({re.escape(name)!r}, None)"
            diagnostics.problem(
                "missing",
                name,
                f"Parameter {wanted!r} does not exist in restore checkpoint. {listed}",
                f"{pattern_text(rule[0])!r} -> {rule[1]!r} asks for it; put the rule {better} before it"
                + (f", closest are {near}" if near else " to leave the leaf out"),
            )

    def _note_unused(self, used: set[int], names: list[str], diagnostics: Diagnostics) -> None:
        patterns = tuple(pattern for pattern, _ in self.rules)
        used_patterns = {patterns[index] for index in used}
        unused = list(dict.fromkeys(pattern_text(pattern) for pattern in patterns if pattern not in used_patterns))
        if unused and self.require_all_rules_match:
            closest = ClosestNames(names)
            near = [f"{text!r}: {found}" for text in unused[:_EXPLAINED_NAMES] if (found := closest.to(text))]
            diagnostics.problem(
                "unused_rule",
                None,
                f"Unused patterns in `assignment_map`: {{{', '.join(map(repr, unused))}}}",
                ("closest target names: " + "; ".join(near) + ". " if near else "")
                + "A pattern must match a whole target name that no earlier rule matches; or pass "
                "require_all_rules_match=False",
            )
        else:
            note_unused(
                rule_table(patterns), used, names, diagnostics, owner="AssignmentMap", required=False, what="the target"
            )
