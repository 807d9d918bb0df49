"""The list of each named source is a history: the table by every entry point, the steps of a run, and an oracle."""

import dataclasses
import shutil

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.named_sources import decide
from orbax_t5x.provenance.question import ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, checked_lineage, make_entry
from orbax_t5x.restoring.sources import unopened_chain

T = ot.transforms
SWAP, RENAME = T.Rename([("x", "y"), ("y", "x")]), T.Rename([("old", "new")])
STATE = {name: np.full(2, value, np.float32) for name, value in (("x", 1), ("y", 2), ("old", 3))}


def values(state):
    return {name: values(leaf) if isinstance(leaf, dict) else float(leaf[0]) for name, leaf in state.items()}


def applied(rules, state):
    for rule in rules:
        state = rule(state, {})
    return state


def zeros(state):
    return {name: zeros(leaf) if isinstance(leaf, dict) else np.zeros(2, np.float32) for name, leaf in state.items()}


def save(directory, state, lineage):
    if lineage is None:  # another writer's
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory, state)
    else:
        with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
            checkpointer.save(directory, args=ot.args.TrainStateSave(state, provenance=lineage))
    return directory


def entry(rules):
    return make_entry("/begun", "orbax", record_rules(rules))


# What is recorded (None: nothing), what is given, and which rules a restore applies; None where it asks.
ROWS = {
    "nothing recorded": (None, [SWAP], [SWAP]),
    "nothing was applied": ([], [SWAP], [SWAP]),
    "equal": ([SWAP], [SWAP], []),
    "prefix": ([SWAP], [SWAP, RENAME], [RENAME]),
    "nothing in common": ([SWAP], [RENAME], [RENAME]),
    "inserted": ([SWAP], [RENAME, SWAP], None),
    "longer": ([SWAP, RENAME], [SWAP], None),
    "unrecorded": ([UNRECORDED], [SWAP], None),
}


def by_handler(sources, target, directory):
    place = save(directory / "place", STATE, ())
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        return checkpointer.restore(place, args=ot.args.TrainStateRestore(target, source=sources))


def by_v1(sources, target, directory):
    place = save(directory / "place", STATE, ())
    with ot.v1.context():
        return v1.load(place, ot.v1.AbstractTrainState(target, source=sources))


def by_init_from(sources, target, directory):
    with ocp.CheckpointManager(directory / "new", item_handlers=ot.TrainStateHandler()) as manager:
        state = ot.restore_or_initialize(manager, target, init_from=sources).state
        manager.save(0, args=ot.args.TrainStateSave(state))
        again = ot.restore_or_initialize(manager, target, init_from=sources)
    assert again.how == "resumed" and values(again.state) == values(state)
    return state


def by_convert(sources, target, directory):
    ot.convert(sources, directory / "converted")
    return ot.restore(directory / "converted", target)


WAYS = {
    "restore": lambda sources, target, _: ot.restore(sources, target),
    "plan_restore": lambda sources, target, _: ot.plan_restore(sources, target).execute(),
    "handler": by_handler,
    "v1": by_v1,
    "load_and_transform": lambda sources, target, _: ot.v1.load_and_transform(sources, target),
    "init_from=": by_init_from,
    "convert": by_convert,
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table_by_every_entry_point(tmp_path, row):
    recorded, rules, rest = ROWS[row]
    lineage = recorded if recorded in (None, [], [UNRECORDED]) else [entry(recorded)]
    stored = STATE if lineage in (None, [UNRECORDED]) else applied(recorded, STATE)
    sources = {
        "a": ot.Source(save(tmp_path / "a", stored, lineage), rules),
        # The other source is decided by itself.
        "b": ot.Source(save(tmp_path / "b", applied([RENAME], STATE), [entry([RENAME])]), [RENAME, SWAP]),
    }
    is_converted = row == "unrecorded"
    expected = {"a": applied(rules if rest is None else rest, stored), "b": applied([RENAME, SWAP], STATE)}
    for name, way in WAYS.items():
        if rest is None and not (is_converted and name == "convert"):
            with pytest.raises(ot.RestorePlanError) as raised:
                way(sources, zeros(expected), tmp_path)
            assert [problem.kind for problem in raised.value.problems] == ["provenance"], name
        else:
            assert values(way(sources, zeros(expected), tmp_path)) == values(expected), name
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
    other = save(tmp_path / "expected", expected, ())
    if rest is None and not is_converted:
        with pytest.raises(ot.RestorePlanError, match="not those given"):
            ot.diff(sources, other)
    else:
        report = ot.diff(sources, other)
        assert {leaf.status for leaf in report.leaves} == {"equal"}, report
        assert len(report.warnings) == (row in ("equal", "unrecorded"))
        assert report.rules[-1] == f"b: {SWAP.describe()}"


def test_a_conversion_reports_the_rules_of_sources(tmp_path):
    sources = {"a": ot.Source(save(tmp_path / "a", applied([SWAP], STATE), [entry([SWAP])]), [SWAP, RENAME])}
    assert ot.convert(sources, tmp_path / "one").rules == (f"a: {RENAME.describe()}",)
    alone = ot.Source(save(tmp_path / "b", STATE, ()), [SWAP, RENAME])
    assert ot.convert(alone, tmp_path / "two").rules == (SWAP.describe(), RENAME.describe())


# -- the run's own steps


def start(root, sources, target, step, **keywords):
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        begun = ot.restore_or_initialize(manager, target, init_from=sources, **keywords)
        manager.save(step, args=ot.args.TrainStateSave(begun.state))
    return values(begun.state)


MIGRATIONS = [("swap", [SWAP]), ("rename", [RENAME])]


@pytest.mark.parametrize("are_named", [False, True])
def test_the_lists_of_a_runs_sources_grow(tmp_path, are_named):
    begun = save(tmp_path / "begun", STATE, ())

    def sources(first, second):
        lists = ([SWAP, RENAME][:first], [RENAME, SWAP][:second])
        if are_named:
            lists = (ot.Migrations(MIGRATIONS[:first]), ot.Migrations(MIGRATIONS[::-1][:second]))
        return dict(zip("ab", (ot.Source(begun, rules) for rules in lists), strict=True))

    for step, (first, second) in enumerate([(1, 0), (1, 1), (2, 1), (2, 2), (2, 2)]):
        expected = {"a": applied([SWAP, RENAME][:first], STATE), "b": applied([RENAME, SWAP][:second], STATE)}
        assert start(tmp_path / "run", sources(first, second), zeros(expected), step) == values(expected)
    with pytest.raises(ot.RestorePlanError, match="of the source 'a'") as raised:
        start(tmp_path / "run", sources(1, 2), zeros(expected), 9)
    assert "is_resuming=True (the state has them and more" in str(raised.value.problems[0].fix)
    assert start(tmp_path / "run", sources(1, 2), zeros(expected), 9, is_resuming=True) == values(expected)
    assert start(tmp_path / "run", sources(1, 2), zeros(expected), 10) == values(expected)
    # As a restore without transforms: nothing is applied.
    assert start(tmp_path / "run", sources(0, 2), zeros(expected), 11) == values(expected)


def test_a_list_does_not_grow_before_what_was_applied_to_all_sources(tmp_path):
    begun = save(tmp_path / "begun", STATE, ())
    joined, sources = T.Rename([("a/x", "top")]), {"a": ot.Source(begun, [SWAP])}
    start(tmp_path / "run", sources, None, 0, transforms=[joined])
    grown = {"a": ot.Source(begun, [SWAP, RENAME])}
    with pytest.raises(ot.RestorePlanError, match="was applied after them") as raised:
        start(tmp_path / "run", grown, None, 1, transforms=[joined])
    assert "at the end of transforms=" in str(raised.value.problems[0].fix)
    at_the_end = [joined, T.Rename([("a/old", "a/new")])]
    expected = {"a": {"y": 1.0, "new": 3.0}, "top": 2.0}
    assert start(tmp_path / "run", sources, None, 1, transforms=at_the_end) == expected


def test_names_of_sources_that_begin_one_another_do_not_grow(tmp_path):
    begun = save(tmp_path / "begun", STATE, ())
    sources = {"a": ot.Source(begun, [SWAP]), "a/b": begun}
    start(tmp_path / "run", sources, None, 0)
    with pytest.raises(ot.RestorePlanError, match="the source 'a/b' has leaves there, too"):
        start(tmp_path / "run", {**sources, "a": ot.Source(begun, [SWAP, RENAME])}, None, 1)
    start(tmp_path / "run", sources, None, 1)


# -- by an oracle

NAMES = "abcdef"
RULES = {name: T.Rename([(name, f"{name}1")]) for name in NAMES}
lists = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)


def context_of(one, other, after, answer=None):
    own, other, after = ([RULES[name] for name in names] for names in (one, other, after))
    transforms = unopened_chain({"s": ot.Source("/begun", own), "t": ot.Source("/begun", other)}, after)
    return ResumeContext(record_rules(transforms), "start", answer, False, {"s": "", "t": ""}, "orbax", transforms)


@settings(max_examples=600, deadline=None)
@given(first=st.tuples(lists, lists, lists), second=st.tuples(lists, lists, lists))
def test_each_part_by_an_oracle(first, second):
    """A record that was made at once or that grew, of one source's rules, another's, and those of no source."""
    lineage, context = decide((), context_of(*first)).lineage, context_of(*second)
    if not any(rule.source for rule in context.chain) or not any(first):
        return
    pairs = zip(first, second, strict=True)
    counts = [len(recorded) if given[: len(recorded)] == recorded else None for recorded, given in pairs]
    decision = decide(checked_lineage(lineage), context)
    rest = [len(given) - (count or 0) for count, given in zip(counts, second, strict=True)]
    # Rules of no source may be what was a source's.
    is_lost = any(recorded and not given for recorded, given in zip(first[:2], second[:2], strict=True))
    differs = any(count is None and given for count, given in zip(counts, second, strict=True))
    asks = differs or (any(rest[:2]) and bool(first[2])) or (is_lost and rest[2] > 0)
    assert (decision.problem is not None) == asks
    if decision.problem is None:
        assert decision.is_resuming == (not any(rest))
        skipped = [len(decision.parts.get(at, ())) for at, rule in enumerate(context.chain) if rule.source]
        assert skipped == [count for count, one in zip(counts, second[:2], strict=False) if one]
        again = decide(checked_lineage(decision.lineage), context)
        assert again.is_resuming and again.lineage == decision.lineage
    for answer in (True, False):
        told = decide(lineage, context_of(*second, answer=answer))
        assert told.problem is None
        assert decide(told.lineage, context).is_resuming


def test_a_record_of_the_format_before_has_one_rule_for_a_source():
    (recorded,) = decide((), context_of("ab", "c", "d")).lineage
    steps = [{key: step[key] for key in ("digest", "rules")} for step in recorded["steps"]]
    before = checked_lineage([{**recorded, "steps": steps}])
    assert decide(before, context_of("ab", "c", "d")).is_resuming
    grown = decide(before, context_of("ab", "c", "de"))
    assert (list(grown.skipped), dict(grown.parts)) == ([2], {0: (0, 1), 1: (0,)})
    assert decide(before, context_of("abe", "c", "d")).problem is not None


@pytest.mark.parametrize("steps", [None, 1, [{"digest": None, "rules": 2}]])
def test_a_damaged_record_of_a_source_is_an_error(steps):
    (recorded,) = decide((), context_of("a", "", "")).lineage
    wrong = {**recorded, "steps": [{**recorded["steps"][0], "steps": steps}]}
    with pytest.raises(ot.errors.CorruptCheckpointError, match="malformed provenance record"):
        checked_lineage([wrong])


@pytest.mark.parametrize("are_named", [False, True])
@pytest.mark.parametrize("answer", [False, True])
def test_an_answer_about_an_unrecorded_state_is_remembered_for_each_source(answer, are_named):
    def context(count, **told):
        rules = [("swap", [SWAP]), ("rename", [RENAME])][:count]
        source = ot.Source("/begun", ot.Migrations(rules) if are_named else [rule for _, (rule,) in rules])
        transforms = unopened_chain({"s": source, "t": ot.Source("/begun", SWAP)}, [])
        given = ResumeContext(record_rules(transforms), "start", None, False, {"s": "", "t": ""}, "orbax", transforms)
        return dataclasses.replace(given, **told)

    what, _ = decide((UNRECORDED,), context(1)).problem
    assert what.startswith("of the source 's', nothing records")
    told = decide((UNRECORDED,), context(1, is_resuming=answer))
    assert told.is_resuming == answer and decide(told.lineage, context(1)).is_resuming
    grown = decide(told.lineage, context(2))
    assert {at: tuple(places) for at, places in grown.parts.items()} == {0: (0,), 1: (0,)}
    assert decide(grown.lineage, context(2)).is_resuming


@pytest.mark.parametrize("rules", [[], [SWAP]])
def test_what_a_source_had_before_the_run_is_not_applied_again(tmp_path, rules):
    """The record of each source is a part of that of the run, as that of a lone source is."""
    paths = {
        "a": save(tmp_path / "a", applied([SWAP], STATE), [entry([SWAP])]),
        "b": save(tmp_path / "b", STATE, [UNRECORDED]),
        "c": ot.Source(save(tmp_path / "c", STATE, ()), RENAME),
    }
    expected = {"a": applied([SWAP], STATE), "b": STATE, "c": applied([RENAME], STATE)}
    begun = {**paths, "a": ot.Source(paths["a"], rules)}
    assert start(tmp_path / "run", begun, None, 0) == values(expected)
    grown = {**paths, "a": ot.Source(paths["a"], [SWAP, RENAME])}
    expected["a"] = applied([SWAP, RENAME], STATE)
    for step in (1, 2):
        assert start(tmp_path / "run", grown, None, step) == values(expected)
    with pytest.raises(ot.RestorePlanError, match="of the source 'b', nothing records"):
        start(tmp_path / "run", {**grown, "b": ot.Source(paths["b"], [SWAP])}, None, 3)
    # What was a source's may stand among the transforms of all now.
    with pytest.raises(
        ot.RestorePlanError, match="rules of sources were applied to this state that are not given: a: "
    ):
        start(tmp_path / "run", paths, None, 3, transforms=[T.Rename([("a/x", "a/y"), ("a/y", "a/x")])])
