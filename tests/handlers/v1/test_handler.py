"""Orbax v1's free functions inside `ot.v1.context()`: what they save and load, and what they refuse."""

import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from tests.support.orbax_v1 import RULES, abstract_of, assert_same, flip_a_byte
from tests.support.train_states import sharded, training_state
from tests.support.v1_trees import flax_state, nnx_state, plain_tree

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


TREES = {"plain": plain_tree, "flax": flax_state, "nnx": nnx_state, "optax": lambda: flax_state().opt_state}


@pytest.mark.slow
@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_trees_come_back_as_stock_orbax_loads_them(tmp_path, make):
    tree = make()
    with ot.v1.context():
        ocp.save(tmp_path / "1", tree)
        ours = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract_of(tree)))
        beside = ocp.load(tmp_path / "1", abstract_of(tree))
    assert_same(ours, tree)
    assert_same(beside, tree)
    assert_same(ocp.load(tmp_path / "1", abstract_of(tree)), tree)
    assert ot.verify(tmp_path / "1").status == "ok"


def test_several_checkpointables_beside_others(tmp_path):
    model, optimizer = {"w": jnp.arange(8.0)}, {"mu": np.zeros(3)}
    with ot.v1.context(provenance=()):
        ocp.save_checkpointables(tmp_path / "1", {"model": model, "optimizer": optimizer, "notes": {"epoch": 3}})
        target = {"renamed": jnp.zeros(8)}
        wanted = {
            "model": ot.v1.AbstractTrainState(target, [ot.transforms.Rename([("w", "renamed")])]),
            "optimizer": optimizer,
        }
        loaded = ocp.load_checkpointables(tmp_path / "1", wanted)
        by_name = ocp.load(tmp_path / "1", wanted["model"], checkpointable_name="model")
        assert ocp.load_checkpointables(tmp_path / "1").keys() == {"model", "optimizer", "notes"}
    assert_same(loaded, {"model": {"renamed": model["w"]}, "optimizer": optimizer})
    assert_same(by_name, {"renamed": model["w"]})
    assert {path.parent.name for path in (tmp_path / "1").rglob("_CHECKSUMS.json")} >= {"model", "optimizer"}


class Iterator:
    """A checkpointable that saves and loads itself."""

    position = 5

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            (path / "position.txt").write_text(str(self.position))

        return write()

    async def load(self, directory):
        async def read():
            self.position = int((directory / "position.txt").read_text())

        return read()


def test_a_checkpointable_that_saves_itself_is_left_to_do_so(tmp_path):
    iterator = Iterator()
    with ot.v1.context():
        ocp.save_checkpointables(tmp_path / "1", {"state": {"a": np.ones(2)}, "data": iterator})
        iterator.position = 0
        ocp.load_checkpointables(tmp_path / "1", {"data": iterator})
    assert iterator.position == 5


class Words(list):
    """What a handler of a user's saves."""


class WordsHandler(ocp.CheckpointableHandler):
    async def save(self, directory, checkpointable):
        async def write():
            (await directory.await_creation() / "words.txt").write_text(" ".join(checkpointable))

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Words((directory / "words.txt").read_text().split())

        return read()

    async def metadata(self, directory):
        return None

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Words)

    def is_abstract_handleable(self, abstract_checkpointable):
        return abstract_checkpointable is None or isinstance(abstract_checkpointable, Words)


@pytest.mark.parametrize("name", [None, "words", "state"])
def test_handlers_of_a_base_context_keep_what_is_theirs(tmp_path, name):
    registry = ocp.handlers.local_registry(include_global_registry=name != "state")
    if name == "state":  # theirs alone
        registry.add(ocp.handlers.PyTreeHandler)
    registry.add(WordsHandler, checkpointable_name=name)
    base = ocp.Context()
    base.checkpointables.registry = registry
    base.array.saving.use_zarr3 = False
    theirs, ours = ("state", "model") if name == "state" else ("words", "state")
    with ot.v1.context(ot.v1.context(base), provenance=()):
        ocp.save_checkpointables(tmp_path / "1", {theirs: Words(["a", "b"]), ours: {"w": np.ones(2)}})
        assert ocp.load_checkpointables(tmp_path / "1", {theirs: None})[theirs] == ["a", "b"]
        loaded = ocp.load_checkpointables(tmp_path / "1", {ours: ot.v1.AbstractTrainState({"v": np.zeros(2)}, RULES)})
    np.testing.assert_array_equal(loaded[ours]["v"], np.ones(2))
    assert json.loads((tmp_path / "1" / ours / "_METADATA").read_text())["use_zarr3"] is False
    assert (tmp_path / "1" / ours / "_CHECKSUMS.json").exists()
    assert not (tmp_path / "1" / theirs / "_CHECKSUMS.json").exists()


@pytest.mark.slow
def test_the_handler_in_a_registry_of_ones_own(tmp_path):
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler).add(ot.v1.TrainStateHandler, checkpointable_name="state")
    made = ocp.Context()
    made.checkpointables.registry = registry
    state = training_state()
    with made:
        ocp.save(tmp_path / "1", state)
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(sharded(state)))
    assert_same(loaded, state)
    assert ot.verify(tmp_path / "1").status == "ok"


def test_other_functions_of_orbax_work_on_checkpoints(tmp_path):
    with ot.v1.context():
        ocp.partial.save(tmp_path / "1", {"a": np.ones(2)})
        ocp.partial.save(tmp_path / "1", {"b": np.zeros(3)})
        ocp.partial.finalize(tmp_path / "1")
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None))
        assert_same(loaded, {"a": np.ones(2), "b": np.zeros(3)})
        ocp.save(tmp_path / "2", {"a": np.ones(2)})
        ocp.save(tmp_path / "2", {"a": np.zeros(2)}, overwrite=True)
        assert_same(ocp.load(tmp_path / "2", ot.v1.AbstractTrainState(None)), {"a": np.zeros(2)})
        assert ot.verify(tmp_path / "2").status == "ok"


def test_nothing_global_changes(tmp_path):
    before = list(ocp.handlers.global_registry().get_all_entries())
    with ot.v1.context():
        ocp.save(tmp_path / "1", {"w": np.ones(2)})
    assert ocp.handlers.global_registry().get_all_entries() == before
    assert ocp.Context().checkpointables.registry.get_all_entries() == before
    ocp.save(tmp_path / "2", {"w": np.ones(2)})
    assert not (tmp_path / "2" / "state" / "_CHECKSUMS.json").exists()


def test_checksums_are_checked_and_can_be_left_out(tmp_path):
    tree = {"w": np.random.default_rng(0).integers(0, 255, (256, 1024), np.uint8)}
    for name, checksums in (("with", True), ("without", False)):
        with ot.v1.context(checksums=checksums):
            ocp.save(tmp_path / name, tree)
        flip_a_byte(tmp_path / name / "state")
    assert not (tmp_path / "without" / "state" / "_CHECKSUMS.json").exists()
    with ot.v1.context():
        # What a plan raises comes through both functions as it is.
        with pytest.raises(CorruptCheckpointError):
            ocp.load(tmp_path / "with", ot.v1.AbstractTrainState(tree))
        with pytest.raises(CorruptCheckpointError):
            ocp.load_checkpointables(tmp_path / "with", {"state": ot.v1.AbstractTrainState(tree)})


def test_outside_the_context_orbaxs_error_names_it(tmp_path):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    abstract = ot.v1.AbstractTrainState({"w": np.zeros(2)})
    with pytest.raises(ValueError, match=r"AbstractTrainState is loaded inside `with ot.v1.context\(\):`"):
        ocp.load(tmp_path / "1", abstract)
    with pytest.raises(KeyError, match=r"loaded inside `with ot.v1.context\(\):`"):
        ocp.load_checkpointables(tmp_path / "1", {"state": abstract})


def test_paths_that_are_not_orbaxs_are_refused_by_orbax(tmp_path, goldens):
    with ot.v1.context(), pytest.raises(ocp.errors.InvalidLayoutError):
        ocp.load(goldens / "tf_bundle" / "t5_1_1_f32", ot.v1.AbstractTrainState(None))


def test_orbax_reads_safetensors_without_a_handler(goldens):
    """Whatever it is given to load into: there is no place for ours."""
    source = goldens / "safetensors" / "t5_1_1"
    made = ot.v1.context()
    made.checkpoint_layout = "safetensors"
    with made:
        with pytest.raises(ot.RestorePlanError, match=r"call ot\.v1\.load_and_transform"):
            ocp.load(source, ot.v1.AbstractTrainState(None))
        assert_same(ot.v1.load_and_transform(source, None), ot.restore(source, None))
