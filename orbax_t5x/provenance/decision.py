"""Decides which of the given rules are applied to a state, by the rules that it has behind it.

With the recorded rules R and the given rules G, and the rest of G after its longest beginning that R ends with:

| R and G | what happens |
|---|---|
| no record, or a record of no rules | G is applied |
| a rule of the rest is in R, too; or R has rules and a rule on either side has no digest | a problem |
| else | the rest is applied |

The rules of a named source are compared with what R holds of that source. A rule is "in R" with an equal digest, under
the name of its migration, or as another rule of its class with one of its patterns: an edited rule. An unrecorded
state is a rule without a digest, but asks only if there is a rest. `is_resuming` answers in every row. A start is
asked less: a step of another writer is resumed as it is, and an answer counts only where there is a problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.provenance.records import Entry, Lineage, has_unrecorded, is_unrecorded, text_of, union
from orbax_t5x.provenance.steps import RuleStep
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed

_SHOWN_RULES = 12
_APPLIED = Fix.setting("pass {} (the state has all of them: nothing is applied)", is_resuming=True)
_NOT_APPLIED = Fix.setting("pass {} (the state has none of them: all are applied)", is_resuming=False)
_AT_THE_END = Fix(
    "give the source's rules as they were recorded, and what follows at the end of transforms=, by the state's names"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """Rules that are applied, and what is behind the state then.

    Attributes:
      lineage: rules behind the restored state.
      skipped: positions of the given rules that are not applied.
      is_resuming: whether no given rule is applied.
      problem: message and fix if only the caller can decide, or None.
      note: what was applied before, or "".
    """

    lineage: Lineage = ()
    skipped: Collection[int] = frozenset()
    is_resuming: bool = False
    problem: tuple[str, Fix] | None = None
    note: str = ""


class _Rule(NamedTuple):
    """Given rule: its entry, and its position among the given ones."""

    entry: Entry
    position: int


def decide(
    record: Lineage | None,
    steps: Sequence[RuleStep],
    *,
    is_resuming: bool | None = None,
    has_fallback: bool = False,
    is_start: bool = False,
) -> Decision:
    """Decides which rules are applied to a state.

    Args:
      record: rules that the state has behind it; None without a record.
      steps: the given rules; the placeholder of `"auto"` stands for the recorded rules that `"auto"` found.
      is_resuming: the caller's answer.
      has_fallback: whether missing leaves are filled.
      is_start: whether a run of its own goes on (`restore_or_initialize`).
    """
    if record is None and is_start:
        return _decide_for_other_writer(steps)
    assumed = tuple(step.entry for step in steps if step.is_assumed)
    if assumed and (record is None or (has_unrecorded(record) and not any("name" in entry for entry in record))):
        record = assumed
    lineage = record or ()
    decision = _decide_by_record(lineage, steps)
    if is_resuming is None and not has_fallback and all(step.only_selects for step in steps):
        decision = decision if decision.problem is None else _applied(lineage, steps, ())
    if is_resuming is None or (is_start and decision.problem is None):
        return decision
    given = tuple(step.entry for step in steps)
    if is_resuming:
        is_known = bool(given) and lineage[-len(given) :] == given
        return Decision(lineage if is_known else (*lineage, *given), range(len(steps)), True)
    return _applied(lineage, steps, [position for position, step in enumerate(steps) if step.is_placeholder])


def _decide_for_other_writer(steps: Sequence[RuleStep]) -> Decision:
    skipped = [position for position, step in enumerate(steps) if not step.name or step.is_assumed]
    return Decision(tuple(step.entry for step in steps), skipped, len(skipped) == len(steps))


def _decide_by_record(lineage: Lineage, steps: Sequence[RuleStep]) -> Decision:
    """Decides the rules of each source by the table."""
    skipped = set(range(len(steps)))
    for source in dict.fromkeys(step.source for step in steps):
        comparison = _RuleComparison(lineage, [(at, step) for at, step in enumerate(steps) if step.source == source])
        problem = comparison.problem(source)
        if problem is not None:
            return Decision(lineage, problem=problem)
        skipped.difference_update(rule.position for rule in comparison.rest)
    decision = _applied(lineage, steps, skipped)
    if not lineage:
        return decision
    before = listed(map(text_of, lineage), _SHOWN_RULES, separator="; ")
    note = f"applied to this state before: {before}"
    if skipped:
        note = f"{len(skipped)} of {len(steps)} rules are not applied again (is_resuming=False applies all); {note}"
    return dataclasses.replace(decision, note=note)


def _applied(lineage: Lineage, steps: Sequence[RuleStep], skipped: Collection[int]) -> Decision:
    applied = tuple(step.entry for position, step in enumerate(steps) if position not in skipped)
    return Decision((*lineage, *applied), skipped, bool(steps) and not applied)


class _RuleComparison:
    """Comparison of a source's given rules with the recorded rules.

    Attributes:
      rest: the given rules after the longest beginning with which the record ends.
    """

    def __init__(self, lineage: Lineage, steps: Sequence[tuple[int, RuleStep]]):
        source = steps[0][1].source
        self._lineage = lineage
        self._steps = dict(steps)
        self._recorded = [entry for entry in lineage if _is_of(entry, source)]
        unrecorded = [position for position, entry in enumerate(self._recorded) if is_unrecorded(entry)]
        self._is_unrecorded = bool(unrecorded)
        self._known = self._recorded[unrecorded[-1] + 1 :] if unrecorded else self._recorded
        self._given = [_Rule(entry, position) for position, step in steps for entry in self._entries(step)]
        self._count = self._beginning()
        # What "auto" found is behind the state wherever it stands in the record.
        remaining = self._given[self._count :]
        self.rest = [rule for rule in remaining if not (self._is_placeholder(rule) and rule.entry["digest"])]
        # A rule of all leaves may have been applied before as one of a source.
        compared = self._recorded if source else lineage
        self._repeated = [rule for rule in self.rest if self._is_in(rule.entry, compared)]
        # Rules of the recorded end are given, too: what follows them is no edited form of them.
        end = self._known[len(self._known) - self._count :]
        earlier = [entry for entry in compared if not any(entry is known for known in end)]
        self._new = [rule for rule in self.rest if not self._is_in(rule.entry, earlier)]

    def _entries(self, step: RuleStep) -> list[Entry]:
        """Returns the entry of a rule; of `"auto"`, those that it found the last time."""
        if not step.is_placeholder:
            return [step.entry]
        found: list[Entry] = []
        for entry in reversed(self._known):
            if "auto" in entry:
                found.insert(0, entry)
            elif found:
                break
        return [{**step.entry, "digest": None}] if self._is_unrecorded and not found else found

    def _is_placeholder(self, rule: _Rule) -> bool:
        return self._steps[rule.position].is_placeholder

    def _beginning(self) -> int:
        for count in range(min(len(self._known), len(self._given)), 0, -1):
            pairs = zip(self._known[-count:], self._given, strict=False)
            if all(_is_same(entry, rule.entry) for entry, rule in pairs):
                return count
        return 0

    def _is_in(self, rule: Entry, recorded: Iterable[Entry]) -> bool:
        """Returns True if a rule was applied before, as it is or edited."""
        for entry in recorded:
            if "name" in rule and "name" in entry:
                if entry["name"] == rule["name"]:
                    return True
                if self._count:  # names tell apart what follows the recorded migrations
                    continue
            if entry.get("digest") and entry["digest"] == rule["digest"]:
                return True
            if not set(entry.get("patterns", ())).isdisjoint(rule.get("patterns", ())):
                return True
        return False

    def problem(self, source: str) -> tuple[str, Fix] | None:
        """Returns message and fix if only the caller can decide."""
        entries = [*self._known, *(rule.entry for rule in self._given)]
        ways = [_APPLIED, _NOT_APPLIED]
        if self._is_unrecorded and self.rest:
            message = "nothing records what was applied to this state before it was saved"
        elif self._recorded and self._given and any(entry["digest"] is None for entry in entries):
            message = (
                "rules were applied to this state before, and a lambda, a closure, a callable object or much data "
                "cannot be compared with them"
            )
        elif self._repeated:
            message, ways = "rules given were applied to this state before, in another order or form", [_APPLIED]
        elif source and self.rest and any("source" not in entry for entry in self._lineage):
            message, ways = f"rules of all leaves were applied after those of the source {source!r}", [_AT_THE_END]
        else:
            return None
        return f"{message}; {self._side_by_side()}", Fix.any_of(*self._new_rules(), *ways)

    def _new_rules(self) -> list[Fix]:
        """Returns the fix that applies only the rules that the record lacks, if it is certain."""
        new = [self._steps[rule.position] for rule in self._new]
        is_certain = bool(new) and (self._count or self._repeated) and all(step.entry["digest"] for step in new)
        if not is_certain or any(step.source or step.name or step.is_placeholder for step in new):
            return []
        transforms = [step.transform for step in new]
        return [Fix.setting("pass {} (only those that the record lacks)", transforms=transforms, is_resuming=False)]

    def _side_by_side(self) -> str:
        recorded = [text_of(entry) for entry in self._recorded or self._lineage]
        given: list[str] = []
        for number, rule in enumerate(self._given):
            text = text_of(rule.entry)
            if rule.entry["digest"] is None:
                text += " (cannot be compared)"
            elif rule in self._repeated:
                is_equal = any(entry.get("digest") == rule.entry["digest"] for entry in self._lineage)
                text += " (in the record)" if is_equal else " (in the record, edited)"
            else:
                text += " (the record ends with it)" if number < self._count else " (new)"
            given.append(text)
        lists = [listed(rows, _SHOWN_RULES, separator="; ") for rows in (recorded, given)]
        return f"recorded: [{lists[0]}], given: [{lists[1]}]"


def _is_of(entry: Entry, source: str) -> bool:
    return entry.get("source", "") == source or (is_unrecorded(entry) and "source" not in entry)


def _is_same(recorded: Entry, given: Entry) -> bool:
    """Returns True if a recorded rule is the given one; a plain list may have become migrations."""
    if recorded["digest"] is None or recorded["digest"] != given["digest"]:
        return False
    return recorded.get("name") == given.get("name") or not {"name"} <= recorded.keys() & given.keys()


def combine_decisions(records: Mapping[str, Lineage | None], decisions: Mapping[str, Decision]) -> Decision:
    """Combines the decisions for the items of a step."""
    first, *others = decisions.values()
    if not others:
        return first
    if len({(decision.problem is None, tuple(decision.skipped)) for decision in decisions.values()}) > 1:
        message = f"the items {', '.join(map(repr, decisions))} have differing records of what was applied to them"
        return Decision(problem=(message, Fix.setting("restore one item at a time with {}", item=...)))
    added = first.lineage[len(next(iter(records.values())) or ()) :]
    notes = dict.fromkeys(decision.note for decision in decisions.values() if decision.note)
    return dataclasses.replace(first, lineage=(*union(records.values()), *added), note="; ".join(notes))
