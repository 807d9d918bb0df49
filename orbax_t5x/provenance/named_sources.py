"""Decides rules by named source, each by its part of a record.

The list of each named source is compared with what the record holds of that source, and the transforms of the restore
with the rest of it, all by the table of `orbax_t5x.provenance.decision`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from orbax_t5x import on_demand
from orbax_t5x.provenance.chains import RuleRecord, Rules, record_rules, texts_of
from orbax_t5x.provenance.decision import ANSWERS
from orbax_t5x.provenance.decision import decide as decide_by_list
from orbax_t5x.provenance.digests import digest_of_rule
from orbax_t5x.provenance.history import recorded_rules
from orbax_t5x.provenance.question import Decision, LeadsToTarget, ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, Entry, Lineage, applied_rules, make_entry
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.narrow import is_mapping

_decide_by_version = on_demand.function("orbax_t5x.provenance.versions", "decide_by_version")  # migrations only
_AT_THE_END = Fix(
    "give the source's list as it was recorded, and what follows at the end of transforms=, by the names in the state "
    "of the run"
)


def decide(record: Lineage | None, context: ResumeContext) -> Decision:
    """Decides if transforms are applied, by the source's lineage."""
    if not record or not any(rule.source for rule in context.chain):
        return _decide_alone(record, context)
    history = [recorded_rules(entry, context.chain) for entry in record]
    answers = [at for at, entry in enumerate(record) if entry.get("is_resuming") is not None and history[at]]
    parts: list[_SourceRules] = []
    for name in dict.fromkeys(rule.source for rule in context.chain):
        entries = (_entry_of(entry, rules, name) for entry, rules in zip(record, history, strict=True))
        parts.append(_part(name, tuple(filter(None, entries)), context, has_rest=any(part.rest for part in parts)))
    problems = [problem for part in parts if (problem := _problem(part, record, history)) is not None]
    # An answer is about all that the state has.
    since = itertools.chain(*history[max(answers, default=0) :])
    lost = texts_of(rule for rule in since if rule.source and rule.source not in [part.name for part in parts])
    if lost and any(part.rest for part in parts if not part.name):
        what = f"rules of sources were applied to this state that are not given: {listed(lost, 3)}"
        problems.append((what, ANSWERS))
    if problems:
        asks = context.is_resuming is None
        return Decision(False, record, problem=problems[0]) if asks else _decide_alone(record, context)
    before = [rule for part in parts if part.is_told for rule in part.recorded(part.done, context)]
    now = [rule for part in parts if part.is_new for rule in part.recorded(part.rest, context)]
    entries = [context.entry(tuple(before), is_resuming=True)] if before else []
    entries += [context.entry(tuple(now), continues=True)] if now else []
    return Decision(
        is_resuming=not any(part.rest for part in parts),
        lineage=(*record, *entries),
        note="; ".join(f"{part.name or 'all'}: {part.decision.note}" for part in parts if part.decision.note),
        skipped=[part.at[index] for part in parts if not part.name for index in part.done],
        parts={part.at[0]: part.done for part in parts if part.name and part.done},
    )


def _decide_alone(record: Lineage | None, context: ResumeContext) -> Decision:
    by_version = any(rule.name for rule in context.chain)
    return (_decide_by_version if by_version else decide_by_list)(record, context)


@dataclasses.dataclass(frozen=True)
class _SourceRules:
    """Rules of a named source, or those of no source.

    Attributes:
      at: positions in the chain.
      done: which of its rules were applied before.
      rest: the others.
      is_told: whether the record lacks those that were applied before.
      is_new: whether the others are recorded.
    """

    name: str
    at: Sequence[int]
    decision: Decision
    done: Sequence[int]
    rest: Sequence[int]
    is_told: bool
    is_new: bool

    def recorded(self, which: Sequence[int], context: ResumeContext) -> Rules:
        """Returns the records of some of its rules."""
        if not self.name:
            return tuple(context.chain[self.at[index]] for index in which)
        whole = context.transforms[self.at[0]]
        steps = tuple(whole.steps[index] for index in which)
        return record_rules([dataclasses.replace(whole, steps=steps)]) if steps else ()


def _part(name: str, record: Lineage, context: ResumeContext, *, has_rest: bool) -> _SourceRules:
    at = [index for index, rule in enumerate(context.chain) if rule.source == name]
    transforms = [context.transforms[index] for index in at]
    own = dataclasses.replace(
        context,
        chain=_own((context.chain[index] for index in at), name),
        is_resuming=None,
        transforms=tuple(transforms[0].steps if name and at else transforms),
        leads_to_target=context.source_leads_to_target(name) if name else None if has_rest else _leads(at, context),
    )
    decision = _decide_alone(record, own)
    count, new = len(own.chain), decision.lineage[len(record) :]
    done = tuple(range(count) if decision.is_resuming else decision.skipped)
    rest = tuple(index for index in range(count) if index not in done)
    is_told = [bool(entry.get("is_resuming")) for entry in new]
    return _SourceRules(name, at, decision, done, rest, any(is_told), not all(is_told))


def _own(rules: Iterable[RuleRecord], name: str) -> Rules:
    """Returns the rules of a named source, or those of no source."""
    return tuple(one for rule in rules if rule.source == name for one in (rule.inner if name else (rule,)))


def _entry_of(entry: Entry, rules: Rules, name: str) -> Entry | None:
    """Returns an entry with the rules of one source."""
    if entry.get("unrecorded"):
        return UNRECORDED if entry.get("source", name) == name else None
    return _with_rules(entry, _own(rules, name))


def _with_rules(entry: Entry, rules: Rules) -> Entry:
    return {**entry, "steps": None, **make_entry(entry["source"], entry["format"], rules)}


def of_source(name: str, record: Lineage, chain: Rules) -> Lineage:
    """Returns a source's lineage as a part of that of a state."""
    entries: list[Entry] = []
    for entry in record:
        if entry.get("unrecorded"):
            entries.append({**UNRECORDED, "source": name})
        elif applied_rules(entry):
            rules = recorded_rules(entry, chain)
            inner = tuple(rule._replace(source="", inner=()) if rule.source else rule for rule in rules)
            digests, texts = [rule.digest for rule in inner], tuple(f"{name}: {text}" for text in texts_of(inner))
            identity = None if None in digests else f"{name}: {digests}"
            digest = identity and digest_of_rule(identity)
            entries.append(_with_rules(entry, (RuleRecord(texts, digest, None, inner, identity, source=name),)))
    return tuple(entries)


def _leads(at: Sequence[int], context: ResumeContext) -> LeadsToTarget | None:
    """Returns `leads_to_target` of a state with the rules of all sources."""
    leads, sources = context.leads_to_target, [index for index, rule in enumerate(context.chain) if rule.source]
    if leads is None:
        return None
    return lambda skipped, is_exact: leads([*sources, *(at[index] for index in skipped)], is_exact)


def _problem(part: _SourceRules, record: Lineage, history: Sequence[Rules]) -> tuple[str, Fix] | None:
    """Describes why a part is undecided, or its rest inapplicable."""
    if part.decision.problem is not None:
        what, fix = part.decision.problem
        return f"of the source {part.name!r}, {what}" if part.name else what, fix
    if not part.name or not part.rest:
        return None
    later = texts_of(_own(itertools.chain(*history), ""))
    names = {name for entry in record if is_mapping(entry.get("source")) for name in entry["source"]}
    beside = [one for one in names if one.startswith(f"{part.name}/") or part.name.startswith(f"{one}/")]
    if not later and not beside:
        return None
    why = f"{listed(later, 1)} was applied after them" if later else f"the source {beside[0]!r} has leaves there, too"
    return f"the source {part.name!r} has rules that were not applied to this state, and {why}", _AT_THE_END
