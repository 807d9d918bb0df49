"""What is damage of a step, and what is a step that does not fit: the one is passed over with a warning that names it,
the other is raised.
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from tests.support.damaged_steps import TARGET, save_items, save_single, start, state
from tests.support.started_runs import T, cut, cut_data, flip_a_bit, initial, our_args, ours, values


def save_stock(root):
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state(step)))


def save_state_and_data(root):
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            save = ocp.args.PyTreeSave(state(step))
            manager.save(step, args=ocp.args.Composite(state=save, data=ocp.args.JsonSave({"a": step})))


def removed(item):
    shutil.rmtree(item)


def emptied(item):
    shutil.rmtree(item)
    item.mkdir()


def without_names(item):
    (item / "_METADATA").unlink()


def a_file(item):
    shutil.rmtree(item)
    item.write_bytes(b"")


LOSSES = [removed, emptied, without_names, a_file]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize(
    ("save", "item"), [(save_single, "default"), (save_stock, "default"), (save_state_and_data, "state")]
)
def test_a_step_that_lost_its_item_is_passed_over(tmp_path, save, item, lose):
    save(tmp_path)
    lose(tmp_path / "2" / item)
    for named in ({}, {"item": item}):
        step, how, restored, said = start(tmp_path, **named)
        assert (step, how, int(restored["step"])) == (1, "resumed", 1)
        assert len(said) == 1 and said[0].startswith("step 2 is skipped: ") and f"2/{item}" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("lose", LOSSES)
def test_one_item_of_several_that_is_lost_is_not_left_out(tmp_path, lose):
    save_items(tmp_path)
    lose(tmp_path / "2" / "ema")
    for target in (None, {"state": TARGET, "ema": TARGET}):
        step, _, restored, said = start(tmp_path, target)
        assert step == 1 and restored.keys() == {"state", "ema"} and len(said) == 1 and "2/ema" in said[0]
    match = r"2/ema: .*\nFix: restore only another one with item=: 'state'"
    with pytest.raises(ot.errors.CorruptCheckpointError, match=match):
        ot.restore(tmp_path, None)
    assert ot.restore(tmp_path, TARGET, item="state")["step"] == 2
    step, _, restored, said = start(tmp_path, item="state")
    assert (step, int(restored["step"]), said) == (2, 2, [])


def test_items_that_a_step_never_had_are_no_damage(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_names=("state", "ema")) as manager:
        both = {name: ocp.args.StandardSave(state(1)) for name in ("state", "ema")}
        manager.save(1, args=ocp.args.Composite(**both))
        manager.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave(state(2))))
    assert ot.restore(tmp_path, TARGET)["step"] == 2
    assert start(tmp_path)[0] == 2
    step, how, _, said = start(tmp_path, item="ema")
    assert (step, how, said) == (1, "resumed", [])


def test_the_record_of_an_item_that_stands_alone_among_others_goes_on(tmp_path):
    """The item's name is that of its lineage, whatever lies beside it."""
    source = tmp_path / "source"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, state(5))
    root = tmp_path / "run"
    handlers = {"state": ot.TrainStateHandler(), "data": ocp.JsonCheckpointHandler()}
    rules = [T.Rename([("w", "w")], require_match=True)]
    for step in (0, 1):
        with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
            found = ot.restore_or_initialize(manager, TARGET, init_from=source, transforms=rules)
            save = ot.args.TrainStateSave(found.state)
            manager.save(step + 1, args=ocp.args.Composite(state=save, data=ocp.args.JsonSave({})))
        with ot.open_checkpoint(root, item="state") as opened:
            (entry,) = opened.metadata["custom_metadata"]["orbax_t5x"]["provenance"]
            assert entry["text"].startswith("Rename")


def test_metadata_that_the_checksums_contradict_are_damage(tmp_path):
    save_single(tmp_path)
    metadata = tmp_path / "2" / "default" / "_METADATA"
    data = metadata.read_bytes()
    assert data.count(b'"key": "w"') == 1
    metadata.write_bytes(data.replace(b'"key": "w"', b'"key": "v"'))
    step, how, _, said = start(tmp_path)
    assert (step, how) == (1, "resumed") and len(said) == 1


def test_a_shape_that_the_checksums_contradict_is_damage(tmp_path):
    handler = ot.TrainStateHandler(use_ocdbt=False)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        for step in (1, 2):
            manager.save(step, args=ot.args.TrainStateSave(state(step)))
    metadata = tmp_path / "2" / "default" / "w" / ".zarray"
    text = metadata.read_text()
    assert '"shape":[8]' in text.replace(" ", "")
    metadata.write_text(text.replace(" ", "").replace('"shape":[8]', '"shape":[9]'))
    step, how, _, said = start(tmp_path)
    assert (step, how) == (1, "resumed") and len(said) == 1 and "checksums are of another array" in said[0]


def test_a_step_number_that_does_not_fit_is_no_damage(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        for step in (2**31 - 1, 2**31):
            manager.save(step, args=ot.args.TrainStateSave({"w": jnp.zeros(8), "step": np.array(step)}))
    for restore in (lambda: ot.restore(tmp_path, TARGET), lambda: start(tmp_path)):
        with pytest.raises(ot.errors.RestorePlanError, match="step: the value 2147483648 does not fit int32") as caught:
            restore()
        assert [problem.kind for problem in caught.value.problems] == ["dtype"]
        assert str(caught.value.problems[0].fix) == "give the target the stored dtype"


def test_a_step_with_placeholders_is_whole(tmp_path):
    """Orbax saves `...` as what it is; nothing is read for it, and nothing of it is damaged."""
    saved = {**state(3), "more": ...}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(3, args=ot.args.TrainStateSave(saved))
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.warns(UserWarning, match="Sharding info"):
        assert checkpointer.restore(tmp_path / "3" / "default")["more"] is ...
    assert start(tmp_path)[:2] == (3, "resumed")
    step, _, restored, said = start(tmp_path, None)
    assert (step, said) == (3, []) and restored["more"] is ...
    with pytest.raises(ot.errors.RestorePlanError, match=r"\[missing\] more"):
        start(tmp_path, {**TARGET, "more": TARGET["w"]})


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "", "a/b"])
def test_names_of_items_that_lead_out_of_the_step_are_not_looked_for(tmp_path, name):
    save_single(tmp_path)
    metadata = tmp_path / "2" / "_CHECKPOINT_METADATA"
    told = json.loads(metadata.read_text())
    told["item_handlers"][name] = "orbax.checkpoint.PyTreeCheckpointHandler"
    metadata.write_text(json.dumps(told))
    assert ot.restore(tmp_path, TARGET)["step"] == 2
    assert start(tmp_path)[0] == 2


def remove_metadata(item):
    (item / "_METADATA").unlink()


def empty(item):
    shutil.rmtree(item.parent)
    item.parent.mkdir()


DAMAGE = {
    "data": cut_data,
    "a bit of the data": flip_a_bit,
    "manifest": lambda item: cut(item / "manifest.ocdbt"),
    "metadata": lambda item: cut(item / "_METADATA"),
    "no metadata": remove_metadata,
    "no manifest": lambda item: (item / "manifest.ocdbt").unlink(),
    "no data": lambda item: [shutil.rmtree(directory) for directory in item.rglob("d") if directory.is_dir()],
    "no files": lambda item: [file.unlink() for file in item.iterdir() if file.is_file()],
    "an empty item": lambda item: (shutil.rmtree(item), item.mkdir()),
    "an empty step": empty,
}


@pytest.fixture
def three_steps(tmp_path):
    root = tmp_path / "root"
    rng = np.random.default_rng(0)
    with ours(root) as manager:
        for step in (1, 2, 3):
            state = {
                name: np.r_[np.float32(10 * step + place), rng.random(7, np.float32)]
                for place, name in enumerate("xyz")
            }
            manager.save(step, args=our_args(state))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_passed_over_with_a_warning(three_steps, target, damage):
    DAMAGE[damage](three_steps / "3" / "default")
    with ours(three_steps) as manager:
        with pytest.warns(UserWarning, match=r"step 3 is skipped: .*manager\.delete\(3\)") as warned:
            state, step, how = ot.restore_or_initialize(manager, target, init_fn=initial)
        assert (values(state), step, how) == ({"x": 20.0, "y": 21.0, "z": 22.0}, 2, "resumed")
        assert [one.filename for one in warned] == [__file__]
        # What the warning says.
        assert not manager.save(3, args=our_args(state))
        manager.delete(3)
        assert manager.save(3, args=our_args(state))


@pytest.mark.slow
def test_where_all_are_damaged_the_run_begins_anew(three_steps, target):
    for step in (1, 2, 3):
        cut_data(three_steps / str(step) / "default")
    with ours(three_steps) as manager:
        with pytest.warns(UserWarning) as warned:
            assert ot.restore_or_initialize(manager, target, init_fn=initial)[1:] == (0, "scratch")
        assert [str(one.message).partition(":")[0] for one in warned] == [f"step {n} is skipped" for n in (3, 2, 1)]
        with (
            pytest.warns(UserWarning, match="is skipped"),
            pytest.raises(ot.errors.CheckpointNotFoundError, match="each of its steps is damaged"),
        ):
            ot.restore_or_initialize(manager, target)


def test_a_store_that_refuses_begins_no_run_anew(three_steps, target, monkeypatch):
    def refuse(*args, **keywords):
        raise ot.errors.CheckpointIOError("the store is down", path=three_steps)

    monkeypatch.setattr("orbax_t5x.restoring.api.open_sources", refuse)
    with (
        ours(three_steps) as manager,
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(ot.errors.CheckpointIOError, match=r"not begun anew.*the store is down"),
    ):
        ot.restore_or_initialize(manager, target, init_fn=initial)


def test_a_target_that_does_not_fit_is_no_damage(three_steps, target):
    with ours(three_steps) as manager, pytest.raises(ot.RestorePlanError) as raised:
        ot.restore_or_initialize(manager, {**target, "more": target["x"]}, init_fn=lambda: {**initial(), "more": 0.0})
    # A step of the run is complete, or does not fit: nothing in it is initialised anew.
    assert [problem.leaf for problem in raised.value.problems] == [None, "more"]
