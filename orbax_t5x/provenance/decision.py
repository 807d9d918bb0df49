"""Decisions about applying transforms, by the record of a state.

A list of rules is a history: what a state's record says of the list decides, unless the caller answers with
`is_resuming`.

| the list and the record | own step of the run | anything else |
|---|---|---|
| nothing is recorded, or nothing was applied | apply | apply |
| equal | nothing is applied | the same, and a warning |
| the list begins with what is recorded | apply the rest | apply the rest |
| no rule in common | a problem | apply |
| anything else | a problem: both, side by side | the same |
| unrecorded, or a rule without a digest | ask | ask; `convert` applies, with one warning |

Where a row asks, or is a problem, transforms that only select or cast are applied all the same, as long
as there is no `fallback` that would fill what they take out: no value that is restored can be wrong by that.
A job that starts is in the first column, but for steps of another writer: they are resumed as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from orbax_t5x.provenance.chains import ChainRecord, RuleRecord
from orbax_t5x.provenance.history import HistoryComparison, RecordedRule, compare
from orbax_t5x.provenance.records import UNRECORDED, Entry, Lineage, applied_rules, make_entry
from orbax_t5x.provenance.versions import VersionQuestion, version_of
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.narrow import is_mapping

CallerKind = Literal["own step", "start", "restore", "convert"]
"""The kinds of callers: a restore of the run's own step (a handler's, without `source=`); the same by
`restore_or_initialize`; any other restore or plan; and calls that make a new checkpoint or a new run (`convert`,
`init_from=`, the command line)."""

_SHOWN_RULES = 12

_ANSWERS = Fix.any_of(
    Fix.setting("pass {} (they were applied already: the run goes on)", is_resuming=True),
    Fix.setting("pass {} (apply them now)", is_resuming=False),
)
_NEW_OR_SAME_RUN = Fix.any_of(
    Fix.setting("pass {} (a new run: apply them now)", is_resuming=False),
    Fix.setting("pass {} (the same run, edited rules)", is_resuming=True),
)


@dataclasses.dataclass(frozen=True)
class ResumeContext:
    """Facts of a restore for a decision, beside the record.

    Attributes:
      chain: the transforms that are given.
      caller: the kind of the caller.
      is_resuming: as the caller passed it; None decides by the record.
      has_fallback: whether leaves that are missing are filled.
      source: path of the source, or name -> path.
      format: of the source, or name -> format.
      transforms: that the chain records, for fixes.
      leads_to_target: as in `VersionQuestion`.
    """

    chain: ChainRecord
    caller: CallerKind
    is_resuming: bool | None
    has_fallback: bool
    source: str | Mapping[str, str]
    format: str | Mapping[str, str]
    transforms: tuple[Callable[..., Any], ...] = ()
    leads_to_target: Callable[[Sequence[int], bool], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """Outcome of a decision.

    Attributes:
      is_resuming: whether they were applied already.
      skipped: positions of the transforms that were applied already.
      migrations: names of those that were applied before; None without any given.
      lineage: of the state that is restored.
      problem: why nothing can be decided, and what the caller can pass; None where it is decided.
      warning: what a person should see; empty where nothing is.
      note: what was applied to the source before, where other transforms are applied on top; else empty.
      unmatched: the lineage where the transforms that are applied match nothing; None for `lineage` itself.
    """

    is_resuming: bool
    lineage: Lineage
    problem: tuple[str, Fix] | None = None
    warning: str = ""
    note: str = ""
    unmatched: Lineage | None = None
    skipped: Sequence[int] = ()
    migrations: tuple[str, ...] | None = None


def decide(record: Lineage | None, context: ResumeContext) -> Decision:
    """Decides if transforms are applied, by the source's lineage."""
    lineage = record or ()
    if any(step.name for step in context.chain.steps):
        return _decide_by_version(lineage, context)
    if context.caller == "start" and record is None:
        # Another writer's: whether this run's transforms were applied to it is not known.
        return Decision(True, (UNRECORDED,) if context.chain else (_entry(context),))
    if not context.chain:
        return Decision(context.is_resuming is True, lineage or (_entry(context),))
    found = compare(lineage, context.chain)
    if context.caller == "start":
        # The answer is one about `init_from` at every start: it counts where the record leaves a question.
        decision = _decide_by_record(lineage, context, found)
        if decision.problem is None or context.is_resuming is None:
            return decision
    if context.is_resuming is not None:
        return _decide_by_answer(lineage, context, found)
    return _decide_by_record(lineage, context, found)


def _decide_by_version(lineage: Lineage, context: ResumeContext) -> Decision:
    """Decides for migrations; a start's answer fills gaps."""
    fits, chain = context.leads_to_target, context.chain
    asked = VersionQuestion(chain, lineage, None, context.source, context.format, fits)
    version = version_of(asked)
    if context.is_resuming is not None and (context.caller != "start" or version.problem is not None):
        version = version_of(asked._replace(is_resuming=context.is_resuming))
    if version.problem is not None:
        return Decision(False, lineage, problem=version.problem)
    is_resuming = len(version.skipped) == len(chain.steps)
    return Decision(is_resuming, version.lineage, skipped=version.skipped, migrations=version.applied)


def _decide_by_record(lineage: Lineage, context: ResumeContext, found: HistoryComparison) -> Decision:
    """Decides by the table."""
    is_own = context.caller in ("own step", "start")
    before = listed([text for rule in found.recorded for text in rule.texts], 1)
    if found.relation == "nothing recorded":
        return _decide_to_apply(lineage, context)
    if found.relation == "equal":
        note = "the record holds the same rules in another order" if found.is_reordered else ""
        return Decision(True, lineage, warning="" if is_own else _already_applied(lineage, before), note=note)
    if found.relation == "prefix":
        rest = dataclasses.replace(context, chain=context.chain.part(found.applied), is_resuming=None)
        entry = make_entry(rest.source, rest.format, rest.chain, continues=True)
        note = f"{found.applied} of {len(context.chain.steps)} rules were applied before: {before}"
        return Decision(False, (*lineage, entry), note=note, skipped=range(found.applied))
    if found.relation == "apart" and not is_own:
        return dataclasses.replace(_decide_to_apply(lineage, context), note=f"applied to this state before: {before}")
    if found.relation == "unrecorded":
        what = "nothing records what was applied to this state before it was saved"
        return _decide_unrecorded(lineage, context, what, _answers(found, context))
    if found.relation == "opaque":
        applied = [entry for entry in lineage if applied_rules(entry)]
        whose = "those given" if context.chain.digest is None else f"those recorded ({_brief(applied[-1])})"
        what = (
            f"{_brief(applied[-1])} was applied to this state before, and whether that is what is given now cannot be "
            f"told: {whose} hold a lambda, a closure, a callable object or too much data, and so have no digest"
        )
        return _decide_unrecorded(lineage, context, what, _ANSWERS)
    if _changes_no_value(context):
        return Decision(False, lineage)
    rows = _side_by_side(found.recorded, context.chain)
    what = (
        f"the rules that were applied to this state are not those given: {listed(rows, _SHOWN_RULES, separator='; ')}"
    )
    fix = _NEW_OR_SAME_RUN if found.relation == "apart" else _fix_of_difference(found.recorded, context)
    return Decision(False, lineage, problem=(what, fix))


def _decide_by_answer(lineage: Lineage, context: ResumeContext, found: HistoryComparison) -> Decision:
    """Follows the caller's `is_resuming`, which the next save records."""
    is_known = found.relation == "equal"
    if context.is_resuming:
        # Without a digest the entry could not be found again.
        is_remembered = is_known or context.chain.digest is None
        return Decision(True, lineage if is_remembered else (*lineage, _entry(context)))
    if is_known and context.caller != "restore" and context.caller != "convert":
        what = "transforms would be applied again that the run's own record says were applied already"
        return Decision(False, lineage, problem=(what, Fix.setting("remove {}", is_resuming=False)))
    return _decide_to_apply(lineage, context)


def _decide_to_apply(lineage: Lineage, context: ResumeContext) -> Decision:
    """Applies the transforms, and records them if they count."""
    if context.is_resuming is not None:
        return Decision(False, (*lineage, _entry(context)))
    without = lineage or (_entry(dataclasses.replace(context, chain=ChainRecord.of(()))),)
    return Decision(False, (*lineage, _entry(context)), unmatched=without)


def _entry(context: ResumeContext) -> Entry:
    answer = context.is_resuming if context.chain else None
    return make_entry(context.source, context.format, context.chain, is_resuming=answer)


def _answers(found: HistoryComparison, context: ResumeContext) -> Fix:
    if not found.applied or not context.transforms:
        return _ANSWERS
    words = f"pass {{}} (apply those that follow the {found.applied} recorded after it)"
    return Fix.any_of(
        _ANSWERS.ways[0], Fix.setting(words, transforms=context.transforms[found.applied :], is_resuming=False)
    )


def _decide_unrecorded(lineage: Lineage, context: ResumeContext, what: str, fix: Fix) -> Decision:
    """Decides a row that asks."""
    if context.caller == "convert":
        return dataclasses.replace(_decide_to_apply(lineage, context), warning=f"{what}; the transforms are applied")
    if _changes_no_value(context):
        # Not recorded: it does not concern the given transforms.
        return Decision(False, lineage)
    return Decision(False, lineage, problem=(what, fix))


def _changes_no_value(context: ResumeContext) -> bool:
    return context.chain.only_selects and not context.has_fallback


# -- texts


def _brief(entry: Entry) -> str:
    rules = applied_rules(entry)
    return listed(rules, 1)


def _already_applied(lineage: Lineage, before: str) -> str:
    source = next(entry["source"] for entry in reversed(lineage) if applied_rules(entry))
    where = ", ".join(source.values()) if is_mapping(source) else source
    return (
        f"the transforms are not applied: by the checkpoint's record they were applied already, to {where!r}: "
        f"{before}; is_resuming=False applies them again"
    )


def _side_by_side(recorded: Sequence[RecordedRule], chain: ChainRecord) -> list[str]:
    """Lists the rules of both lists, each with its state."""
    rows: list[str] = []
    left, newest = list(enumerate(recorded)), -1
    for step in chain.steps:
        text = "; ".join(step.texts)
        same = [one for one in left if _is_same(one[1], step)][:1]
        alike = same or [one for one in left if not set(one[1].texts).isdisjoint(step.texts)]
        left = [one for one in left if one not in alike]
        old = "; ".join(text for _, rule in alike for text in rule.texts)
        if same:
            rows.append(f"applied: {text}{' (moved)' if same[0][0] < newest else ''}")
            newest = max(newest, same[0][0])
        elif not alike:
            rows.append(f"missing in the record: {text}")
        elif old == text:
            rows.append(f"changed: {text} (it reads the same, but its data or functions may differ)")
        else:
            rows.append(f"changed: {text} (recorded as {old})")
    return [*rows, *(f"missing in those given: {'; '.join(rule.texts)}" for _, rule in left)]


def _is_same(rule: RecordedRule, step: RuleRecord) -> bool:
    return rule.digest is not None and rule.digest == step.digest


def _is_part(rules: Sequence[Any], of: Sequence[Any]) -> bool:
    """Tests whether rules stand in a longer list in their order."""
    others = iter(of)
    return None not in rules and all(rule in others for rule in rules)


def _fix_of_difference(recorded: Sequence[RecordedRule], context: ResumeContext) -> Fix:
    """Returns the fix for inserted, removed, changed or moved rules."""
    old, new = [rule.digest for rule in recorded], [step.digest for step in context.chain.steps]
    if _is_part(new, old):
        return Fix.setting("pass {} (the state has them and more: the run goes on)", is_resuming=True)
    if _is_part(old, new) and context.transforms:
        inserted = list(context.transforms)
        for digest in reversed(old):
            # The last that fits: the rules of the record are in the list's order.
            position = max(index for index in range(len(inserted)) if new[index] == digest)
            del inserted[position], new[position]
        words = "apply those that were inserted alone, once, with {}"
        return Fix.setting(words, transforms=tuple(inserted), is_resuming=False)
    return Fix.any_of(
        Fix.setting(
            "give the rules as they were recorded and what follows from them at the end, or pass {} (the state "
            "is as those given make it)",
            is_resuming=True,
        ),
        Fix("apply alone, with is_resuming=False, those that this state lacks"),
    )


# -- several items


def combine_decisions(decisions: Mapping[str, Decision]) -> Decision:
    """Combines the decisions for several items."""
    first = next(iter(decisions.values()))
    if len(decisions) == 1:
        return first
    answers = {name: _answer_text(decision) for name, decision in decisions.items()}
    lineage = _union_of_lineages([decision.lineage for decision in decisions.values()])
    if len(set(answers.values())) > 1:
        answer_texts = "; ".join(f"{name!r}: {answer}" for name, answer in answers.items())
        what = f"the items of this step have differing records of what was applied to them: {answer_texts}"
        return Decision(False, lineage, problem=(what, Fix.setting("restore one item at a time with {}", item=...)))
    warnings = dict.fromkeys(decision.warning for decision in decisions.values() if decision.warning)
    notes = dict.fromkeys(decision.note for decision in decisions.values() if decision.note)
    without = [decision.unmatched for decision in decisions.values() if decision.unmatched is not None]
    unmatched = _union_of_lineages(without) if len(without) == len(decisions) else None
    texts = "; ".join(warnings), "; ".join(notes)
    return Decision(first.is_resuming, lineage, first.problem, *texts, unmatched, first.skipped, first.migrations)


def _answer_text(decision: Decision) -> str:
    if decision.problem is not None:
        return "not decided"
    if decision.skipped:
        return f"{len(decision.skipped)} of them applied already"
    return "applied already" if decision.is_resuming else "to be applied"


def _union_of_lineages(lineages: Sequence[Lineage]) -> Lineage:
    """Returns all entries, each once, in the order of the items."""
    entries: list[Entry] = []
    for lineage in lineages:
        entries.extend(entry for entry in lineage if entry not in entries)
    return tuple(entries)
