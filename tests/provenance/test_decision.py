"""Which of the given rules a restore applies, by the rules that its source has behind it."""

import itertools

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.provenance.records import UNRECORDED, of_source, to_metadata
from tests.support.memory_checkpoint import checkpoint
from tests.support.recorded_chains import entries_of

T = ot.transforms
NAMES = "abcd"
# Each doubles a leaf of its own: the leaf says how often its rule was applied.
A, B, C, D = (T.Affine(name, scale=2.0) for name in NAMES)
TARGET = dict.fromkeys(NAMES, np.zeros(1, np.float32))


def opaque(transform):
    return lambda state, target: transform(state, target)


def source(record):
    metadata = {} if record is None else {"custom_metadata": to_metadata(record)}
    return checkpoint({name: np.ones(1, np.float32) for name in NAMES}, metadata=metadata)


def recorded(*rules):
    return tuple(entries_of(rules))


def counts_of(state):
    return "".join(name * int(np.log2(leaf[0])) for name, leaf in sorted(state.items()))


def applied(record, rules, **options):
    """Returns how often each rule was applied, and the record of the result."""
    plan = ot.plan_restore(source(record), TARGET, rules, **options)
    return counts_of(plan.execute()), plan.provenance


def problem_of(record, rules, **options):
    with pytest.raises(RestorePlanError) as raised:
        ot.plan_restore(source(record), TARGET, rules, **options)
    (problem,) = raised.value.problems
    assert problem.kind == "provenance"
    return problem


@pytest.mark.parametrize("record", [None, ()], ids=["no record", "no rules"])
def test_without_recorded_rules_all_are_applied(record):
    assert applied(record, [A, B]) == ("ab", recorded(A, B))
    assert applied(record, [opaque(A)])[0] == "a"
    assert applied(record, []) == ("", ())


@pytest.mark.parametrize(
    ("before", "given", "now"),
    [
        ([A], [A], ""),
        ([A], [A, B], "b"),
        ([A, B], [A, B], ""),
        ([A, B], [B], ""),
        ([A, B], [B, C], "c"),
        ([A], [B], "b"),
        ([A], [B, C], "bc"),
        ([A, B, C], [B, C, D], "d"),
        ([A, A], [A], ""),
        ([A, A], [A, A], ""),
        ([A], [], ""),
    ],
)
def test_the_rest_after_the_longest_beginning_is_applied(before, given, now):
    counts, record = applied(recorded(*before), given)
    assert counts == now
    assert record == recorded(*before, *given[len(given) - len(now) :])


@pytest.mark.parametrize(
    ("before", "given"),
    [
        ([A, B], [A]),
        ([A, B], [B, A]),
        ([A, B], [A, C, B]),
        ([A], [A, A]),
        ([A], [B, A]),
        ([A], [T.Affine("a", scale=4.0)]),
        ([A, B], [A, T.Affine("b", scale=4.0)]),
        ([T.Chain([A, B])], [A]),
        ([T.Rename([("a", "x"), ("b", "y")], require_match=False)], [T.Rename([("b", "z")])]),
        ([A], [T.FollowOptimizer(T.Affine("a", scale=4.0))]),
    ],
)
def test_a_rule_that_is_in_the_record_too_is_asked_about(before, given):
    problem = problem_of(recorded(*before), given)
    assert "recorded: [" in problem.message and "given: [" in problem.message
    counts, record = applied(recorded(*before), given, is_resuming=True)
    assert counts == "" and record == recorded(*before, *given)


@pytest.mark.parametrize(
    ("before", "given"), [([A, B], [A, C, B]), ([A], [A, T.Affine("a", scale=4.0)]), ([A], [C, A])]
)
def test_the_fix_applies_what_the_record_lacks(before, given):
    """Once: the same call with what it led to applies nothing, or asks."""
    fix = problem_of(recorded(*before), given).fix
    counts, record = applied(recorded(*before), fix.arguments["transforms"], is_resuming=False)
    assert set(counts) == ({"c"} if C in given else {"a"})
    assert record == recorded(*before, *fix.arguments["transforms"])


def test_the_first_fix_of_an_edited_rule_applies_nothing():
    fix = problem_of(recorded(A, B), [A, T.Affine("b", scale=4.0)]).fix
    assert dict(fix.arguments) == {"is_resuming": True} and not fix.transforms


@pytest.mark.parametrize(
    ("before", "given"),
    [([A], [opaque(A)]), ([opaque(A)], [A]), ([opaque(A)], [opaque(A)]), ([opaque(B), A], [A]), ([A], [A, opaque(B)])],
)
def test_a_rule_without_a_digest_is_asked_about(before, given):
    problem = problem_of(recorded(*before), given)
    assert {"is_resuming": True} in [dict(way.arguments) for way in problem.fix.ways]
    assert applied(recorded(*before), given, is_resuming=True)[0] == ""
    assert applied(recorded(*before), [], is_resuming=None)[0] == ""


@pytest.mark.parametrize(
    ("record", "given", "now"),
    [
        ((UNRECORDED,), [A], None),
        ((UNRECORDED,), [], ""),
        ((UNRECORDED, *recorded(A)), [A], ""),
        ((UNRECORDED, *recorded(A)), [A, B], None),
        ((*recorded(A), UNRECORDED), [A], None),
        ((*recorded(A), UNRECORDED, *recorded(A)), [A], ""),
    ],
)
def test_an_unrecorded_state_is_asked_about_once(record, given, now):
    if now is not None:
        assert applied(record, given) == (now, record)
        return
    assert "nobody" in problem_of(record, given).message
    assert applied(record, given, is_resuming=True) == ("", (*record, *recorded(*given)))
    counts, answered = applied(record, given, is_resuming=False)
    assert counts == NAMES[: len(given)] and applied(answered, given) == ("", answered)


def test_an_answer_counts_in_every_row():
    for record, rules in itertools.product((None, (), recorded(A), recorded(A, B), recorded(B)), ([A], [A, B])):
        assert applied(record, rules, is_resuming=True)[0] == ""
        assert applied(record, rules, is_resuming=False) == (NAMES[: len(rules)], (*(record or ()), *recorded(*rules)))


@pytest.mark.parametrize("rule", [T.Keep("[abcd]"), T.Drop("x", require_match=False), T.Cast("a", "float32")])
def test_rules_that_only_select_are_never_asked_about(rule):
    for record in ((UNRECORDED,), recorded(rule, A), recorded(opaque(A))):
        assert applied(record, [rule])[0] == ""
        assert problem_of(record, [rule], fallback=TARGET).kind == "provenance"


def test_the_plan_says_what_was_applied_before(caplog):
    with caplog.at_level("INFO", "orbax_t5x"):
        plan = ot.plan_restore(source(recorded(A)), TARGET, [A, B])
    (warning,) = plan.warnings
    assert "1 of 2 rules are not applied again" in warning and "Affine('a'" in warning
    assert warning in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "orbax_t5x"):
        plan = ot.plan_restore(source(recorded(A)), TARGET, [B])
    assert not plan.warnings and "applied to this state before: Affine('a'" in caplog.text


# -- named sources


def test_each_named_source_is_decided_by_its_own_record():
    """A second restore of what the first made; and of sources that were mapped before."""

    def both(one, two):
        return {"one": ot.Source(source(one), [A]), "two": ot.Source(source(two), [A, B])}

    def counts(state):
        return counts_of(state["one"]), counts_of(state["two"])

    target = {"one": TARGET, "two": TARGET}
    plan = ot.plan_restore(both(None, recorded(A)), target)
    assert counts(plan.execute()) == ("a", "b")
    assert [(entry["source"], entry["text"]) for entry in plan.provenance] == [
        ("two", A.describe()),
        ("one", A.describe()),
        ("two", B.describe()),
    ]
    with pytest.raises(RestorePlanError, match="nobody"):
        ot.plan_restore(both((UNRECORDED,), None), target)
    assert counts(ot.restore(both(recorded(A), recorded(A, B)), target)) == ("", "")


def test_a_runs_own_step_is_compared_by_source(tmp_path):
    sources = {"one": ot.Source(source(None), [A]), "two": source(None)}
    target = {"one": TARGET, "two": TARGET}
    later = T.Affine("two/d", scale=2.0)
    expected = {1: ("a", ""), 2: ("a", "d")}
    for step, transforms in enumerate(([], [], [later], [later])):
        with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=sources, transforms=transforms)
            assert (counts_of(start.state["one"]), counts_of(start.state["two"])) == expected[1 + (step > 1)]
            manager.save(step, args=ot.args.TrainStateSave(start.state))
    grown = {**sources, "one": ot.Source(source(None), [A, B])}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        with pytest.raises(RestorePlanError, match="at the end of transforms="):
            ot.restore_or_initialize(manager, target, init_from=grown, transforms=[later])


def test_records_of_named_sources_name_them():
    assert of_source("one", (UNRECORDED, *recorded(A))) == (
        {"unrecorded": True, "source": "one"},
        {**recorded(A)[0], "source": "one"},
    )


# -- a source's own transforms and those of the call


def test_a_sources_own_rules_come_first():
    own = ot.Source(source(None), [A])
    plan = ot.plan_restore(own, TARGET, [B])
    assert plan.provenance == recorded(A, B)
    assert counts_of(ot.restore(ot.Source(source(plan.provenance), [A]), TARGET, [B, C])) == "c"
