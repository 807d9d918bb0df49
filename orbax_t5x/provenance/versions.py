"""Decisions about a state's migrations, by record or leaves."""

from __future__ import annotations

from collections.abc import Sequence

from orbax_t5x.provenance.chains import RuleRecord, Rules, texts_of
from orbax_t5x.provenance.decision import ANSWERS, HAS_MORE, side_by_side
from orbax_t5x.provenance.history import in_common, recorded_rules
from orbax_t5x.provenance.question import Decision, ResumeContext
from orbax_t5x.provenance.records import Lineage, applied_rules, is_unrecorded
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed

_SHOWN_NAMES = 12

_EDITED = Fix.any_of(
    Fix("give the recorded migrations as they were, in their order, and new ones at the end"),
    Fix.setting("pass {} (the state has all of them as they are now)", is_resuming=True),
)


def decide_by_version(record: Lineage | None, context: ResumeContext) -> Decision:
    """Decides for a chain that ends with migrations."""
    lineage, answer = record or (), context.is_resuming
    # The answer of a start counts where the record leaves a question.
    if answer is None or context.caller == "start":
        decision = _by_record(record, context)
        if answer is None or decision.problem is None:
            return decision
    count = len(context.chain) - _first(context) if answer else 0
    return _made(lineage, context, count, has_plain=answer is True, is_answer=answer is True)


def _first(context: ResumeContext) -> int:
    """Returns the position of the first migration."""
    return next(index for index, rule in enumerate(context.chain) if rule.name)


def _by_record(record: Lineage | None, context: ResumeContext) -> Decision:
    lineage, first = record or (), _first(context)
    before, given = context.chain[:first], context.chain[first:]
    plain, recorded = _recorded(lineage, context.chain)
    digests = [rule.digest for rule in before]
    has_plain = bool(first) and None not in digests and [rule.digest for rule in plain] == digests
    if first and plain and not has_plain:
        what = (
            f"{listed(texts_of(plain), 1)} was applied to this state before, and {listed(texts_of(before), 1)}, given "
            f"before the migrations, {'has no digest' if None in digests else 'is not that'}"
        )
        return _problem(lineage, what, ANSWERS)
    if recorded:
        known, names = ([(rule.name, rule.digest) for rule in rules] for rules in (recorded, given))
        if known == names[: len(known)] and (has_plain or not first):
            return _made(lineage, context, len(recorded), has_plain=has_plain)
        fix = HAS_MORE if names == known[: len(given)] else _EDITED
        return _problem(lineage, side_by_side(tuple(recorded), given), fix)
    assumed = sum(one.is_assumed for one in given)
    if assumed:
        return _made(lineage, context, assumed, has_plain=has_plain)
    if not has_plain and in_common(plain, given):
        return _problem(lineage, *_plain_question(plain, given))
    return _by_leaves(record, context, has_plain=has_plain)


def _by_leaves(record: Lineage | None, context: ResumeContext, *, has_plain: bool) -> Decision:
    """Takes the only version whose remaining migrations lead to the target.

    The oldest, if it does and the record has all that is given before the migrations, or says that nothing was applied.
    """
    lineage, is_oldest = record or (), record == () or (has_plain and not any(map(is_unrecorded, record or ())))
    first, fits = _first(context), context.leads_to_target
    names = [rule.name or "" for rule in context.chain[first:]]
    fitting, why = list(range(len(names) + 1)), "there is no target to tell its version by"
    if fits is not None:
        versions = [_skipped(first, count, has_plain) for count in fitting]
        found = [[count for count in fitting if fits(versions[count], is_exact)] for is_exact in (True, False)]
        fitting = found[0] or found[1]
        why = f"{len(fitting)} versions lead to the target by names and shapes"
    if is_oldest and 0 in fitting:
        fitting = [0]
    if len(fitting) == 1:
        return _made(lineage, context, fitting[0], has_plain=has_plain)
    unknown = "nothing records which migrations this state has, and"
    if not fitting:
        every = "without any of them, with some, and with all"
        fix = "change the target, or add a migration at the end; migrations.since(name) shows what a version misses"
        what = f"{unknown} no version leads to the target ({every}): {listed(names, _SHOWN_NAMES)}"
        return _problem(lineage, what, Fix.in_program(fix))
    shown = [f"up to {names[count - 1]!r}" if count else "none of them" for count in fitting]
    fix = _since([names[count - 1] for count in fitting if count], 0 in fitting)
    return _problem(lineage, f"{unknown} {why}: {listed(shown, _SHOWN_NAMES)}", fix)


def _since(names: Sequence[str], can_be_oldest: bool) -> Fix:
    ways = [
        Fix.in_program(f"pass transforms=migrations.since({name!r}) if the state has everything up to it")
        for name in names[:_SHOWN_NAMES]
    ]
    if can_be_oldest:
        ways.append(Fix.setting("pass {} if it has none of them", is_resuming=False))
    return Fix.any_of(*ways)


def _plain_question(plain: Sequence[RuleRecord], given: Rules) -> tuple[str, Fix]:
    digests = [rule.digest for rule in plain]
    lengths = [sum(len(one.inner) for one in given[: index + 1]) for index in range(len(given))]
    inner = [rule.digest for one in given for rule in one.inner]
    names = [one.name or "" for one, length in zip(given, lengths, strict=True) if digests == inner[:length]]
    what = f"rules without a name were applied to this state that migrations hold, too: {listed(texts_of(plain), 3)}"
    return what, _since(names, False) if names else ANSWERS


def _recorded(lineage: Lineage, chain: Rules) -> tuple[list[RuleRecord], list[RuleRecord]]:
    """Returns the plain rules and the migrations of a record."""
    plain: list[RuleRecord] = []
    named: dict[str, RuleRecord] = {}
    for entry in lineage:
        # An answer is about all that the state has.
        if is_unrecorded(entry) or (applied_rules(entry) and entry.get("is_resuming")):
            plain, named = [], {}
        rules = recorded_rules(entry, chain)
        plain += [rule for rule in rules if rule.name is None]
        named.update((rule.name, rule) for rule in rules if rule.name is not None)
    return plain, list(named.values())


def _made(
    lineage: Lineage, context: ResumeContext, count: int, *, has_plain: bool, is_answer: bool = False
) -> Decision:
    """Decides for a state with the first migrations."""
    skipped = _skipped(_first(context), count, has_plain)
    has = tuple(context.chain[index] for index in skipped)
    rest = tuple(rule for index, rule in enumerate(context.chain) if index not in skipped)
    if has and (is_answer or len(_recorded(lineage, context.chain)[1]) < count):
        lineage = (*lineage, context.entry(has, is_resuming=True))
    if rest:
        lineage = (*lineage, context.entry(rest, continues=bool(lineage)))
    return Decision(not rest, lineage, skipped=skipped)


def _skipped(first: int, count: int, has_plain: bool) -> tuple[int, ...]:
    return (*(range(first) if has_plain else ()), *range(first, first + count))


def _problem(lineage: Lineage, what: str, fix: Fix) -> Decision:
    return Decision(False, lineage, problem=(what, fix))
