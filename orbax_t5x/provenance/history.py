"""Compares a list of rules with the rules that a lineage records.

A record may be read in several ways: after a rule was applied that somebody inserted into the list, and after an answer
that other rules had been applied already. The list is compared with each reading. Entries of the format before have one
digest for the whole of their rules; a part of the list has those rules if it has that digest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.records import Entry, Lineage, applied_rules, is_unrecorded

Relation = Literal["nothing recorded", "equal", "prefix", "apart", "differs", "unrecorded", "opaque"]
"""Relation of a list to a record: `prefix` where it begins with what is recorded, `apart` without a rule in common,
`opaque` where a rule has no digest, `differs` for all else."""


class RecordedRule(NamedTuple):
    """Recorded rule; a migration has a name and its rules' digests."""

    texts: tuple[str, ...]
    digest: str | None
    name: str | None = None
    parts: tuple[str | None, ...] = ()


class Segment(NamedTuple):
    """Rules that were applied together.

    Attributes:
      rules: in order; without digests where `whole` is the digest of all.
      whole: the chain's digest in an entry of the format before, or None.
      is_inserted: whether the caller had them applied after later ones.
    """

    rules: tuple[RecordedRule, ...]
    whole: str | None = None
    is_inserted: bool = False

    @classmethod
    def of(cls, entry: Entry) -> Segment:
        """Makes the segment of an entry."""
        texts, steps = iter(applied_rules(entry)), entry.get("steps")
        inserted = entry.get("is_resuming") is False
        if steps is None:
            return cls(tuple(RecordedRule((text,), None) for text in texts), entry.get("digest"), inserted)
        rules: list[RecordedRule] = []
        for step in steps:
            own, parts = tuple(itertools.islice(texts, step["rules"])), tuple(step.get("parts", ()))
            rules.append(RecordedRule(own, step["digest"], step.get("name"), parts))
        return cls(tuple(rules), None, inserted)


class HistoryReading(NamedTuple):
    """Way to read a record.

    It is not `is_sure` if rules were applied before that nobody recorded.
    """

    segments: tuple[Segment, ...]
    is_sure: bool

    def rules(self) -> list[RecordedRule]:
        """Lists the rules in the order in which they were applied."""
        return [rule for segment in self.segments for rule in segment.rules]

    def matched(self, chain: ChainRecord) -> int | None:
        """Counts a list's first rules that match, or returns None.

        Inserted rules may stand anywhere among them in the list, in their order.
        """
        in_order = _matched_in_order(self.segments, chain)
        if in_order is not None:
            return in_order
        left = list(range(len(chain.steps)))
        for segment in self.segments:
            if segment.is_inserted:
                found = _found_in_order(segment, chain, left)
                if found is None:
                    return None
                left = [position for position in left if position not in found]
        main = [segment for segment in self.segments if not segment.is_inserted]
        count = _matched_in_order(main, ChainRecord(tuple(chain.steps[position] for position in left)))
        if count is None or len(main) == len(self.segments):
            return None
        taken = set(range(len(chain.steps))) - set(left[count:])
        return len(taken) if taken == set(range(len(taken))) else None


class HistoryComparison(NamedTuple):
    """Result of a comparison.

    Attributes:
      relation: of the list to the record.
      applied: how many rules at the list's beginning were applied already; of an unrecorded state at least.
      recorded: the rules of the reading that the list was compared with.
      is_reordered: whether they were applied in another order.
    """

    relation: Relation
    applied: int = 0
    recorded: tuple[RecordedRule, ...] = ()
    is_reordered: bool = False

    @classmethod
    def matching(cls, relation: Relation, count: int, reading: HistoryReading) -> HistoryComparison:
        """Makes the result for a reading that the list begins with."""
        is_reordered = any(segment.is_inserted for segment in reading.segments)
        return cls(relation, count, tuple(reading.rules()), is_reordered)


def compare(lineage: Lineage, chain: ChainRecord) -> HistoryComparison:
    """Compares given rules with a lineage's rules."""
    everything = [rule for entry in lineage for rule in Segment.of(entry).rules]
    has_gap = any(map(is_unrecorded, lineage))
    if not everything and not has_gap:
        return HistoryComparison("nothing recorded")
    readings = _readings(lineage)
    matches = [(count, reading) for reading in readings if (count := reading.matched(chain)) is not None]
    for count, reading in matches:
        if count == len(chain.steps):
            return HistoryComparison.matching("equal", count, reading)
    if has_gap and not any(reading.is_sure for reading in readings):
        return HistoryComparison("unrecorded", max((count for count, _ in matches), default=0))
    if any(step.identity is None for step in chain.steps) or any(map(_is_opaque, map(Segment.of, lineage))):
        return HistoryComparison("opaque")
    sure = [(count, reading) for count, reading in matches if reading.is_sure]
    if sure:
        count, reading = max(sure, key=lambda match: match[0])
        if not in_common(_without(everything, reading.rules()), chain.part(count)):
            return HistoryComparison.matching("prefix", count, reading)
    recorded = tuple(max((reading.rules() for reading in readings if reading.is_sure), key=len))
    return HistoryComparison("differs" if in_common(everything, chain) else "apart", 0, recorded)


def _is_opaque(segment: Segment) -> bool:
    return segment.whole is None and any(rule.digest is None for rule in segment.rules)


def _readings(lineage: Lineage) -> list[HistoryReading]:
    readings, is_sure = [HistoryReading((), is_sure=True)], True
    for entry in lineage:
        if is_unrecorded(entry):
            readings, is_sure = [], False
            continue
        if not applied_rules(entry):
            continue
        segment = Segment.of(entry)
        alone = segment._replace(is_inserted=False)
        if entry.get("is_resuming"):
            readings = [*(one for one in readings if one.segments), HistoryReading((alone,), is_sure=True)]
            continue
        readings = [one._replace(segments=(*one.segments, segment if one.segments else alone)) for one in readings]
        # An answer that the rules are to be applied is one about all that was applied before.
        begun = HistoryReading((alone,), is_sure=is_sure or segment.is_inserted)
        if not entry.get("continues") and begun not in readings:
            readings.append(begun)
    return readings


def _matched_in_order(segments: Iterable[Segment], chain: ChainRecord) -> int | None:
    """Counts a list's first rules that are the segments' in order."""
    position = 0
    for segment in segments:
        length = _length_of(segment, chain.part(position))
        if length is None:
            return None
        position += length
    return position


def _length_of(segment: Segment, chain: ChainRecord) -> int | None:
    """Counts a list's first rules that are the segment's."""
    if segment.whole is not None:
        lengths = range(1, len(chain.steps) + 1)
        return next((length for length in lengths if chain.part(0, length).digest == segment.whole), None)
    digests = [step.digest for step in chain.steps[: len(segment.rules)]]
    return len(digests) if None not in digests and digests == [rule.digest for rule in segment.rules] else None


def _found_in_order(segment: Segment, chain: ChainRecord, positions: Sequence[int]) -> set[int] | None:
    """Returns the positions of a list that hold the segment's rules."""
    found: set[int] = set()
    left = iter(positions)
    for rule in segment.rules:
        digest = rule.digest or ""  # no step's
        position = next((one for one in left if chain.steps[one].digest == digest), None)
        if position is None:
            return None
        found.add(position)
    return found


def _without(rules: Iterable[RecordedRule], others: Iterable[RecordedRule]) -> list[RecordedRule]:
    left = list(rules)
    for other in others:
        if other in left:
            left.remove(other)
    return left


def in_common(recorded: Iterable[RecordedRule], chain: ChainRecord) -> bool:
    """Tests if both have a rule, by digest or text.

    By text, since an edited rule is in no other list.
    """
    digests = {step.digest for step in chain.steps} - {None}
    texts = set(chain.rules)
    return any(
        not digests.isdisjoint((rule.digest, *rule.parts)) or not texts.isdisjoint(rule.texts) for rule in recorded
    )
