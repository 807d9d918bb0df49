"""Compares a list of rules with the rules that a lineage records.

A record may be read in several ways: after a rule was applied that somebody inserted into the list, and after an answer
that other rules had been applied already. The list is compared with each reading. Entries of the format before have one
digest for the whole of their rules; a part of the list has those rules if it has that digest.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from orbax_t5x.provenance.chains import RuleRecord, Rules, digest_of_rules
from orbax_t5x.provenance.records import Entry, Lineage, applied_rules, is_unrecorded, recorded_texts

Relation = Literal["nothing recorded", "equal", "prefix", "apart", "differs", "unrecorded", "opaque"]
"""Relation of a list to a record: `prefix` where it begins with what is recorded, `apart` without a rule in common,
`opaque` where a rule has no digest, `differs` for all else."""


class _RecordReading(NamedTuple):
    """Way to read a record.

    Attributes:
      parts: rules that were applied in order; all but the first were inserted into the list.
      is_sure: false if rules were applied before that nobody recorded.
    """

    parts: tuple[Rules, ...] = ((),)
    is_sure: bool = True

    def rules(self) -> Rules:
        return tuple(itertools.chain(*self.parts))

    def and_then(self, rules: Rules, *, is_inserted: bool) -> _RecordReading:
        """Returns the reading with rules that were applied after its own."""
        is_inserted &= bool(self.parts[0])
        parts = (*self.parts, rules) if is_inserted else (self.parts[0] + rules, *self.parts[1:])
        return self._replace(parts=parts)

    def begins(self, chain: Rules) -> bool:
        """Tests if a list begins with the rules.

        Inserted rules may stand anywhere among them.
        """
        digests, head = _digests(self.rules()), _digests(chain[: len(self.rules())])
        if None in digests or collections.Counter(digests) != collections.Counter(head):
            return False
        return digests == head if len(self.parts) == 1 else all(is_part(_digests(part), head) for part in self.parts)


class HistoryComparison(NamedTuple):
    """Result of a comparison.

    Attributes:
      relation: of the list to the record.
      applied: how many rules at the list's beginning were applied already; of an unrecorded state at least.
      recorded: the rules that the list was compared with; of an unrecorded state those applied since.
      is_reordered: whether they were applied in another order.
    """

    relation: Relation
    applied: int = 0
    recorded: Rules = ()
    is_reordered: bool = False


def compare(lineage: Lineage, chain: Rules) -> HistoryComparison:
    """Compares given rules with a lineage's rules."""
    segments = [recorded_rules(entry, chain) for entry in lineage]
    everything = tuple(itertools.chain(*segments))
    gaps = [index for index, entry in enumerate(lineage) if is_unrecorded(entry)]
    if not everything and not gaps:
        return HistoryComparison("nothing recorded")
    readings = _readings(lineage, segments)
    # Longest first, those after a gap last.
    matches = sorted((one for one in readings if one.begins(chain)), key=lambda one: (-one.is_sure, -len(one.rules())))
    for one in matches:
        if len(one.rules()) == len(chain):
            return HistoryComparison("equal", len(chain), one.rules(), len(one.parts) > 1)
    if gaps and not any(one.is_sure for one in readings):
        applied = max((len(one.rules()) for one in matches), default=0)
        return HistoryComparison("unrecorded", applied, tuple(itertools.chain(*segments[gaps[-1] :])))
    if None in _digests((*chain, *everything)):
        return HistoryComparison("opaque")
    if matches and matches[0].is_sure:
        rules = matches[0].rules()
        others = collections.Counter(everything) - collections.Counter(rules)
        if not in_common(others, chain[len(rules) :]):
            return HistoryComparison("prefix", len(rules), rules, len(matches[0].parts) > 1)
    longest = max((one.rules() for one in readings if one.is_sure), key=len)
    return HistoryComparison("differs" if in_common(everything, chain) else "apart", 0, longest)


def recorded_rules(entry: Entry, chain: Rules) -> Rules:
    """Returns the rules of an entry.

    If it has only one digest for all, they are those of the chain with that digest.
    """
    steps = entry.get("steps")
    if steps is None:
        given, whole = applied_rules(entry), entry.get("digest")
        for first, last in itertools.combinations(range(len(chain) + 1), 2) if whole and given else ():
            part = chain[first:last]
            if part[0].texts[0] == given[0] and tuple(recorded_texts(part)) == given and digest_of_rules(part) == whole:
                return part
        # No rules of the chain.
        return tuple(RuleRecord((text,), whole and f"{whole}/{at}") for at, text in enumerate(given))
    # The format before has one digest for all rules of a source.
    of_sources = {rule.digest: rule for rule in chain if rule.source and rule.digest}
    return tuple(of_sources.get(rule.digest or "", rule) for rule in _rules_of_steps(steps, applied_rules(entry)))


def _rules_of_steps(steps: Iterable[Any], texts: Iterable[str]) -> Rules:
    left, rules = iter(texts), list[RuleRecord]()
    for step in steps:
        own, source = tuple(itertools.islice(left, step["rules"])), step.get("source", "")
        inner = tuple(RuleRecord((), digest) for digest in step.get("parts", ()))
        if source:
            inner = _rules_of_steps(step["steps"], [text.removeprefix(f"{source}: ") for text in own])
        rules.append(RuleRecord(own, step["digest"], step.get("name"), inner, source=source))
    return tuple(rules)


def _digests(rules: Iterable[RuleRecord]) -> list[str | None]:
    return [rule.digest for rule in rules]


def is_part(rules: Sequence[Any], of: Sequence[Any]) -> bool:
    """Tests if rules stand in a longer list in their order."""
    others = iter(of)
    return None not in rules and all(rule in others for rule in rules)


def _readings(lineage: Lineage, segments: Sequence[Rules]) -> list[_RecordReading]:
    readings, is_sure = [_RecordReading()], True
    for entry, rules in zip(lineage, segments, strict=True):
        if is_unrecorded(entry):
            readings, is_sure = [], False
            continue
        if not rules:
            continue
        alone = _RecordReading((rules,))
        if entry.get("is_resuming"):
            readings = [*(one for one in readings if one.rules()), alone]
            continue
        is_inserted = entry.get("is_resuming") is False
        readings = [one.and_then(rules, is_inserted=is_inserted) for one in readings]
        # An answer that the rules are to be applied is one about all that was applied before.
        begun = alone._replace(is_sure=is_sure or is_inserted)
        if not entry.get("continues") and begun not in readings:
            readings.append(begun)
    return readings


def in_common(some: Iterable[RuleRecord], others: Iterable[RuleRecord]) -> bool:
    """Tests if both have a rule, by digest or text.

    By text, since an edited rule is in no other list.
    """
    return not _marks(some).isdisjoint(_marks(others))


def _marks(rules: Iterable[RuleRecord]) -> set[str]:
    return {mark for rule in rules for mark in (rule.digest, *rule.texts, *_marks(rule.inner)) if mark is not None}
