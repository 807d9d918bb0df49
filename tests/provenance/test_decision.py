"""Transforms happen once within a run: the table of decisions, and the histories that users had trouble with."""

import functools
import itertools
import json
import logging
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.decision import decide
from orbax_t5x.provenance.history import compare
from orbax_t5x.provenance.question import ResumeContext
from orbax_t5x.provenance.records import UNRECORDED, make_entry
from tests.support.recorded_chains import chain_digest

T = ot.transforms
SWAP = T.Rename([("x", "y"), ("y", "x")])
OTHER = T.Rename([("y", "z"), ("z", "y")])
STATE = {name: np.full(3, value, np.float32) for name, value in (("x", 1), ("y", 2), ("z", 3))}
TARGET = {name: np.zeros(3, np.float32) for name in STATE}
SWAPPED = {"x": 2.0, "y": 1.0, "z": 3.0}
PLAIN = {"x": 1.0, "y": 2.0, "z": 3.0}


def opaque(state, target):
    return state


# A lambda on purpose: it is what has no digest.
OPAQUE = lambda state, target: opaque(state, target)  # noqa: E731


@functools.cache
def handler_of(root):
    return ot.TrainStateHandler()


def manager_of(root):
    return ocp.CheckpointManager(root, item_handlers=handler_of(root))


def save(root, step, state=STATE, **keywords):
    with manager_of(root) as manager:
        manager.save(step, args=ot.args.TrainStateSave(state, **keywords))


def restore(root, step, transforms=(), **keywords):
    with manager_of(root) as manager:
        return manager.restore(step, args=ot.args.TrainStateRestore(TARGET, transforms, **keywords))


def values(state):
    return {name: float(array[0]) for name, array in state.items()}


def problem_of(call, *args, **keywords):
    with pytest.raises(ot.RestorePlanError) as raised:
        call(*args, **keywords)
    (problem,) = raised.value.problems
    assert problem.kind == "provenance"
    return problem


def recorded(root, step, item="default"):
    text = (root / str(step) / item / "_METADATA").read_text()
    return json.loads(text)["custom_metadata"]["orbax_t5x"]["provenance"]


# -- the table

MINE, THEIRS = record_rules([SWAP]), record_rules([OTHER])
WITHOUT_DIGEST = record_rules([OPAQUE])
SELECTS = record_rules([T.Keep("x")])
NOTHING = ()


def made(chain, **answer):
    return make_entry("/source", "orbax", chain, **answer)


# Record, chain, and what happens to a restore of an own step, to any other restore, and to a conversion.
TABLE = {
    "no record": (None, MINE, "apply apply apply"),
    "nothing was applied": ((), MINE, "apply apply apply"),
    "a source without transforms": ((made(NOTHING),), MINE, "apply apply apply"),
    "unrecorded": ((UNRECORDED,), MINE, "ask ask apply!"),
    "unrecorded after an entry": ((made(MINE), UNRECORDED), MINE, "ask ask apply!"),
    "the same digest": ((made(MINE),), MINE, "once once! once!"),
    "an older entry has the same": ((made(MINE), made(THEIRS)), MINE, "problem problem problem"),
    "unrecorded before other rules": ((UNRECORDED, made(THEIRS)), MINE, "ask ask apply!"),
    "unrecorded between the same and others": ((made(MINE), UNRECORDED, made(THEIRS)), MINE, "ask ask apply!"),
    "an answer on top of what nobody recorded": ((UNRECORDED, made(MINE)), MINE, "once once! once!"),
    "given without a digest": ((made(MINE),), WITHOUT_DIGEST, "ask ask apply!"),
    "recorded without a digest": ((made(WITHOUT_DIGEST),), MINE, "ask ask apply!"),
    "neither has a digest": ((made(WITHOUT_DIGEST),), WITHOUT_DIGEST, "ask ask apply!"),
    "other digests": ((made(THEIRS),), MINE, "problem apply+ apply+"),
    "selecting, unrecorded": ((UNRECORDED,), SELECTS, "apply apply apply!"),
    "selecting, other digests": ((made(MINE),), SELECTS, "apply apply+ apply+"),
    "selecting, without a digest": ((made(WITHOUT_DIGEST),), SELECTS, "apply apply apply!"),
    "no transforms": ((made(MINE),), NOTHING, "apply apply apply"),
}


def decided(record, chain, caller, answer=None, *, has_fallback=False):
    return decide(record, ResumeContext(chain, caller, answer, has_fallback, "/here", "orbax"))


def outcome(decision):
    if decision.problem is not None:
        return (
            "ask" if "cannot be told" in decision.problem[0] or "nothing records" in decision.problem[0] else "problem"
        )
    return ("once" if decision.is_resuming else "apply") + "!" * bool(decision.warnings) + "+" * bool(decision.note)


@pytest.mark.parametrize("row", TABLE)
def test_each_row_of_the_table(row):
    record, chain, wanted = TABLE[row]
    decisions = [decided(record, chain, caller) for caller in ("own step", "restore", "convert")]
    assert " ".join(map(outcome, decisions)) == wanted


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("caller", ["own step", "restore", "convert"])
def test_an_answer_is_followed_and_remembered(row, caller):
    record, chain, _ = TABLE[row]
    if not chain:
        return
    goes_on = decided(record, chain, caller, True)
    assert goes_on.is_resuming and goes_on.problem is None
    once = compare(record or (), chain).relation == "equal"
    starts = decided(record, chain, caller, False)
    if once and caller == "own step":
        assert str(starts.problem[1]) == "remove is_resuming=False"
    else:
        assert not starts.is_resuming and starts.problem is None
    if None not in [rule.digest for rule in chain]:
        # At the next start nobody asks again.
        for decision in (goes_on, starts):
            if decision.problem is None:
                again = decided(decision.lineage, chain, "own step")
                assert again.problem is None


def test_a_fallback_takes_the_exemption_away():
    for record, chain in (((UNRECORDED,), SELECTS), ((made(MINE),), SELECTS)):
        assert decided(record, chain, "own step", has_fallback=True).problem is not None


def test_the_difference_is_shown_rule_by_rule():
    edited = record_rules([T.Rename([("x", "y"), ("y", "z")])])
    message, fix = map(str, decided((made(MINE),), edited, "own step").problem)
    assert message.count("('y', 'x')") == message.count("('y', 'z')") == 1
    assert "is_resuming=True" in fix and "is_resuming=False" in fix


# -- histories


def test_the_documented_resume(tmp_path):
    save(tmp_path / "old", 0, provenance=())
    plan = ot.plan_restore(tmp_path / "old", TARGET, SWAP)
    state = plan.execute()
    assert values(state) == SWAPPED
    save(tmp_path / "run", 0, state, provenance=plan.provenance)
    save(tmp_path / "run", 1, state)  # said once, it holds
    assert recorded(tmp_path / "run", 1) == recorded(tmp_path / "run", 0)
    assert values(restore(tmp_path / "run", 1, SWAP)) == SWAPPED
    save(tmp_path / "run", 2, state)  # a handler that restored nothing reads the newest step
    assert recorded(tmp_path / "run", 2) == recorded(tmp_path / "run", 0)


def test_a_save_that_knows_nothing_makes_the_next_restore_ask_once(tmp_path):
    save(tmp_path / "old", 0, provenance=())
    state = ot.restore(tmp_path / "old", TARGET, SWAP)
    save(tmp_path / "run", 0, state)
    assert recorded(tmp_path / "run", 0) == [{"unrecorded": True}]
    problem_of(restore, tmp_path / "run", 0, SWAP)
    problem_of(ot.restore, tmp_path / "run", TARGET, SWAP)
    assert values(restore(tmp_path / "run", 0, SWAP, is_resuming=True)) == SWAPPED
    save(tmp_path / "run", 1, state)
    assert values(restore(tmp_path / "run", 1, SWAP)) == SWAPPED
    # Evaluation needs no answer.
    with manager_of(tmp_path / "run") as manager:
        args = ot.args.TrainStateRestore({"x": TARGET["x"]}, T.Keep("x"))
        assert values(manager.restore(0, args=args)) == {"x": 2.0}


def test_partials_tell_their_rules_apart(tmp_path):
    def swap(one, other):
        return functools.partial(ot.state_utils.apply_assignment_map, assignment_map=[(one, other), (other, one)])

    save(tmp_path / "old", 0, provenance=())
    plan = ot.plan_restore(tmp_path / "old", TARGET, [swap("x", "y")], strict=False, fallback=TARGET)
    save(tmp_path / "run", 0, plan.execute(), provenance=plan.provenance)
    again = {"strict": False, "fallback": TARGET}
    assert values(restore(tmp_path / "run", 0, [swap("x", "y")], **again)) == SWAPPED
    problem_of(restore, tmp_path / "run", 0, [swap("y", "z")], **again)


@pytest.mark.slow
def test_edited_rules_are_refused_once(tmp_path):
    save(tmp_path / "old", 0, provenance=())
    plan = ot.plan_restore(tmp_path / "old", TARGET, SWAP)
    save(tmp_path / "run", 0, plan.execute(), provenance=plan.provenance)
    problem = problem_of(restore, tmp_path / "run", 0, OTHER)
    assert "missing in the record" in problem.message and "missing in those given" in problem.message
    state = restore(tmp_path / "run", 0, OTHER, is_resuming=True)
    assert values(state) == SWAPPED
    for step in (1, 2):
        save(tmp_path / "run", step, state, provenance=plan.provenance)  # repeating what was said first is harmless
    for rules in (OTHER, SWAP):
        assert values(restore(tmp_path / "run", 2, rules)) == SWAPPED


def test_a_new_run_on_an_own_step_is_recorded(tmp_path):
    save(tmp_path / "run", 0, provenance=())
    assert values(restore(tmp_path / "run", 0, SWAP, is_resuming=False)) == SWAPPED
    state = restore(tmp_path / "run", 0, SWAP, is_resuming=False)
    save(tmp_path / "run", 1, state)
    assert values(restore(tmp_path / "run", 1, SWAP)) == SWAPPED
    assert str(problem_of(restore, tmp_path / "run", 1, SWAP, is_resuming=False).fix) == "remove is_resuming=False"


def test_a_teacher_by_the_runs_handler_leaves_open_what_is_saved(tmp_path, caplog):
    save(tmp_path / "teacher", 0, provenance=())
    plan = ot.plan_restore(tmp_path / "teacher", TARGET, OTHER)
    save(tmp_path / "run", 0, provenance=plan.provenance)
    handler = ot.TrainStateHandler()
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=handler) as manager:
        student = manager.restore(0, args=ot.args.TrainStateRestore(TARGET))
        args = ot.args.TrainStateRestore(TARGET, SWAP, source=tmp_path / "teacher")
        manager.restore(0, args=args)
        assert handler.provenance[-1]["digest"] == chain_digest([SWAP])
        manager.save(1, args=ot.args.TrainStateSave(student))
        manager.save(2, args=ot.args.TrainStateSave(student))
        manager.save(3, args=ot.args.TrainStateSave(student, provenance=plan.provenance))
        manager.save(4, args=ot.args.TrainStateSave(student))
    assert [recorded(tmp_path / "run", step) for step in (1, 2)] == [[{"unrecorded": True}]] * 2
    assert [recorded(tmp_path / "run", step) for step in (3, 4)] == [list(plan.provenance)] * 2
    (warned,) = [one for one in caplog.records if one.levelno == logging.WARNING and "provenance=" in one.message]
    assert "handler.provenance" in warned.message


def test_a_source_through_an_empty_manager(tmp_path):
    save(tmp_path / "old", 0, provenance=())
    handler = ot.TrainStateHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        args = ot.args.TrainStateRestore(TARGET, SWAP, source=tmp_path / "old")
        state = checkpointer.restore(tmp_path / "old", args=args)
    save(tmp_path / "run", 0, state, provenance=handler.provenance)
    assert values(restore(tmp_path / "run", 0, SWAP)) == SWAPPED


def test_handlers_and_items_share_what_is_theirs(tmp_path):
    """The lineage belongs to root and item; an item of its own has its own."""

    def composite(**items):
        return ocp.args.Composite(**items)

    handlers = {"model": ot.TrainStateHandler(), "ema": ot.TrainStateHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        model = ot.args.TrainStateSave(STATE, provenance=[made(MINE)])
        manager.save(0, args=composite(model=model, ema=ot.args.TrainStateSave(STATE, provenance=())))
    handlers = {"model": ot.TrainStateHandler(), "ema": ot.TrainStateHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        manager.save(1, args=composite(model=ot.args.TrainStateSave(STATE), ema=ot.args.TrainStateSave(STATE)))
    assert recorded(tmp_path, 1, "model") == [made(MINE)] and recorded(tmp_path, 1, "ema") == []
    both = {f"{item}/{name}": leaf for item, name in itertools.product(handlers, STATE) for leaf in [TARGET[name]]}
    rules = T.Rename([("x", "y"), ("y", "x")])
    assert "item=" in str(problem_of(ot.plan_restore, tmp_path, both, rules).fix)
    with pytest.raises(ot.RestorePlanError, match="item="):
        ot.plan_restore(tmp_path / "1", None, SWAP)
    assert values(ot.restore(tmp_path, TARGET, SWAP, item="ema")) == SWAPPED
    assert values(ot.restore(tmp_path, TARGET, SWAP, item="model")) == PLAIN


def test_a_step_without_a_record_after_one_with_it_is_unrecorded(tmp_path):
    save(tmp_path, 0, provenance=())
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(STATE))
    problem_of(restore, tmp_path, 1, SWAP)
    problem_of(ot.restore, tmp_path, TARGET, SWAP)
    assert values(restore(tmp_path, 0, SWAP)) == SWAPPED
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        manager.save(0, args=ocp.args.StandardSave(STATE))
    assert values(restore(tmp_path / "stock", 0, SWAP)) == SWAPPED


def test_a_directory_that_is_no_step_has_no_run(tmp_path):
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "run_1" / "a", args=ot.args.TrainStateSave(STATE, provenance=()))
        checkpointer.save(tmp_path / "run_2" / "a", args=ot.args.TrainStateSave(STATE))
    for name, wanted in (("run_1", []), ("run_2", [UNRECORDED])):
        text = (tmp_path / name / "a" / "_METADATA").read_text()
        assert json.loads(text)["custom_metadata"]["orbax_t5x"]["provenance"] == wanted


@pytest.mark.parametrize("options", [{}, {"step_prefix": "checkpoint"}, {"step_format_fixed_length": 8}])
def test_any_name_of_steps(tmp_path, options):
    def saved(step, **keywords):
        settings = ocp.CheckpointManagerOptions(**options)
        with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler(), options=settings) as manager:
            manager.save(step, args=ot.args.TrainStateSave(STATE, **keywords))
            manager.wait_until_finished()
            plain = manager.restore(step, args=ot.args.TrainStateRestore(TARGET, SWAP))
            return values(plain)

    assert saved(0, provenance=[made(MINE)]) == PLAIN
    assert saved(1) == PLAIN


def test_a_restore_without_arguments_carries_the_record_along(tmp_path):
    save(tmp_path, 0, provenance=[made(MINE)])
    with manager_of(tmp_path) as manager:
        state = manager.restore(0)
        manager.save(1, args=ot.args.TrainStateSave(state))
    assert values(restore(tmp_path, 1, SWAP)) == PLAIN


def test_a_conversion_is_a_source_like_any_other(tmp_path, caplog):
    save(tmp_path / "old", 0, provenance=())
    ot.convert(tmp_path / "old", tmp_path / "converted", SWAP)
    with caplog.at_level(logging.INFO, logger="orbax_t5x"):
        # The same rules again are not applied, and somebody is told.
        again = ot.plan_restore(tmp_path / "converted", TARGET, SWAP)
        assert values(again.execute()) == SWAPPED and "is_resuming=False" in again.warnings[0]
        assert any(record.levelno == logging.WARNING for record in caplog.records)
        caplog.clear()
        # Other rules begin a new run; what was applied before is told and recorded.
        plan = ot.plan_restore(tmp_path / "converted", TARGET, OTHER)
        assert values(plan.execute()) == {"x": 2.0, "y": 3.0, "z": 1.0} and not plan.warnings
        assert any("applied to this state before" in record.getMessage() for record in caplog.records)
    assert [entry["digest"] for entry in plan.provenance] == [chain_digest([SWAP]), chain_digest([OTHER])]
    ot.convert(tmp_path / "converted", tmp_path / "twice", SWAP, is_resuming=False)
    assert values(ot.restore(tmp_path / "twice", TARGET)) == PLAIN


def test_the_lineage_of_several_sources_holds_that_of_each(tmp_path):
    save(tmp_path / "a", 0, provenance=[made(MINE)])
    save(tmp_path / "b", 0)
    sources = {"a": tmp_path / "a", "b": tmp_path / "b"}
    plan = ot.plan_restore(sources, TARGET, T.Overlay(("a", "b")), strict=False)
    before, gap, entry = plan.provenance
    assert gap == {"unrecorded": True, "source": "b"}
    assert before["source"] == "/source" and before["steps"][0]["source"] == "a"
    assert before["steps"][0]["steps"] == made(MINE)["steps"]
    assert entry["source"].keys() == {"a", "b"} and entry["digest"] == chain_digest([T.Overlay(("a", "b"))])


def test_a_problem_of_provenance_is_the_only_one(tmp_path):
    save(tmp_path, 0)
    problem_of(restore, tmp_path, 0, [T.Rename([("nothing", "x")])])


def test_functions_when_a_run_goes_on(tmp_path):
    calls = []

    def with_keyword(state, target, *, is_resuming=False):
        calls.append(is_resuming)
        return state

    def without(state, target):
        raise AssertionError("not called when a run goes on")

    save(tmp_path, 0)
    assert values(restore(tmp_path, 0, [with_keyword, without, SWAP], is_resuming=True)) == PLAIN
    assert calls == [True]


def test_saves_that_are_not_made_change_nothing(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(0, args=ot.args.TrainStateSave(STATE, provenance=()))
        manager.wait_until_finished()
        assert not manager.save(0, args=ot.args.TrainStateSave(STATE, provenance=[made(MINE)]))
        manager.save(1, args=ot.args.TrainStateSave(STATE))
    assert recorded(tmp_path, 1) == []


@pytest.mark.parametrize("kind", ["NumPy", "JAX", "large"])
def test_other_data_of_a_merge_are_other_rules(tmp_path, kind):
    def merge(value):
        head = np.full(3 if kind != "large" else 1 << 19, value, np.float32)
        return T.Merge({"x": jnp.asarray(head) if kind == "JAX" else head}, overwrite=True)

    target = {**TARGET, "x": merge(0.0).from_scratch_state["x"]}
    save(tmp_path / "old", 0, {**STATE, "x": np.ones(target["x"].shape, np.float32)}, provenance=())
    plan = ot.plan_restore(tmp_path / "old", target, merge(1.0))
    save(tmp_path / "run", 0, plan.execute(), provenance=plan.provenance)
    with manager_of(tmp_path / "run") as manager:
        restored = manager.restore(0, args=ot.args.TrainStateRestore(target, merge(1.0)))
        assert restored["x"][0] == 1
        problem_of(manager.restore, 0, args=ot.args.TrainStateRestore(target, merge(5.0)))
    problem_of(ot.restore, tmp_path / "run", target, merge(5.0))
    assert ot.restore(tmp_path / "run", target, merge(5.0), is_resuming=False)["x"][0] == 5


# -- several restores in one process


@pytest.mark.parametrize("again", ["plainly", "as stock"])
def test_a_baseline_that_is_looked_at_makes_the_next_save_unrecorded(tmp_path, caplog, again):
    with manager_of(tmp_path) as manager:
        manager.save(0, args=ot.args.TrainStateSave(STATE, provenance=()))
        manager.wait_until_finished()
        state = manager.restore(0, args=ot.args.TrainStateRestore(TARGET, SWAP))
        assert values(state) == SWAPPED
        if again == "as stock":
            manager.restore(0)
        else:
            manager.restore(0, args=ot.args.TrainStateRestore(TARGET))
        with caplog.at_level(logging.WARNING, logger="orbax_t5x"):
            for step in (1, 2):
                manager.save(step, args=ot.args.TrainStateSave(state))
        (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert "provenance=" in warning.getMessage()
        manager.save(3, args=ot.args.TrainStateSave(state, provenance=[made(MINE)]))
        manager.save(4, args=ot.args.TrainStateSave(state))
    assert [recorded(tmp_path, step) for step in (1, 2)] == [[UNRECORDED]] * 2
    assert [recorded(tmp_path, step) for step in (3, 4)] == [[made(MINE)]] * 2


def test_evaluation_of_steps_of_the_same_lineage_changes_nothing(tmp_path, caplog):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.StandardSave(STATE))
    with caplog.at_level(logging.WARNING, logger="orbax_t5x"):
        states = [restore(tmp_path, step) for step in (1, 0, 1)]
        save(tmp_path, 2, states[-1])
    ours = [one for one in caplog.records if one.name.startswith("orbax_t5x")]
    assert not [one for one in ours if one.levelno == logging.WARNING]
    assert [entry["transforms"] for entry in recorded(tmp_path, 2)] == [None]


@pytest.mark.parametrize("how", ["removed", "renamed", "deleted by the manager"])
@pytest.mark.parametrize("given", [None, ()])
def test_a_root_that_is_begun_anew_has_no_lineage(tmp_path, how, given):
    run = tmp_path / "run"
    save(run, 0, provenance=[made(MINE)])
    restore(run, 0)
    if how == "removed":
        shutil.rmtree(run)
    elif how == "renamed":
        run.rename(tmp_path / "renamed")
    else:
        with manager_of(run) as manager:
            manager.delete(0)
    handler_of.cache_clear()
    save(run, 0, provenance=given)
    assert recorded(run, 0) == ([UNRECORDED] if given is None else [])
    # The entries of the old run are gone: this is the first restore of the new one.
    if given is None:
        problem_of(restore, run, 0, SWAP)
    else:
        save(run, 1, restore(run, 0, SWAP))
        assert [entry["digest"] for entry in recorded(run, 1)] == [chain_digest([SWAP])]


def test_a_save_that_failed_says_nothing(tmp_path):
    save(tmp_path, 0, provenance=())
    with pytest.raises(ot.errors.UnsupportedCheckpointError):
        save(tmp_path, 1, {"x": np.array(["text"])}, provenance=[made(MINE)])
    save(tmp_path, 1)
    assert recorded(tmp_path, 1) == []
