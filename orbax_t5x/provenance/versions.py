"""Decisions about a state's migrations, by record or leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.provenance.chains import ChainRecord, RuleRecord
from orbax_t5x.provenance.history import RecordedRule, Segment, in_common
from orbax_t5x.provenance.records import Lineage, applied_rules, is_unrecorded, make_entry
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed

_SHOWN_NAMES = 12


class VersionQuestion(NamedTuple):
    """Facts that decide a state's version.

    Attributes:
      chain: the given transforms, the migrations last.
      lineage: the state's record.
      is_resuming: the caller's answer, or None.
      source, format: as `make_entry` takes them.
      leads_to_target: tests if the chain without some of its transforms leads to the target; with True exactly, else
        as far as the restore's options permit; None without a target.
    """

    chain: ChainRecord
    lineage: Lineage
    is_resuming: bool | None
    source: str | Mapping[str, str]
    format: str | Mapping[str, str]
    leads_to_target: Callable[[Sequence[int], bool], bool] | None


class MigratedState(NamedTuple):
    """MigratedState of a state.

    Attributes:
      skipped: positions of the transforms that it has.
      lineage: of the migrated state.
      applied: the names of the migrations that it has.
      problem: the reason why its version is not known, and the fix.
    """

    skipped: tuple[int, ...]
    lineage: Lineage
    applied: tuple[str, ...] = ()
    problem: tuple[str, Fix] | None = None


def version_of(question: VersionQuestion) -> MigratedState:
    """Finds the version of a state."""
    chain = question.chain
    first = next(index for index, step in enumerate(chain.steps) if step.name)
    given = chain.steps[first:]
    plain, recorded = _recorded(question.lineage)
    if question.is_resuming is not None:
        return _made(question, first, len(given) if question.is_resuming else 0, has_plain=question.is_resuming)
    has_plain = bool(first) and [rule.digest for rule in plain] == [step.digest for step in chain.steps[:first]]
    if first and plain and not has_plain:
        return _problem(
            question,
            f"{listed(_texts(plain), 1)} was applied to this state before, which is not "
            f"{listed(_texts(chain.steps[:first]), 1)}, given before the migrations",
            _answers(),
        )
    if recorded:
        first_given = [(one.name, one.digest) for one in given[: len(recorded)]]
        same = [(rule.name, rule.digest) for rule in recorded] == first_given
        if same and (has_plain or not first):
            return _made(question, first, len(recorded), has_plain=has_plain)
        return _problem(question, *_difference(recorded, given))
    inner = ChainRecord(tuple(rule for one in given for rule in one.inner))
    assumed = sum(one.is_assumed for one in given)
    if assumed:
        return _made(question, first, assumed, has_plain=has_plain)
    if not has_plain and plain and in_common(plain, inner):
        return _problem(question, *_plain_question(plain, given))
    return _by_leaves(question, first, has_plain=has_plain)


def _by_leaves(question: VersionQuestion, first: int, *, has_plain: bool) -> MigratedState:
    """Finds the only version that leads to the target."""
    given = question.chain.steps[first:]
    counts, fits = range(len(given) + 1), question.leads_to_target
    if fits is None:
        why, fitting = "there is no target to tell its version by", list(counts)
    else:
        fitting = [count for count in counts if fits(_skipped(first, count, has_plain), True)]
        fitting = fitting or [count for count in counts if fits(_skipped(first, count, has_plain), False)]
        why = f"{len(fitting)} versions lead to the target by names and shapes"
    if len(fitting) == 1:
        return _made(question, first, fitting[0], has_plain=has_plain)
    names = [one.name or "" for one in given]
    if not fitting:
        every = "without any of them, with some, and with all"
        what = f"nothing records which migrations this state has, and no version leads to the target ({every})"
        fix = "change the target, or add a migration at the end; migrations.since(name) shows what a version misses"
        return _problem(question, f"{what}: {listed(names, _SHOWN_NAMES)}", Fix.in_program(fix))
    versions = [f"up to {names[count - 1]!r}" if count else "none of them" for count in fitting]
    what = f"nothing records which migrations this state has, and {why}: {listed(versions, _SHOWN_NAMES)}"
    return _problem(question, what, _since([names[count - 1] for count in fitting if count], 0 in fitting))


def _since(names: Sequence[str], can_be_oldest: bool) -> Fix:
    ways = [
        Fix.in_program(f"pass transforms=migrations.since({name!r}) if the state has everything up to it")
        for name in names[:_SHOWN_NAMES]
    ]
    if can_be_oldest:
        ways.append(Fix.setting("pass {} if it has none of them", is_resuming=False))
    return Fix.any_of(*ways)


def _answers() -> Fix:
    return Fix.any_of(
        Fix.setting("pass {} (the state has all of them)", is_resuming=True),
        Fix.setting("pass {} (apply all of them now)", is_resuming=False),
    )


def _plain_question(plain: Sequence[RecordedRule], given: Sequence[RuleRecord]) -> tuple[str, Fix]:
    digests = [rule.digest for rule in plain]
    lengths = [sum(len(one.inner) for one in given[: index + 1]) for index in range(len(given))]
    inner = [rule.digest for one in given for rule in one.inner]
    names = [one.name or "" for one, length in zip(given, lengths, strict=True) if digests == inner[:length]]
    what = f"rules without a name were applied to this state that migrations hold, too: {listed(_texts(plain), 3)}"
    return what, _since(names, False) if names else _answers()


def _difference(recorded: Sequence[RecordedRule], given: Sequence[RuleRecord]) -> tuple[str, Fix]:
    """Describes recorded migrations that do not begin the list."""
    known, names = {rule.name: rule for rule in recorded}, [one.name for one in given]
    order = [name for name in known if name in names]
    rows: list[str] = []
    for at, one in enumerate(given):
        if one.name not in known:
            rows.append(f"not applied: {one.name}" + (" (before applied ones)" if set(names[at:]) & set(order) else ""))
        elif known[one.name].digest != one.digest:
            rows.append(f"changed: {one.name} (recorded as {listed(known[one.name].texts, 1)})")
        else:
            is_moved = order.index(one.name) != [name for name in names if name in known].index(one.name)
            rows.append(f"applied: {one.name}{' (moved)' if is_moved else ''}")
    rows += [f"applied and not given: {rule.name}" for rule in recorded if rule.name not in names]
    what = f"the migrations that were applied to this state are not the first of those given: {'; '.join(rows)}"
    if names == [rule.name for rule in recorded][: len(names)] and not any(row.startswith("changed") for row in rows):
        return what, Fix.setting("pass {} (the state has them and more)", is_resuming=True)
    return what, Fix.any_of(
        Fix("give the recorded migrations as they were, in their order, and new ones at the end"),
        Fix.setting("pass {} (the state has all of them as they are now)", is_resuming=True),
    )


def _recorded(lineage: Lineage) -> tuple[list[RecordedRule], list[RecordedRule]]:
    """Returns the plain rules and the migrations of a record."""
    plain: list[RecordedRule] = []
    named: dict[str, RecordedRule] = {}
    for entry in lineage:
        if is_unrecorded(entry):
            plain, named = [], {}
        if not applied_rules(entry):
            continue
        rules = Segment.of(entry).rules
        if entry.get("is_resuming"):
            plain, named = [], {}  # an answer is about all that the state has
        plain += [rule for rule in rules if rule.name is None]
        named.update((rule.name, rule) for rule in rules if rule.name is not None)
    return plain, list(named.values())


def _made(question: VersionQuestion, first: int, count: int, *, has_plain: bool) -> MigratedState:
    """Makes the version with the first migrations."""
    chain, lineage = question.chain, question.lineage
    skipped = _skipped(first, count, has_plain)
    _, recorded = _recorded(lineage)
    has = ChainRecord(tuple(chain.steps[index] for index in skipped))
    if has and (len(recorded) < count or question.is_resuming):
        lineage = (*lineage, make_entry(question.source, question.format, has, is_resuming=True))
    rest = ChainRecord(tuple(step for index, step in enumerate(chain.steps) if index not in skipped))
    if rest:
        lineage = (*lineage, make_entry(question.source, question.format, rest, continues=bool(lineage)))
    return MigratedState(skipped, lineage, tuple(step.name for step in has.steps if step.name))


def _skipped(first: int, count: int, has_plain: bool) -> tuple[int, ...]:
    return (*(range(first) if has_plain else ()), *range(first, first + count))


def _problem(question: VersionQuestion, what: str, fix: Fix) -> MigratedState:
    return MigratedState((), question.lineage, problem=(what, fix))


def _texts(rules: Sequence[RecordedRule | RuleRecord]) -> list[str]:
    return [text for rule in rules for text in rule.texts]
