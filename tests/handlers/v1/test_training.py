"""Orbax v1's `training.Checkpointer` with our context: steps, policies, and transforms that happen once in a run."""

import contextlib
import functools
import gc
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.handlers.v1 import saving
from orbax_t5x.provenance.records import UNRECORDED
from tests.support.orbax_v1 import abstract_of, assert_same, flip_a_byte

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")

SWAP = ot.transforms.Rename([("x", "y"), ("y", "x")])
OTHER = ot.transforms.Rename([("y", "z"), ("z", "y")])
RULE = {"text": "f", "digest": "0"}
STATE = {name: np.full(3, value, np.float32) for name, value in (("x", 1), ("y", 2), ("z", 3))}


def tree(step=0):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharded = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8) + step, NamedSharding(mesh, P("x", "y")))
    return {"w": sharded, "n": {"b": jnp.arange(3), "host": np.ones(2)}, "step": step}


def abstract(step=0):
    return ot.v1.AbstractTrainState(abstract_of(tree(step)))


# -- steps


@pytest.mark.slow
@pytest.mark.parametrize("entered", [True, False], ids=["entered", "given"])
def test_steps_are_saved_and_loaded(tmp_path, entered):
    """Inside the context, and by a Checkpointer that has it."""
    made = ot.v1.context()
    with made if entered else ocp.Context(made) as active:
        given = {} if entered else {"context": active}
        with ocp.training.Checkpointer(tmp_path, **given) as checkpointer:
            assert checkpointer.save(0, tree(0), metrics={"loss": 1.0}, custom_metadata={"note": "first"})
            response = checkpointer.save_async(1, tree(1))
            assert response.result()
            assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0, 1]
            assert checkpointer.latest.step == 1
            for step in range(2):
                assert_same(checkpointer.load(step, abstract(step)), tree(step))
            assert_same(checkpointer.load(checkpointer.latest, abstract(1)), tree(1))
            assert_same(checkpointer.load(None, abstract(1)), tree(1))
            assert_same(checkpointer.load(1), tree(1))
            several = checkpointer.load_checkpointables(0, {"state": abstract(0)})
            assert_same(several["state"], tree(0))
            told = checkpointer.metadata(0)
            assert told.metrics == {"loss": 1.0} and told.custom_metadata == {"note": "first"}
            assert told.metadata["w"].shape == (8, 8)
    assert {path.parent.parent.name for path in tmp_path.rglob("_CHECKSUMS.json")} == {"0", "1"}
    assert ot.latest_step(tmp_path) == 1
    assert_same(ot.restore(tmp_path, abstract_of(tree(1))), tree(1))


@pytest.mark.slow
def test_policies(tmp_path):
    training = ocp.training
    saved = training.save_decision_policies.FixedIntervalPolicy(2)
    kept = training.preservation_policies.LatestN(2)
    with ot.v1.context():
        with training.Checkpointer(tmp_path, save_decision_policy=saved, preservation_policy=kept) as checkpointer:
            done = [checkpointer.save(step, tree(step)) for step in range(8)]
            assert done == [True, False] * 4
            assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [4, 6]
            with pytest.raises(training.errors.StepAlreadyExistsError):
                checkpointer.save(6, tree(6))
            assert checkpointer.save(6, tree(9), overwrite=True)
            assert_same(checkpointer.load(6, abstract(9)), tree(9))


def test_several_checkpointables_of_a_step(tmp_path):
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(3, {"model": tree(3), "notes": {"a": 1}})
        loaded = checkpointer.load_checkpointables(3, {"model": abstract(3), "notes": None})
        assert_same(loaded["model"], tree(3))
        assert loaded["notes"] == {"a": 1}
        response = checkpointer.save_checkpointables_async(4, {"model": tree(4)})
        assert response.result()
        assert_same(checkpointer.load(4, abstract(4), checkpointable_name="model"), tree(4))


@pytest.mark.slow
def test_steps_of_stock_orbax_and_of_version_0(tmp_path):
    """Theirs load by a plan, ours load by them."""
    with ocp.training.Checkpointer(tmp_path) as stock:
        stock.save(0, tree(0))
    with v0.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        manager.save(1, args=v0.args.Composite(state=v0.args.StandardSave(tree(1))))
        manager.wait_until_finished()
    with v0.CheckpointManager(tmp_path, item_handlers={"state": ot.TrainStateHandler()}) as manager:
        manager.save(2, args=v0.args.Composite(state=ot.args.TrainStateSave(tree(2))))
        manager.wait_until_finished()
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path) as ours:
        ours.save(3, tree(3))
        for step in range(4):
            assert_same(ours.load(step, abstract(step)), tree(step))
    with ocp.training.Checkpointer(tmp_path) as stock:
        assert_same(stock.load(3, abstract_of(tree(3))), tree(3))
        assert_same(stock.load(3), tree(3))
    with v0.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        restored = manager.restore(3, args=v0.args.Composite(state=v0.args.StandardRestore(abstract_of(tree(3)))))
        assert_same(restored["state"], tree(3))
    with v0.CheckpointManager(tmp_path, item_handlers={"state": ot.TrainStateHandler()}) as manager:
        restored = manager.restore(3, args=v0.args.Composite(state=ot.args.TrainStateRestore(abstract_of(tree(3)))))
        assert_same(restored["state"], tree(3))


@pytest.mark.slow
def test_records_equal_those_of_stock_orbax(tmp_path):
    for name, made in (("ours", ot.v1.context()), ("stock", ocp.Context())):
        with made:
            ocp.save_checkpointables(tmp_path / name / "0", {"state": tree(), "model": tree()})
            with ocp.training.Checkpointer(tmp_path / name) as checkpointer:
                checkpointer.save(1, tree())
    for step in "01":
        ours, stock = (
            json.loads((tmp_path / name / step / "_CHECKPOINT_METADATA").read_text()) for name in ("ours", "stock")
        )
        assert ours["item_handlers"] == stock["item_handlers"]
        ours, stock = (
            json.loads((tmp_path / name / step / "state" / "_METADATA").read_text()) for name in ("ours", "stock")
        )
        assert ours.pop("custom_metadata").keys() == {"orbax_t5x"}
        assert ours == {name: value for name, value in stock.items() if name != "custom_metadata"}


# -- what fails


def files_below(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


@pytest.mark.filterwarnings("ignore:coroutine '_create_paths' was never awaited:RuntimeWarning")
def test_a_state_that_cannot_be_stored_leaves_the_steps_as_they_were(tmp_path):
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, tree(0))
        before = files_below(tmp_path)
        with pytest.raises(UnsupportedCheckpointError, match="empty"):
            checkpointer.save(1, {"empty": np.zeros((0,)), "w": np.ones(2)})
        gc.collect()
        assert checkpointer.latest.step == 0
        assert files_below(tmp_path) == before
        # By its usual policy Orbax saves nothing as long as it takes the refused save for one that is going on.
        assert checkpointer.save(2, tree(2), force=True)
        assert_same(checkpointer.load(2, abstract(2)), tree(2))


@pytest.mark.slow
def test_a_write_that_fails_is_typed_and_leaves_nothing(tmp_path, monkeypatch):
    def full(directory, held):
        raise OSError(28, "No space left on device")

    with ot.v1.context():
        with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(0, tree(0))
        before = files_below(tmp_path / "run")
        with monkeypatch.context() as patch:
            patch.setattr(saving, "_publish_sums", full)
            failing = ocp.training.Checkpointer(tmp_path / "run")
            with pytest.raises(CheckpointIOError) as raised:
                failing.save(1, tree(1))
            assert raised.value.errno == 28
            with contextlib.suppress(CheckpointIOError):  # Orbax may tell it once more
                failing.close()
            with pytest.raises(CheckpointIOError):
                ocp.save(tmp_path / "free" / "3", tree(3))
        assert files_below(tmp_path / "run") == before
        assert files_below(tmp_path / "free") == []
        with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(2, tree(2))
            assert_same(checkpointer.load(None, abstract(2)), tree(2))


def test_a_damaged_step_is_told_and_the_one_before_it_loads(tmp_path):
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path) as checkpointer:
        noise = np.random.default_rng(0).integers(0, 255, (256, 1024), np.uint8)
        for step in range(2):
            checkpointer.save(step, {"w": noise})
        flip_a_byte(tmp_path / "1" / "state")
        with pytest.raises(CorruptCheckpointError):
            checkpointer.load(None, ot.v1.AbstractTrainState({"w": noise}))
        assert_same(checkpointer.load(0, ot.v1.AbstractTrainState({"w": noise})), {"w": noise})


# -- transforms happen once within a run


def recorded(root, step, name="state"):
    metadata = json.loads((root / str(step) / name / "_METADATA").read_text())
    return metadata["custom_metadata"]["orbax_t5x"]["provenance"]


@functools.cache
def context_of(root, **keywords):
    return ot.v1.context(**keywords)


def load(root, step, transforms=(), **keywords):
    with context_of(root):
        state = ocp.load(root / str(step), ot.v1.AbstractTrainState(STATE, transforms, **keywords))
    return {name: float(array[0]) for name, array in state.items()}


def save(root, step, state=STATE, **keywords):
    with ot.v1.context(**keywords) if keywords else context_of(root):
        ocp.save(root / str(step), state)


def saved_source(tmp_path):
    ocp.save(tmp_path / "source", STATE)
    return tmp_path / "source"


@pytest.mark.slow
def test_a_run_that_was_initialised_is_not_transformed_again(tmp_path):
    plan = ot.plan_restore(saved_source(tmp_path), STATE, [SWAP])
    root = tmp_path / "run"
    save(root, 0, plan.execute(), provenance=plan.provenance)
    save(root, 1, plan.execute(), provenance=plan.provenance)
    for step in range(2):
        assert [entry["text"] for entry in recorded(root, step)] == ["Rename((('x', 'y'), ('y', 'x')))"]
        assert load(root, step, [SWAP]) == {"x": 2.0, "y": 1.0, "z": 3.0}
    with pytest.raises(RestorePlanError, match="is_resuming"):
        load(root, 1, [OTHER])
    assert load(root, 1, [OTHER], is_resuming=True) == {"x": 2.0, "y": 1.0, "z": 3.0}
    # The answer is remembered with the next save, and a new process asks no second time.
    with ot.v1.context(), ocp.training.Checkpointer(root) as checkpointer:
        state = checkpointer.load(1, ot.v1.AbstractTrainState(STATE, [OTHER], is_resuming=True))
        checkpointer.save(2, state)
    assert load(root, 2, [OTHER]) == {"x": 2.0, "y": 1.0, "z": 3.0}


def save_partially(path, state, *contexts):
    for name, context in zip(state, itertools.cycle(contexts)):
        with context:
            ocp.partial.save(path, {name: state[name]})
    ocp.partial.finalize(path)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_partial_saves_record_what_loads_led_to(tmp_path, use_ocdbt):
    swap = ot.transforms.Rename([("a", "b"), ("b", "a")])
    state = {name: np.full(2, ord(name), np.float32) for name in "ab"}
    ocp.save(tmp_path / "source", state)
    context = ot.v1.context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        swapped = ocp.load(tmp_path / "source", ot.v1.AbstractTrainState(state, swap))
    save_partially(tmp_path / "merged", swapped, context)
    with context:
        again = ocp.load(tmp_path / "merged", ot.v1.AbstractTrainState(state, swap))
    assert {name: chr(int(leaf[0])) for name, leaf in again.items()} == {"a": "b", "b": "a"}


@pytest.mark.parametrize("where", ["a stock context", "two contexts"])
def test_partial_saves_of_differing_histories_ask(tmp_path, where):
    swap = ot.transforms.Rename([("a", "b"), ("b", "a")])
    state = {name: np.full(2, ord(name), np.float32) for name in "ab"}
    contexts = (
        [ocp.Context()]
        if where == "a stock context"
        else [ot.v1.context(provenance=()), ot.v1.context(provenance=[RULE])]
    )
    save_partially(tmp_path / "merged", state, *contexts)
    for load in (ot.restore, ot.v1.load_and_transform):
        with pytest.raises(RestorePlanError, match="nothing records what was applied"):
            load(tmp_path / "merged", state, swap)
    assert ot.restore(tmp_path / "merged", state)["a"][0] == ord("a")


def test_a_save_that_knows_nothing_is_unrecorded_and_asks(tmp_path):
    """The root has a step, and another context may have changed its state."""
    save(tmp_path, 0)
    assert recorded(tmp_path, 0) == []
    assert load(tmp_path, 0, [SWAP]) == {"x": 2.0, "y": 1.0, "z": 3.0}
    with ot.v1.context():
        ocp.save(tmp_path / "1", STATE)
    assert recorded(tmp_path, 1) == [UNRECORDED]
    assert load(tmp_path, 1) == {"x": 1.0, "y": 2.0, "z": 3.0}
    with pytest.raises(RestorePlanError, match="is_resuming"):
        load(tmp_path, 1, [SWAP])
    save(tmp_path, 2, provenance=())
    assert recorded(tmp_path, 2) == []


def test_steps_of_a_run_go_on_from_whoever_wrote_them(tmp_path):
    """From version 0 to v1 and back: one lineage for each root and item."""
    plan = ot.plan_restore(saved_source(tmp_path), STATE, [SWAP])
    with v0.CheckpointManager(tmp_path / "run", item_handlers={"state": ot.TrainStateHandler()}) as manager:
        args = ot.args.TrainStateSave(STATE, provenance=plan.provenance)
        manager.save(0, args=v0.args.Composite(state=args))
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, checkpointer.load(0, ot.v1.AbstractTrainState(STATE)))
    assert recorded(tmp_path / "run", 1) == recorded(tmp_path / "run", 0) != [UNRECORDED]
    with v0.CheckpointManager(tmp_path / "run", item_handlers={"state": ot.TrainStateHandler()}) as manager:
        state = manager.restore(1, args=v0.args.Composite(state=ot.args.TrainStateRestore(STATE)))["state"]
        manager.save(2, args=v0.args.Composite(state=ot.args.TrainStateSave(state)))
    assert recorded(tmp_path / "run", 2) == recorded(tmp_path / "run", 0)


def test_a_run_that_begins_with_a_load_records_it(tmp_path):
    save(tmp_path / "run", 0, provenance=())
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        source = saved_source(tmp_path)
        state = checkpointer.load(0, ot.v1.AbstractTrainState(STATE, [SWAP], source=source))
        checkpointer.save(1, state)
    assert state["x"][0] == 2.0
    assert [entry["text"] for entry in recorded(tmp_path / "run", 1)] == [SWAP.describe()]


def test_a_load_without_a_target_carries_the_record_along(tmp_path):
    save(tmp_path, 0, provenance=())
    with ot.v1.context(), ocp.training.Checkpointer(tmp_path) as checkpointer:
        state = checkpointer.load(0)
        checkpointer.save(1, state)
    assert recorded(tmp_path, 1) == []


def test_each_checkpointable_has_a_lineage_of_its_own(tmp_path):
    for name, provenance in (("student", ()), ("teacher", [RULE])):
        with ot.v1.context(provenance=provenance):
            ocp.save_checkpointables(tmp_path / name / "0", {name: STATE})
    with ot.v1.context():
        state = {name: ocp.load_checkpointables(tmp_path / name / "0")[name] for name in ("student", "teacher")}
        ocp.save_checkpointables(tmp_path / "both" / "0", state)
    assert recorded(tmp_path / "both", 0, "student") == []
    assert recorded(tmp_path / "both", 0, "teacher") == [RULE]
