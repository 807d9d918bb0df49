"""T5X's training scripts: the recorded calls of `train`, `evaluate` and `infer`, with the real partitioner's axes."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
import types
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

import orbax_t5x as ot
from orbax_t5x import state_utils
from orbax_t5x.integrations import t5x
from orbax_t5x.trees.flat import flatten
from tests.support.t5x_goldens import golden
from tests.support.t5x_jobs import JOB, Partitioner, Replicating, states
from tests.support.train_states import inference_state

CALLS = json.loads((JOB / "calls.json").read_text())
RETENTION = json.loads((JOB / "retention.json").read_text())
BUNDLES = Path(__file__).parents[1] / "goldens" / "tf_bundle"


class PeekableDatasetIterator:
    """An iterator that writes its position."""

    position = 0

    def save(self, file):
        Path(file).write_text(str(self.position))

    def restore(self, file):
        self.position = int(Path(file).read_text())


def same(state_dict, target_state_dict, *, is_resuming=False):
    return state_dict


def keep_target(state_dict, parameter_infos):
    infos = flatten(parameter_infos["target"])
    assert infos["decoder/decoder_norm/scale"].name == "target/decoder/decoder_norm/scale"
    assert infos["decoder/layers_0/mlp/wo/kernel"].mesh_axes == PartitionSpec("model", None)
    assert parameter_infos["state"]["step"].mesh_axes is None
    return {"target": state_dict["target"]}, {"target": parameter_infos["target"]}


FUNCTIONS = {
    "fns.same": same,
    "fns.keep_target": keep_target,
    "t5x.state_utils.apply_assignment_map": state_utils.apply_assignment_map,
}


class Replay:
    """Makes the calls of one recorded script and compares what they return."""

    def __init__(self, root):
        self.root, self.manager, self.iterator, self.returned = root, None, None, []
        self.restoring = None  # a Checkpointer that only restores

    def value(self, recorded):
        if isinstance(recorded, str):
            return recorded.replace("<dir>", str(self.root)).replace("<bundles>", str(BUNDLES))
        if not isinstance(recorded, dict):
            return recorded
        if "train_state" in recorded:
            state = states()[recorded["train_state"]]
            if recorded.get("abstract"):
                return jax.eval_shape(lambda: state)
            return state.replace_step(np.int32(recorded["step"]))
        if "partial" in recorded:
            keywords = {name: self.value(value) for name, value in recorded["keywords"].items()}
            return functools.partial(self.value(recorded["partial"]), **keywords)
        if "iterator" in recorded:
            self.iterator = self.iterator or PeekableDatasetIterator()
            return self.iterator
        if "state_dict" in recorded:
            return jax.tree.map(jnp.asarray, dict(states()["FlaxOptimTrainState"].state_dict()))
        if "partitioner" in recorded:
            return Partitioner()
        if "function" in recorded:
            return FUNCTIONS[recorded["function"]]
        if "numpy.dtype" in recorded:
            return np.dtype(recorded["numpy.dtype"])
        (kind, values), *_ = recorded.items()
        return {"list": list, "tuple": tuple}[kind](map(self.value, values))

    def run(self, scenario):
        self.iterator = None
        for call in CALLS[scenario]["calls"]:
            method = call["call"].removeprefix("Checkpointer.")
            args = [self.value(value) for value in call.get("args", ())]
            keywords = {name: self.value(value) for name, value in call.get("keywords", {}).items()}
            if method == "__init__":
                if "checkpoints_dir" not in keywords:
                    self.manager = self.restoring = t5x.CheckpointManager(**keywords)
                elif keywords["checkpoints_dir"]:
                    self.manager = t5x.Checkpointer(**keywords)
                else:
                    self.restoring = t5x.Checkpointer(**keywords)
                continue
            if self.iterator is not None and method == "save":
                self.iterator.position += 1
            called = self.restoring if method.startswith("restore") else self.manager
            self.returned.append((method, getattr(called, method)(*args, **keywords)))
            self.compare(call, self.returned[-1][1])

    def compare(self, call, found):
        expected = call.get("returns")
        if call.get("raises"):
            assert call["raises"][0] == "StepAlreadyExistsError" and found is False, "an existing step is skipped"
        elif isinstance(expected, dict) and "train_state" in expected:
            assert type(found).__name__ == expected["train_state"] and found.step == expected["step"]
            assert found.step.dtype == jnp.int32
        elif isinstance(expected, dict):
            assert list(found) == expected["list"]
        elif call["call"] == "save":
            assert found is expected


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(autouse=True)
def _gin_forgets():
    yield
    gin.clear_config()


def native_run(root):
    """A directory that T5X's native checkpointer wrote, with a state at step 6."""
    shutil.copytree(golden("d1_adafactor").step, root / "old" / "checkpoint_6")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of stock Orbax, below
@pytest.mark.slow
def test_train_resume_finetune_evaluate_and_infer(tmp_path):
    """One directory through T5X's scripts, in order; evaluations change nothing on disk."""
    replay = Replay(tmp_path)
    for scenario in ("train, first run", "train, resume", "train, nothing left to do"):
        replay.run(scenario)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"checkpoint_{step}" for step in (0, 2, 4, 6)]
    with ocp.PyTreeCheckpointer() as stock:
        saved = stock.restore(tmp_path / "run" / "checkpoint_6" / "state")
    state = states()["FlaxOptimTrainState"]
    embedding = state.params["token_embedder"]["embedding"]
    np.testing.assert_array_equal(saved["target"]["token_embedder"]["embedding"], embedding)
    before = listing(tmp_path)
    for scenario in ("eval, specific", "eval, all", "infer"):
        replay.run(scenario)
    assert listing(tmp_path) == before
    restored = replay.returned[-1][1]
    found = restored.params["token_embedder"]["embedding"]
    assert found.dtype == jnp.bfloat16 and found.sharding.spec == PartitionSpec("model", None)
    np.testing.assert_array_equal(found, embedding.astype(jnp.bfloat16))
    replay.run("train, finetune with assignment_map, fallback_to_scratch and a function")
    replay.run("train, finetune, resume")
    assert sorted(path.name for path in (tmp_path / "fine").iterdir()) == [f"checkpoint_{step}" for step in (10, 6, 8)]


@pytest.mark.slow
def test_steps_that_meet_are_saved_once(tmp_path):
    replay = Replay(tmp_path)
    replay.run("train, checkpoint_steps")
    replay.manager.close()
    assert replay.manager.all_steps() == [0, 1, 3]


@pytest.mark.slow
def test_the_datasets_position_is_saved_and_restored(tmp_path):
    replay = Replay(tmp_path)
    replay.run("train, save_dataset, first run")
    file = tmp_path / "ds" / "checkpoint_2" / "dataset" / "train_ds-000-of-001"
    assert file.read_text() == "2"
    replay.run("train, save_dataset, resume")
    assert replay.iterator.position == 3, "restored at 2, and one step further"
    file.unlink()
    states_only = t5x.CheckpointManager(
        tmp_path / "ds", states()["FlaxOptimTrainState"], Partitioner(), replay.iterator
    )
    with pytest.raises(FileNotFoundError, match=r"dataset/train_ds-000-of-001 is missing.*restore_dataset = False"):
        states_only.restore(path=str(tmp_path / "ds" / "checkpoint_2"))


@pytest.mark.slow
def test_a_position_that_is_wanted_and_absent_is_an_error(tmp_path):
    """T5X's own scripts end with TensorFlow's NotFoundError there."""
    for run in ("run", "dsr"):
        manager = t5x.CheckpointManager(tmp_path / run, states()["FlaxOptimTrainState"], Partitioner())
        manager.save(states()["FlaxOptimTrainState"].replace_step(np.int32(6)))
        manager.close()
    for scenario in ("finetune from a checkpoint without a dataset", "switched on at a resume"):
        with pytest.raises(FileNotFoundError, match=r"dataset/train_ds-000-of-001 is missing.*restore_dataset = False"):
            Replay(tmp_path).run(f"train, save_dataset{', ' if 'finetune' in scenario else ' '}{scenario}")


@pytest.mark.slow
def test_the_native_way_restores_the_position_too(tmp_path):
    iterator = PeekableDatasetIterator()
    iterator.position = 5
    checkpointer = t5x.Checkpointer(states()["FlaxOptimTrainState"], Partitioner(), tmp_path / "oldds", iterator)
    checkpointer.save(states()["FlaxOptimTrainState"].replace_step(np.int32(2)))
    replay = Replay(tmp_path)
    replay.run("train, use_orbax False, save_dataset, resume")
    assert replay.iterator.position == 7, "restored at 5; the replay counts two calls of save"
    assert (tmp_path / "oldds" / "checkpoint_4" / "dataset" / "train_ds-000-of-001").read_text() == "7"


@pytest.mark.slow
def test_functions_for_saves_have_t5xs_protocol(tmp_path):
    replay = Replay(tmp_path)
    replay.run("train, save state_transformation_fns")
    with ot.open_checkpoint(tmp_path / "drop" / "checkpoint_2", item="state") as opened:
        assert opened.leaves and all(name.startswith("target/") for name in opened.leaves)
    manager = t5x.CheckpointManager(tmp_path / "other", states()["FlaxOptimTrainState"], Partitioner())
    with pytest.raises(TypeError, match=r"returned dict.*\(state_dict, parameter_infos\)"):
        manager.save(states()["FlaxOptimTrainState"], [lambda state_dict, infos: state_dict])
    manager.close()


@pytest.mark.slow
def test_the_native_way_resumes_and_infers(tmp_path):
    replay = Replay(tmp_path)
    for scenario in ("train, use_orbax False, first run", "train, use_orbax False, resume"):
        replay.run(scenario)
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [f"checkpoint_{step}" for step in (0, 2, 4, 6)]
    with pytest.raises(ValueError, match="only restores"):
        replay.restoring.save(states()["FlaxOptimTrainState"])
    replay.run("infer, use_orbax False")
    replay.run("infer, use_orbax True, a native checkpoint")


@pytest.mark.slow
def test_a_bundle_is_inferred_from(tmp_path):
    """Its model has four heads: the recorded call and directory, and that model's state."""
    prefix = BUNDLES / "t5_1_1_f32" / "model.ckpt-1000000"
    state = jax.eval_shape(inference_state)
    manager = t5x.CheckpointManager(prefix, state, Replicating(), restore_dtype="bfloat16")
    before = listing(BUNDLES / "t5_1_1_f32")
    restored = manager.restore_from_tf_checkpoint(str(prefix), strict=False)
    assert restored.step == 1_000_000 and listing(BUNDLES / "t5_1_1_f32") == before
    assert {leaf.dtype for leaf in jax.tree.leaves(restored.params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_best_steps_stay_on_disk(tmp_path):
    (tmp_path / "run" / "train").mkdir(parents=True)
    shutil.copy(JOB / RETENTION["events_file"], tmp_path / "run" / "train")
    state = inference_state()
    manager = t5x.CheckpointManager(
        tmp_path / "run", state, Partitioner(), keep=1, metric_name_to_monitor="train/loss", metric_mode="min"
    )
    for step in (0, 2, 4, 8):
        assert manager.save(state.replace_step(np.int32(step)))
    manager.close()
    assert manager.all_steps() == [4, 8], "the best, and the newest"


@pytest.mark.slow
def test_steps_are_kept_by_the_managers_options(tmp_path):
    """Options of `SaveBestCheckpointer` reach no manager; those that gin binds on the manager do."""
    replay = Replay(tmp_path)
    replay.run("train, SaveBestCheckpointer by gin")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["checkpoint_4"]
    gin.parse_config("orbax_t5x.integrations.t5x.CheckpointManager.force_keep_period = 4")
    replay.run("train, manager's own options by gin")
    replay.run("train, manager's own options by gin, resume")
    names = {path.name for path in (tmp_path / "best2").iterdir()}
    assert names == {f"checkpoint_{step}" for step in (0, 4, 8, 10)}


@pytest.mark.slow
def test_a_run_with_a_prefix_that_t5x_begins_anew_goes_on(tmp_path, monkeypatch):
    """T5X's listing never sees the prefix, so it saves steps again that exist."""
    module = types.ModuleType("t5x.checkpoints")
    module.get_checkpoint_prefix = lambda: "ckpt"
    monkeypatch.setitem(sys.modules, "t5x.checkpoints", module)
    replay = Replay(tmp_path)
    replay.run("train, prefix ckpt")
    replay.run("train, prefix ckpt, again")
    assert sorted(path.name for path in (tmp_path / "prefix").iterdir()) == ["ckpt_0", "ckpt_2"]


def test_register_makes_it_the_default_and_back(monkeypatch):
    """A config that T5X builds in Python has the class that gin gives: gin decorated it in place."""
    fields = [("path", str, ""), ("checkpoint_manager_cls", object, "T5X's own"), ("keep", int, 3)]
    save, restore = (dataclasses.make_dataclass(name, fields) for name in ("Save", "Restore"))
    utils = types.ModuleType("t5x.utils")
    utils.SaveCheckpointConfig, utils.RestoreCheckpointConfig = save, restore
    monkeypatch.setitem(sys.modules, "t5x", types.ModuleType("t5x"))
    monkeypatch.setitem(sys.modules, "t5x.utils", utils)
    undo = t5x.register()
    for config in (save, restore):
        assert config(path="x").checkpoint_manager_cls is t5x.CheckpointManager
        assert config().keep == 3
    text = "holder.value = @orbax_t5x.integrations.t5x.CheckpointManager"

    @gin.configurable
    def holder(value=None):
        return value

    gin.parse_config(text)
    assert holder() is t5x.CheckpointManager
    undo()
    for config in (save, restore):
        assert config().checkpoint_manager_cls == "T5X's own"


def test_options_by_gin(tmp_path):
    gin.parse_config("orbax_t5x.integrations.t5x.CheckpointManager.keep = 0")
    with pytest.raises(ValueError, match="keep=0"):
        t5x.CheckpointManager(tmp_path, None, Partitioner())
    t5x.Checkpointer(None, Partitioner(), tmp_path)
