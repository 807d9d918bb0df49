"""Which migrations a state has: by its record, by its leaves, by an answer; a row of the contract each."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.named_sources import decide
from orbax_t5x.provenance.question import ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, make_entry

T = ot.transforms
RENAME = T.Rename([("a", "b")])
SWAP = T.Rename([("b", "c"), ("c", "b")])
JOIN = T.Concat(["b", "c"], "joined", 0)
ITEMS = [("rename", [RENAME]), ("swap", [SWAP]), ("join", [JOIN])]
# The state of each version.
A, B = np.arange(2, dtype=np.float32), np.arange(2, dtype=np.float32) + 10
STATES = [{"a": A, "c": B}, {"b": A, "c": B}, {"b": B, "c": A}, {"joined": np.concatenate([B, A])}]
TARGET = {"joined": np.zeros(4, np.float32)}


def list_of(count):
    return ot.Migrations(ITEMS[:count])


def saved(directory, version, **keywords):
    with ocp.CheckpointManager(directory, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(STATES[version], **keywords))
    return directory / "0" / "default"


def of_version(directory, version):
    """A step that records the migrations up to its version."""
    begun = saved(directory / "begun", 0, provenance=())
    target = {name: np.zeros_like(leaf) for name, leaf in STATES[version].items()}
    plan = ot.plan_restore(
        begun, target, list_of(version).since("rename") if version == 3 else list_of(version), is_resuming=False
    )
    with ocp.CheckpointManager(directory / "run", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(plan.execute(), provenance=plan.provenance))
    return directory / "run" / "0" / "default"


def problem_of(*args, **keywords):
    with pytest.raises(ot.RestorePlanError) as raised:
        ot.restore(*args, **keywords)
    (problem,) = raised.value.problems
    assert problem.kind == "provenance"
    return problem


@pytest.mark.parametrize("version", range(4))
def test_each_name_is_applied_once_and_the_plan_says_which(tmp_path, version):
    plan = ot.plan_restore(of_version(tmp_path, version), TARGET, list_of(3))
    names = ["rename", "swap", "join"]
    if version:
        said = f"migrations: {version} of 3 were applied before: {', '.join(names[:version])}"
        assert said in str(plan) and said in plan._repr_html_()
        assert plan.to_json()["migrations"] == {"before": names[:version], "now": names[version:]}
    np.testing.assert_array_equal(plan.execute()["joined"], STATES[3]["joined"])


def test_names_that_changed_or_moved_are_problems(tmp_path):
    path = of_version(tmp_path, 2)
    changed = problem_of(path, TARGET, ot.Migrations([("rename", [T.Rename([("a", "c")])]), *ITEMS[1:]]))
    assert "changed: rename" in changed.message and "applied: swap" in changed.message
    moved = problem_of(path, TARGET, ot.Migrations([ITEMS[1], ITEMS[0], ITEMS[2]]))
    assert "(moved)" in moved.message
    inserted = problem_of(path, TARGET, ot.Migrations([ITEMS[0], ("new", []), *ITEMS[1:]]))
    assert "missing in the record: new" in inserted.message
    shorter = problem_of(path, {"b": A, "c": A}, ot.Migrations(ITEMS[:1]))
    assert "missing in those given: swap" in shorter.message and "is_resuming=True" in str(shorter.fix)
    assert ot.restore(path, STATES[2], ot.Migrations(ITEMS[:1]), is_resuming=True)["b"][0] == B[0]


def test_a_checkpoint_without_a_record_has_the_only_version_that_fits(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", STATES[0])
    restored = ot.restore(tmp_path / "stock", TARGET, list_of(3))
    np.testing.assert_array_equal(restored["joined"], STATES[3]["joined"])
    # Nobody can tell a swap by names and shapes.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "swapped", STATES[2])
    problem = problem_of(tmp_path / "swapped", TARGET, list_of(3))
    assert "2 versions lead to the target by names and shapes: up to 'rename', up to 'swap'" in problem.message
    assert "migrations.since('swap')" in str(problem.fix)
    restored = ot.restore(tmp_path / "swapped", TARGET, list_of(3).since("swap"))
    np.testing.assert_array_equal(restored["joined"], STATES[3]["joined"])
    nothing = problem_of(tmp_path / "stock", {"other": np.zeros(3)}, list_of(3))
    assert "no version leads to the target" in nothing.message
    without_target = problem_of(tmp_path / "stock", None, list_of(3))
    assert "there is no target" in without_target.message


def test_a_record_that_nothing_was_applied_is_of_the_oldest_version(tmp_path):
    """Several versions would fit; and where the oldest does not, the record is of another model."""
    oldest = saved(tmp_path / "oldest", 1, provenance=())
    two = ot.Migrations(ITEMS[1:])
    np.testing.assert_array_equal(ot.restore(oldest, STATES[2], ot.Migrations(ITEMS[1:2]))["b"], B)
    np.testing.assert_array_equal(ot.restore(oldest, TARGET, two)["joined"], STATES[3]["joined"])
    ot.convert(oldest, tmp_path / "converted", two)
    np.testing.assert_array_equal(ot.restore(tmp_path / "converted", TARGET)["joined"], STATES[3]["joined"])
    later = saved(tmp_path / "later", 2, provenance=())
    assert "2 versions lead to the target" in problem_of(later, TARGET, list_of(3)).message


def test_a_record_of_what_is_given_before_the_migrations_has_none_of_them(tmp_path):
    """The run began with it, and the migrations are what has grown at the list's end."""
    first = T.Rename([("first", "b")])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", {"first": A, "c": B})
    plan = ot.plan_restore(tmp_path / "stock", STATES[1], [first])
    run = saved(tmp_path / "run", 1, provenance=plan.provenance)
    again = ot.restore(run, STATES[2], [first, *ot.Migrations(ITEMS[1:2]).steps])
    np.testing.assert_array_equal(again["b"], B)


def test_rules_before_migrations_that_cannot_be_compared_are_asked_about(tmp_path):
    """Two lambdas: neither is taken for the other."""
    given = [lambda state, target: {"c": state["c"], "a": state["a"]}, *list_of(1).steps]
    plan = ot.plan_restore(saved(tmp_path / "begun", 0, provenance=()), STATES[1], given)
    path = saved(tmp_path / "run", 1, provenance=plan.provenance)
    other = [lambda state, target: state, *list_of(1).steps]
    assert "has no digest" in problem_of(path, STATES[1], other).message
    assert ot.restore(path, STATES[1], other, is_resuming=True)["b"][0] == A[0]


def test_named_sources_have_each_the_version_of_their_own(tmp_path):
    """By its record, by its leaves, by `since`; a start that goes on has all of them."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", STATES[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "told", STATES[2])
    sources = {
        "run": ot.Source(of_version(tmp_path, 1), list_of(3)),
        "stock": ot.Source(tmp_path / "stock", list_of(3)),
        "told": ot.Source(tmp_path / "told", list_of(3).since("swap")),
    }
    target = dict.fromkeys(sources, TARGET)
    plan = ot.plan_restore(sources, target)
    assert "migrations: 3 of 9 were applied before: run/rename, told/rename, told/swap" in " ".join(str(plan).split())
    for _ in range(2):
        with ocp.CheckpointManager(tmp_path / "next", item_handlers=ot.TrainStateHandler()) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=sources)
            manager.save(start.step + 1, args=ot.args.TrainStateSave(start.state))
        for state in start.state.values():
            np.testing.assert_array_equal(state["joined"], STATES[3]["joined"])
    # The target is what transforms of all sources lead to: the record alone tells the versions.
    begun = {"a": ot.Source(saved(tmp_path / "begun_anew", 0, provenance=()), list_of(3))}
    joined = ot.restore(begun, {"a": {"renamed": TARGET["joined"]}}, [T.Rename([("a/joined", "a/renamed")])])
    np.testing.assert_array_equal(joined["a"]["renamed"], STATES[3]["joined"])
    told = {"told": ot.Source(tmp_path / "told", list_of(3))}
    assert "2 versions lead to the target" in problem_of(told, {"told": TARGET}).message
    assert "there is no target" in problem_of(told, None).message


def test_a_record_of_plain_rules_is_asked_about(tmp_path):
    begun = saved(tmp_path / "begun", 0, provenance=())
    plan = ot.plan_restore(begun, STATES[1], [RENAME])
    path = saved(tmp_path / "run", 1, provenance=plan.provenance)
    problem = problem_of(path, TARGET, list_of(3))
    assert "rules without a name were applied" in problem.message and "since('rename')" in str(problem.fix)
    restored = ot.restore(path, TARGET, list_of(3).since("rename"))
    np.testing.assert_array_equal(restored["joined"], STATES[3]["joined"])
    # And the other way round.
    assert "not those given" in problem_of(of_version(tmp_path / "other", 1), STATES[1], [RENAME]).message


def test_migrations_recorded_after_a_gap():
    """What was recorded before it counts no more; what was recorded since is all that is known."""
    chain = record_rules(list_of(3).steps)
    asked = ResumeContext(chain, "own step", None, False, "/here", "orbax")
    before, since = (make_entry("/here", "orbax", chain[:count]) for count in (2, 1))
    gap = (before, UNRECORDED)
    assert "nothing records which migrations" in decide(gap, asked).problem[0]
    assert [list(decide(lineage, asked).skipped) for lineage in [(before,), (*gap, since)]] == [[0, 1], [0]]
    answered = make_entry("/here", "orbax", chain[:2], is_resuming=True)
    rest = make_entry("/here", "orbax", chain[2:], continues=True)
    assert list(decide((*gap, answered), asked).skipped) == [0, 1]
    assert decide((*gap, answered, rest), asked).is_resuming
    # One of the middle alone is no beginning of the list, whatever the record before the gap has.
    what, _ = decide((*gap, make_entry("/here", "orbax", chain[1:2])), asked).problem
    assert "missing in the record: rename; applied: swap; missing in the record: join" in what


def test_a_run_from_scratch_has_all_of_them(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        start = ot.restore_or_initialize(manager, STATES[2], transforms=list_of(2), init_fn=lambda: STATES[2])
        manager.save(0, args=ot.args.TrainStateSave(start.state))
    np.testing.assert_array_equal(ot.restore(tmp_path, TARGET, list_of(3))["joined"], STATES[3]["joined"])


def test_transforms_of_the_source_come_before(tmp_path):
    begun = saved(tmp_path / "begun", 0, provenance=())
    old = ot.convert(begun, tmp_path / "old", [T.Rename([("a", "first")])]) and tmp_path / "old"
    source = ot.Source(old, [T.Rename([("first", "a")])])
    problem_of(source, TARGET, list_of(3))  # its record has a rule that is not the source's
    stock = ocp.StandardCheckpointer()
    stock.save(tmp_path / "stock", {"first": A, "c": B})
    stock.close()
    source = ot.Source(tmp_path / "stock", [T.Rename([("first", "a")])])
    plan = ot.plan_restore(source, STATES[2], list_of(2))
    path = saved(tmp_path / "run", 2, provenance=plan.provenance)
    again = ot.restore(path, TARGET, list_of(3))
    np.testing.assert_array_equal(again["joined"], STATES[3]["joined"])


def test_a_file_of_migrations_has_the_digests_of_the_list(tmp_path, capsys):
    rules = [
        ["rename", [["a", "b"]]],
        ["swap", [["b", "c"], ["c", "b"]]],
        ["join", [{"transform": "Concat", "patterns": ["b", "c"], "into": "joined", "axis": 0}]],
    ]
    file = tmp_path / "history.json"
    file.write_text(json.dumps({"migrations": rules}))
    path = of_version(tmp_path, 2)
    assert main(["convert", str(path), str(tmp_path / "converted"), "--map", str(file)]) == 0
    np.testing.assert_array_equal(ot.restore(tmp_path / "converted", TARGET)["joined"], STATES[3]["joined"])
    assert main(["plan", str(path), "--target", str(tmp_path / "converted"), "--map", str(file)]) == 0
    assert "migrations: 2 of 3 were applied before: rename, swap" in capsys.readouterr().out
    for wrong in ([["x", [{"transform": "Nothing"}]]], [["x", 1]], [["x"]], [["x", []], ["x", []]]):
        file.write_text(json.dumps({"migrations": wrong}))
        assert main(["convert", str(path), str(tmp_path / "no"), "--map", str(file)]) == 2
