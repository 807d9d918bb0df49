"""A job starts from its own newest good step, else from a checkpoint, else from scratch; what was applied is kept."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import orbax_t5x as ot
from tests.support.started_runs import (
    SOURCE,
    STATE,
    SWAP,
    SWAPPED,
    T,
    cut_data,
    initial,
    our_args,
    ours,
    recorded,
    values,
)


@pytest.mark.slow
def test_scratch_is_the_function_under_jit_in_the_targets_shardings(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        start = ot.restore_or_initialize(manager, target, init_fn=initial)
    assert start[1:] == (0, "scratch")
    expected = jax.jit(initial)()
    for name, array in start.state.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.sharding == target[name].sharding


def test_a_new_run_begins_with_the_mapped_source(tmp_path, target, source):
    with ours(tmp_path / "root") as manager:
        state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)
        assert (values(state), step, how) == (SWAPPED, 0, "initialized")
        assert state["x"].sharding == target["x"].sharding


def test_only_what_the_source_lacks_is_initialised(tmp_path, target, source):
    wanted = {**target, "new": target["x"]}
    asked = []

    def init():
        return {**initial(), "new": jnp.full(8, 5.0)}

    def traced():
        asked.append("traced")
        return init()

    with ours(tmp_path / "root") as manager:
        state, _, how = ot.restore_or_initialize(manager, wanted, init_from=source, init_fn=traced, transforms=[SWAP])
    assert how == "initialized" and values(state) == {**SWAPPED, "new": 5.0}
    assert asked and isinstance(state["new"], jax.Array) and state["new"].sharding == target["x"].sharding


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_step(tmp_path, target, source):
    root = tmp_path / "root"
    for expected in ("initialized", "resumed", "resumed"):
        with ours(root) as manager:
            state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)
            assert how == expected and values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))
    with ours(root) as manager:
        assert manager.all_steps() == [1, 2, 3]
    shutil.rmtree(source)  # nobody needs it any more
    with ours(root) as manager:
        assert ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)[1:] == (3, "resumed")


def test_step_0_is_a_step(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        manager.save(0, args=our_args(STATE))
        assert ot.restore_or_initialize(manager, target, init_fn=initial)[1:] == (0, "resumed")


def test_nothing_to_begin_with_is_an_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        with pytest.raises(ot.errors.CheckpointNotFoundError, match="init_from= nor init_fn="):
            ot.restore_or_initialize(manager, target)
        with pytest.raises(ot.errors.CheckpointNotFoundError):
            ot.restore_or_initialize(manager, target, init_from=tmp_path / "nowhere", init_fn=initial)


def test_scratch_that_does_not_fit_the_target_is_a_plan_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        with pytest.raises(ot.RestorePlanError) as raised:
            ot.restore_or_initialize(manager, {**target, "more": target["x"]}, init_fn=initial)
        assert [problem.leaf for problem in raised.value.problems] == ["more"]
        with pytest.raises(ot.RestorePlanError) as raised:
            ot.restore_or_initialize(manager, {"x": np.zeros(3, np.float32)}, init_fn=initial)
        assert {problem.leaf for problem in raised.value.problems} == {"x"}


@pytest.mark.slow
def test_scratch_without_a_target_is_all_that_the_function_returns(tmp_path):
    with ours(tmp_path / "root") as manager:
        state, _, how = ot.restore_or_initialize(manager, None, init_fn=initial)
        again = ot.restore_or_initialize(manager, None, init_fn=state)
    assert how == again.how == "scratch"
    assert values(again.state) == values(state)
    jax.tree.map(np.testing.assert_array_equal, state, jax.jit(initial)())


def stock(root, **options):
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))


def standard(root, **options):
    options = ocp.CheckpointManagerOptions(**options)
    return ocp.CheckpointManager(root, options=options, item_handlers=ocp.StandardCheckpointHandler())


MANAGERS = {
    "ours": (ours, our_args),
    "without handlers": (stock, ocp.args.StandardSave),
    "without handlers, our arguments": (stock, our_args),
    "Orbax's handler": (standard, ocp.args.StandardSave),
    "without handlers, PyTree": (stock, ocp.args.PyTreeSave),
}
FORMATS = {
    "numbers": {},
    "prefix": {"step_prefix": "run"},
    "padded": {"step_prefix": "run", "step_format_fixed_length": 8},
    "marked": {"atomicity_options": ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)},
    "format": {"step_name_format": ocp.path.step.standard_name_format(step_prefix="at", step_format_fixed_length=4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MANAGERS)
def test_a_step_of_any_writer_is_resumed(tmp_path, target, source, kind):
    make, args = MANAGERS[kind]
    for step in (3, 4):  # the second manager does not know the state of the root
        with make(tmp_path / "root") as manager:
            manager.save(step, args=args(STATE))
            manager.wait_until_finished()
    for _ in range(2):  # new managers know nothing of what others saved
        with make(tmp_path / "root") as manager:
            call = functools.partial(ot.restore_or_initialize, manager, target, init_from=source, transforms=SWAP)
            if args is our_args:  # it is recorded that nothing is known
                with pytest.raises(ot.RestorePlanError, match="nothing records what was applied"):
                    call()
            start = call(is_resuming=True) if args is our_args else call()
            assert (values(start.state), start.step, start.how) == (SWAPPED, 4, "resumed")
            manager.save(start.step + 1, args=args(start.state))  # and the manager is as good as before
            manager.wait_until_finished()
            manager.delete(5)


@pytest.mark.parametrize("names", FORMATS)
def test_steps_have_the_names_that_the_manager_gives_them(tmp_path, target, names):
    with ours(tmp_path / "root", **FORMATS[names]) as manager:
        manager.save(3, args=our_args(SOURCE))
        manager.save(20, args=our_args(STATE))
        manager.wait_until_finished()
        start = ot.restore_or_initialize(manager, target)
    assert (values(start.state), start.step) == (SWAPPED, 20)


@pytest.mark.slow
def test_steps_with_other_names_are_another_runs(tmp_path, target):
    with ours(tmp_path / "root", step_prefix="other") as other:
        other.save(5, args=our_args(SOURCE))
    with ours(tmp_path / "root", step_prefix="run") as manager:
        assert ot.restore_or_initialize(manager, target, init_fn=initial).how == "scratch"


ITEMS = {
    "handlers": {"item_handlers": {"state": ot.TrainStateHandler(), "data": ocp.JsonCheckpointHandler()}},
    "names": {"item_names": ("state", "data")},
    "nothing": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("item", ["state", None])
def test_one_of_several_items_is_the_state(tmp_path, target, source, items, item):
    root = tmp_path / "root"

    def start():
        with ocp.CheckpointManager(root, **ITEMS[items]) as manager:
            state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP, item=item)
            args = {"state": our_args(state), "data": ocp.args.JsonSave({"at": step})}
            manager.save(step + 1, args=ocp.args.Composite(**args))
        return values(state), step, how

    assert start() == (SWAPPED, 0, "initialized")
    assert start() == (SWAPPED, 1, "resumed")
    assert len(recorded(root / "1" / "state")) == 1
    assert recorded(root / "1" / "state")[0]["digest"] is not None
    assert recorded(root / "2" / "state") == recorded(root / "1" / "state")


def test_an_item_that_no_step_has_is_an_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        manager.save(1, args=our_args(STATE))
        manager.wait_until_finished()
        with pytest.raises(ot.errors.CheckpointNotFoundError, match="'stat'"):
            ot.restore_or_initialize(manager, target, item="stat", init_fn=initial)


def test_keywords_are_those_of_restore(tmp_path, target, source):
    halves = {"params": {"x": jax.ShapeDtypeStruct((8,), np.float32)}}
    seen = []
    with ours(tmp_path / "root") as manager:
        start = ot.restore_or_initialize(
            manager,
            halves,
            init_from=source,
            transforms=T.Rename([("x", "params/x")]),
            strict=False,
            dtype=jnp.bfloat16,
            verify="full",
            memory_limit_bytes=1 << 20,
            progress=lambda *told: seen.append(told),
            limits=ot.Limits(),
        )
    assert start.state["params"]["x"].dtype == jnp.bfloat16 and seen
    with ours(tmp_path / "root") as manager, pytest.raises(TypeError, match="item"):
        ot.restore_or_initialize(manager, target, init_from=source, item=target)


@pytest.mark.slow
def test_a_checkpointer_of_orbax_v1_is_a_manager(tmp_path, target, source):
    """With the same lineage rules: what was applied is recorded, and a restart asks nothing."""
    root = tmp_path / "root"
    for expected in (("scratch", 0), ("initialized", 0), ("resumed", 1), ("resumed", 2)):
        begin = {"init_fn": initial} if expected[0] == "scratch" else {"init_from": source, "transforms": SWAP}
        with ot.v1.context(), v1.training.Checkpointer(root) as checkpointer:
            state, step, how = ot.restore_or_initialize(checkpointer, target, **begin)
            assert (how, step) == expected
            if how != "scratch":
                assert values(state) == SWAPPED
                checkpointer.save_async(step + 1, state)
                assert ot.restore_or_initialize(checkpointer, target)[1:] == (step + 1, "resumed")
    for step in (1, 2):
        assert [entry["text"] for entry in recorded(root / str(step) / "state")] == ["Rename((('x', 'y'), ('y', 'x')))"]


def test_a_damaged_step_of_a_checkpointer_is_passed_over(tmp_path, target):
    with ot.v1.context(), v1.training.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE)
        cut_data(tmp_path / "2" / "state")
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            assert ot.restore_or_initialize(checkpointer, target)[1:] == (1, "resumed")
