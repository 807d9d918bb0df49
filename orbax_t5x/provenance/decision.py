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
A job that starts is in the first column, but for steps of another writer: they are resumed as they are. The rules of
each named source are decided by themselves; see `orbax_t5x.provenance.named_sources`.
"""

from __future__ import annotations

import dataclasses

from orbax_t5x.provenance.chains import RuleRecord, Rules, texts_of
from orbax_t5x.provenance.history import HistoryComparison, compare, in_common, is_part
from orbax_t5x.provenance.question import Decision, ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, Lineage, applied_rules
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.narrow import is_mapping

_SHOWN_RULES = 12

HAS_MORE = Fix.setting("pass {} (the state has them and more: the run goes on)", is_resuming=True)
ANSWERS = Fix.any_of(
    Fix.setting("pass {} (they were applied already: the run goes on)", is_resuming=True),
    Fix.setting("pass {} (apply them now)", is_resuming=False),
)
_NEW_OR_SAME_RUN = Fix.any_of(
    Fix.setting("pass {} (a new run: apply them now)", is_resuming=False),
    Fix.setting("pass {} (the same run, edited rules)", is_resuming=True),
)


def decide(record: Lineage | None, context: ResumeContext) -> Decision:
    """Decides if transforms are applied, by the source's lineage."""
    lineage = record or ()
    if context.caller == "start" and record is None:
        # Another writer's: whether this run's transforms were applied to it is not known.
        return Decision(True, (UNRECORDED if context.chain else context.entry(()),))
    if not context.chain:
        return Decision(context.is_resuming is True, (context.entry(()),) if record is None else record)
    found = compare(lineage, context.chain)
    # The answer of a start is one about `init_from`: it counts where the record leaves a question.
    if context.is_resuming is None or context.caller == "start":
        decision = _decide_by_record(lineage, context, found)
        if context.is_resuming is None or decision.problem is None:
            return decision
    return _decide_by_answer(lineage, context, found)


def _decide_by_record(lineage: Lineage, context: ResumeContext, found: HistoryComparison) -> Decision:
    """Decides by the table."""
    is_own = context.caller in ("own step", "start")
    before = listed(texts_of(found.recorded), 1)
    if found.relation == "nothing recorded":
        return _decide_to_apply(lineage, context)
    if found.relation == "equal":
        note = "the record holds the same rules in another order" if found.is_reordered else ""
        return Decision(True, lineage, warnings=() if is_own else (_already_applied(lineage, before),), note=note)
    if found.relation == "prefix":
        entry = context.entry(context.chain[found.applied :], continues=True)
        note = f"{found.applied} of {len(context.chain)} rules were applied before: {before}"
        return Decision(False, (*lineage, entry), note=note, skipped=range(found.applied))
    if found.relation == "apart" and not is_own:
        return dataclasses.replace(_decide_to_apply(lineage, context), note=f"applied to this state before: {before}")
    is_open = found.relation in ("unrecorded", "opaque")
    if found.relation == "unrecorded":
        what = "nothing records what was applied to this state before it was saved"
        fix = _answers(found, context)
    elif found.relation == "opaque":
        applied = listed(next(filter(None, map(applied_rules, reversed(lineage)))), 1)
        is_given = any(rule.digest is None for rule in context.chain)
        whose = "those given" if is_given else f"those recorded ({applied})"
        what = (
            f"{applied} was applied to this state before, and whether that is what is given now cannot be "
            f"told: {whose} hold a lambda, a closure, a callable object or too much data, and so have no digest"
        )
        fix = ANSWERS
    else:
        what = side_by_side(found.recorded, context.chain)
        fix = _NEW_OR_SAME_RUN if found.relation == "apart" else _fix_of_difference(found.recorded, context)
    # Of an unrecorded state some may have been applied since, by another conversion.
    if is_open and context.caller == "convert" and not in_common(found.recorded, context.chain):
        return dataclasses.replace(
            _decide_to_apply(lineage, context), warnings=(f"{what}; the transforms are applied",)
        )
    if not context.has_fallback and context.is_resuming is None and all(rule.only_selects for rule in context.chain):
        # They change no value, and are not recorded: the record is not about them.
        return Decision(False, lineage)
    return Decision(False, lineage, problem=(what, fix))


def _decide_by_answer(lineage: Lineage, context: ResumeContext, found: HistoryComparison) -> Decision:
    """Follows the caller's `is_resuming`, which the next save records."""
    is_known = found.relation == "equal"
    if context.is_resuming:
        # Without a digest the entry could not be found again.
        is_remembered = is_known or any(rule.digest is None for rule in context.chain)
        return Decision(True, lineage if is_remembered else (*lineage, context.entry(context.chain, is_resuming=True)))
    if is_known and context.caller in ("own step", "start"):
        what = "transforms would be applied again that the run's own record says were applied already"
        return Decision(False, lineage, problem=(what, Fix.setting("remove {}", is_resuming=False)))
    return _decide_to_apply(lineage, context)


def _decide_to_apply(lineage: Lineage, context: ResumeContext) -> Decision:
    """Applies the transforms, and records them if they count."""
    entry = context.entry(context.chain, is_resuming=context.is_resuming)
    without = None if context.is_resuming is not None else lineage or (context.entry(()),)
    return Decision(False, (*lineage, entry), unmatched=without)


def _answers(found: HistoryComparison, context: ResumeContext) -> Fix:
    if not found.applied or not context.transforms:
        return ANSWERS
    words = f"pass {{}} (apply those that follow the {found.applied} recorded after it)"
    return Fix.any_of(
        ANSWERS.ways[0], Fix.setting(words, transforms=context.transforms[found.applied :], is_resuming=False)
    )


# -- texts


def _already_applied(lineage: Lineage, before: str) -> str:
    source = next(entry["source"] for entry in reversed(lineage) if applied_rules(entry))
    where = ", ".join(source.values()) if is_mapping(source) else source
    return (
        f"the transforms are not applied: by the checkpoint's record they were applied already, to {where!r}: "
        f"{before}; is_resuming=False applies them again"
    )


def side_by_side(recorded: Rules, given: Rules) -> str:
    """Describes a difference: the rules of both lists, each with its state."""
    rows: list[str] = []
    left, newest = list(enumerate(recorded)), -1
    for rule in given:
        shown, key = rule.name or "; ".join(rule.texts), (rule.name, rule.digest)
        same = [one for one in left if (one[1].name, one[1].digest) == key and (rule.name or rule.digest)][:1]
        alike = same or [one for one in left if _is_edited(one[1], rule)]
        left = [one for one in left if one not in alike]
        old = "; ".join(texts_of(one for _, one in alike))
        if same:
            rows.append(f"applied: {shown}{' (moved)' if same[0][0] < newest else ''}")
            newest = max(newest, same[0][0])
        elif not alike:
            rows.append(f"missing in the record: {shown}")
        elif old == "; ".join(rule.texts):
            rows.append(f"changed: {shown} (it reads the same, but its data or functions may differ)")
        else:
            rows.append(f"changed: {shown} (recorded as {old})")
    rows += [f"missing in those given: {rule.name or '; '.join(rule.texts)}" for _, rule in left]
    return (
        f"the rules that were applied to this state are not those given: {listed(rows, _SHOWN_RULES, separator='; ')}"
    )


def _is_edited(recorded: RuleRecord, given: RuleRecord) -> bool:
    if given.name or recorded.name:
        return given.name == recorded.name
    return not set(recorded.texts).isdisjoint(given.texts)


def _fix_of_difference(recorded: Rules, context: ResumeContext) -> Fix:
    old, new = [rule.digest for rule in recorded], [rule.digest for rule in context.chain]
    if is_part(new, old):
        return HAS_MORE
    if is_part(old, new) and context.transforms:
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
