"""A list of rules is a history: comparisons with records, by an oracle on plain lists."""

import dataclasses
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.decision import decide
from orbax_t5x.provenance.history import compare
from orbax_t5x.provenance.question import ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, checked_lineage, make_entry

T = ot.transforms
NAMES = "abcdef"
RULES = {name: T.Rename([(name, f"{name}1")]) for name in NAMES}
CALLERS = ("own step", "start", "restore", "convert")


def chain_of(names):
    return record_rules([RULES[name] for name in names])


def context(names, caller, answer=None):
    transforms = tuple(RULES[name] for name in names)
    return ResumeContext(record_rules(transforms), caller, answer, False, "/here", "orbax", transforms)


def entry(names, **keywords):
    return make_entry("/here", "orbax", chain_of(names), **keywords)


def without_steps(one):
    """Returns an entry as the format before had it."""
    return {key: value for key, value in one.items() if key != "steps"}


def oracle(recorded, names):
    """Returns the row of the table for two lists, and how many rules are not applied again."""
    if not recorded:
        return "nothing recorded", 0
    if recorded == names:
        return "equal", len(names)
    if names[: len(recorded)] == recorded:
        return "prefix", len(recorded)
    return ("differs" if set(recorded) & set(names) else "apart"), 0


lists = st.lists(st.sampled_from(NAMES), max_size=5)


@settings(max_examples=1500, deadline=None)
@given(recorded=lists, names=lists.filter(bool), cuts=st.sets(st.integers(1, 4)), old=st.booleans())
def test_the_table_by_an_oracle(recorded, names, cuts, old):
    """The record was made at once, or by a list that grew at random; entries may be of the format before."""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(recorded)), len(recorded)] if recorded else []
    lineage = tuple(
        entry(recorded[first:last], continues=first > 0) for first, last in itertools.pairwise(bounds) if last > first
    )
    if old:
        lineage = tuple(map(without_steps, lineage))
    row, count = oracle(recorded, names)
    found = compare(checked_lineage(lineage), chain_of(names))
    assert (found.relation, found.applied) == (row, count)
    for caller in CALLERS:
        decision = decide(lineage, context(names, caller))
        is_problem = row == "differs" or (row == "apart" and caller in ("own step", "start"))
        assert (decision.problem is not None) == is_problem
        assert decision.is_resuming == (row == "equal") and len(decision.skipped) == (count if row == "prefix" else 0)
        assert bool(decision.warnings) == (row == "equal" and caller in ("restore", "convert"))
        if not is_problem:
            # What was applied is recorded: the same list is the record's from then on.
            assert compare(decision.lineage, chain_of(names)).relation == "equal"


def edited(chance, names):
    """Returns a list after somebody worked on it: mostly it grows."""
    action = chance.choice(["grow", "grow", "grow", "insert", "remove", "move", "keep"])
    fresh = [name for name in NAMES if name not in names]
    if action == "grow" and fresh:
        return [*names, chance.choice(fresh)]
    if action == "insert" and fresh:
        position = chance.randrange(len(names) + 1)
        return [*names[:position], chance.choice(fresh), *names[position:]]
    if action == "remove" and len(names) > 1:
        lost = chance.choice(names)
        return [name for name in names if name != lost]
    return chance.sample(names, len(names)) if action == "move" else names


def followed(lineage, names, state, fix):
    """Returns the state and the lineage after a fix that inserts rules."""
    inserted = [next(name for name in NAMES if RULES[name] == one) for one in fix.arguments["transforms"]]
    decision = decide(lineage, context(inserted, "restore", answer=False))
    assert decision.problem is None and not set(inserted) & set(state)
    again = decide(decision.lineage, context(names, "own step"))
    assert again.is_resuming
    return [*state, *inserted], decision.lineage


def test_no_rule_is_applied_twice_in_random_histories():
    """After each restore without a question the state has all of the list's rules, each once."""
    counts = dict.fromkeys(("applied", "asked", "followed", "began anew"), 0)
    for seed in range(400):
        chance = random.Random(seed)
        names, state, lineage = ["a"], [], ()
        for _ in range(8):
            caller = chance.choice(CALLERS)
            decision = decide(lineage, context(names, caller))
            if decision.problem is not None:
                fix = decision.problem[1]
                counts["followed" if "transforms" in fix.arguments else "asked"] += 1
                if "transforms" in fix.arguments:
                    state, lineage = followed(lineage, names, state, fix)
            elif decision.note.startswith("applied to this state before"):
                counts["began anew"] += 1
                assert not set(names) & set(state)
            else:
                counts["applied"] += 1
                state = state if decision.is_resuming else [*state, *names[len(decision.skipped) :]]
                lineage = decision.lineage
                assert len(state) == len(set(state)) and set(names) <= set(state), (seed, state, names)
            names = edited(chance, names)
    assert all(count > 0 for kind, count in counts.items() if kind != "began anew"), counts


def test_the_same_rules_in_another_order_after_the_fix_go_on_as_the_list():
    problem = decide((entry("ac"),), context("abc", "own step")).problem
    assert problem[1].arguments == {"transforms": (RULES["b"],), "is_resuming": False}
    assert "missing in the record: Rename" in problem[0] and "applied: Rename" in problem[0]
    lineage = decide((entry("ac"),), context("b", "own step", answer=False)).lineage
    assert decide(lineage, context("abc", "own step")).is_resuming
    grown = decide(lineage, context("abcd", "own step"))
    assert len(grown.skipped) == 3
    assert decide(grown.lineage, context("abcd", "restore")).is_resuming
    assert decide(grown.lineage, context("acbd", "restore")).is_resuming
    assert decide(grown.lineage, context("cabd", "restore")).problem is not None


def test_a_longer_record_goes_on_by_an_answer():
    problem = decide((entry("abc"),), context("ab", "restore")).problem
    assert dict(problem[1].arguments) == {"is_resuming": True}
    assert "missing in those given: Rename" in problem[0]
    lineage = decide((entry("abc"),), context("ab", "restore", answer=True)).lineage
    for names, skipped in (("ab", 0), ("abc", 0), ("abcd", 3), ("abd", 2)):
        decision = decide(lineage, context(names, "own step"))
        assert decision.problem is None and len(decision.skipped) == skipped
        assert decision.is_resuming == (skipped == 0)
    assert decide(lineage, context("abdc", "own step")).problem is not None  # c was applied


def test_moved_and_changed_rules_are_marked():
    message, fix = decide((entry("abc"),), context("bac", "own step")).problem
    assert "applied: Rename: ('a', 'a1')" not in message and "(moved)" in message
    assert "is_resuming=False" in str(fix) and "is_resuming=True" in str(fix)
    pairs = [T.Rename([("a", "b"), ("b", second)]) for second in "ac"]
    lineage = (make_entry("/here", "orbax", record_rules(pairs[:1])),)
    given = dataclasses.replace(context("a", "restore"), chain=record_rules(pairs[1:]))
    message, _ = decide(lineage, given).problem
    assert "changed: Rename" in message and "('b', 'a')" in message and "('b', 'c')" in message


def test_a_step_of_another_writer_is_resumed_as_it_is_and_stays_unknown():
    decision = decide(None, context("a", "start"))
    assert decision.is_resuming and decision.lineage == (UNRECORDED,)
    assert not decide(None, context("a", "own step")).is_resuming


def test_an_answer_at_a_start_counts_where_the_record_leaves_a_question():
    assert decide((entry("a"),), context("ab", "start", answer=False)).skipped == range(1)
    assert decide((entry("a"),), context("a", "start", answer=False)).is_resuming
    assert decide((UNRECORDED,), context("a", "start", answer=True)).is_resuming
    assert decide((UNRECORDED,), context("a", "start")).problem is not None
    # Those that only select need no answer; one that is given is recorded.
    selects = dataclasses.replace(context("a", "start"), chain=record_rules([T.Drop(["b"])]))
    assert decide((UNRECORDED,), selects).lineage == (UNRECORDED,)
    assert decide((UNRECORDED,), dataclasses.replace(selects, is_resuming=False)).lineage[1]["is_resuming"] is False


def test_rules_of_an_unrecorded_state_are_no_prefix():
    lineage = (UNRECORDED, entry("a"))
    assert compare(lineage, chain_of("a")).relation == "equal"
    assert compare(lineage, chain_of("ab")).relation == "unrecorded"
    for answer in (True, False):
        answered = (UNRECORDED, entry("a", is_resuming=answer))
        assert compare(answered, chain_of("ab")).relation == "prefix"
    # A conversion goes on with a warning only if none of its rules was applied since.
    since = (UNRECORDED, entry("ab"))
    assert [decide(since, context(names, "convert")).problem is None for names in ("abc", "b", "c", "ab")] == [
        False,
        False,
        True,
        True,
    ]
    # Of a conversion, which applied them with a warning: the question offers the rest, and never all again.
    _, fix = decide(lineage, context("abc", "restore")).problem
    rest = fix.ways[1].arguments
    assert rest == {"transforms": (RULES["b"], RULES["c"]), "is_resuming": False}
    decision = decide(lineage, context("bc", "restore", answer=False))
    assert decide(decision.lineage, context("abc", "own step")).is_resuming


def test_a_long_chain_is_compared_by_the_digest_of_the_whole():
    many = record_rules([T.Rename([(f"a{index}", f"b{index}")]) for index in range(501)])
    lineage = (make_entry("/here", "orbax", many),)
    assert "steps" not in lineage[0] and compare(lineage, many).relation == "equal"
    longer = (*many, *chain_of("a"))
    assert compare(lineage, longer)[:2] == ("prefix", 501)
