"""Trees with leaves that Orbax v1 cannot store: which error names them, and what is left out."""

import functools
import json

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from tests.support.orbax_v1 import assert_same, refused

# Orbax lets go of the coroutine that would have made the directories. Stock Orbax loads without a target.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine '_create_paths' was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning"),
]


def save_step(path, checkpointables):
    with ocp.training.Checkpointer(path) as checkpointer:
        checkpointer.save_checkpointables(0, checkpointables)


def save_tree(path, checkpointables):
    (name,) = checkpointables
    ocp.save(path, checkpointables[name], checkpointable_name=name)


ONE_WAY = "save_checkpointables"
WAYS = {
    ONE_WAY: ocp.save_checkpointables,
    "save_checkpointables_async": lambda path, what: ocp.save_checkpointables_async(path, what).result(),
    "Checkpointer": save_step,
}
# What Orbax's own functions for one tree refuse before they ask a handler, and what they do not.
REFUSED_BY_TYPE = {
    "complex": 1j,
    "bool": np.bool_(True),
    "abstract": jax.ShapeDtypeStruct((2,), np.float32),
    "function": len,
    "object": object(),
}
REFUSED_BY_VALUE = {
    "bytes": b"xx",
    "large": 2**70,
    "number": np.float32(1),
    "empty": np.zeros((0, 3), np.float32),
    "text": np.array(["a", "b"]),
}
UNSTORED = REFUSED_BY_TYPE | REFUSED_BY_VALUE


def tree_with(leaf):
    return {"x": {"y": leaf}, "w": np.ones(3)}


@pytest.mark.parametrize("name", ["state", "model"])
@pytest.mark.parametrize(
    ("leaf", "way"), [*((leaf, ONE_WAY) for leaf in UNSTORED), *(("complex", way) for way in WAYS if way != ONE_WAY)]
)
def test_the_error_names_the_leaf_under_any_name_of_the_tree(tmp_path, leaf, way, name):
    what = {name: tree_with(UNSTORED[leaf])}
    with ot.v1.context():
        error = refused(lambda: WAYS[way](tmp_path / "1", what), "1 of 2 leaves.*'x/y'.*nothing was written")
    assert error.leaf == "x/y"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["state", "model"])
@pytest.mark.parametrize("leaf", REFUSED_BY_VALUE.values(), ids=REFUSED_BY_VALUE.keys())
def test_functions_for_one_tree_name_leaves_that_reach_the_handler(tmp_path, leaf, name):
    with ot.v1.context():
        assert refused(lambda: save_tree(tmp_path / "1", {name: tree_with(leaf)}), "'x/y'").leaf == "x/y"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leaf", REFUSED_BY_TYPE.values(), ids=REFUSED_BY_TYPE.keys())
def test_functions_for_one_tree_look_at_types_before_they_ask_a_handler(tmp_path, leaf):
    """With and without our context, and whether leaves may be left out or not."""
    for made in (ocp.Context(), ot.v1.context(), ot.v1.context(on_unsupported="skip")):
        with made:
            error = refused(lambda: ocp.save(tmp_path / "1", tree_with(leaf)), "Unsupported leaf type", ValueError)
            assert type(error) is ValueError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["state", "model"])
@pytest.mark.parametrize("leaf", UNSTORED)
def test_leaves_can_be_left_out_under_any_name_of_the_tree(tmp_path, leaf, name):
    value = UNSTORED[leaf]
    with ot.v1.context(on_unsupported="skip"):
        ocp.save_checkpointables(tmp_path / "1", {name: tree_with(value)})
    assert_same(ocp.load(tmp_path / "1", checkpointable_name=name), {"x": {}, "w": np.ones(3)})
    record = json.loads((tmp_path / "1" / name / "_METADATA").read_text())["custom_metadata"]["orbax_t5x"]
    made = value if hasattr(value, "dtype") else np.asarray(value)
    assert record["skipped"] == {"x/y": {"shape": list(made.shape), "dtype": str(made.dtype)}}
    written = json.loads((tmp_path / "1" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    ocp.save_checkpointables(tmp_path / "stock", {name: {"w": np.ones(3)}})
    assert written == json.loads((tmp_path / "stock" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]


def test_empty_leaves_come_back_from_their_record(tmp_path):
    tree = {"w": np.ones(2), "none": np.zeros((0, 3), np.float32)}
    with ot.v1.context(on_unsupported="skip"):
        ocp.save(tmp_path / "1", tree)
        assert_same(ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(tree)), tree)


@pytest.mark.parametrize("on_unsupported", ["error", "skip"])
@pytest.mark.parametrize("name", ["state", "model"])
def test_lazy_arrays_are_not_saved(tmp_path, name, on_unsupported):
    """Nor left out: Orbax could store their values."""
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    with ot.open_checkpoint(tmp_path / "1") as opened, ot.v1.context(on_unsupported=on_unsupported):
        lazy = opened.leaves["w"]
        for state, leaf in ((tree_with(lazy), "x/y"), (lazy, None)):
            what = {name: state}
            for at, way in enumerate(WAYS.values()):
                saved = functools.partial(way, tmp_path / f"way {at}", what)
                assert refused(saved, r"orbax_t5x\.TrainStateHandler").leaf == leaf
            saved = functools.partial(save_tree, tmp_path / "tree", what)
            assert type(refused(saved, "Unsupported leaf type", ValueError)) is ValueError
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parts[len(tmp_path.parts)] != "1"]
    assert written == []


class Recorder(ocp.CheckpointableHandler):
    """A handler of a user's for dicts with an object in them."""

    async def save(self, directory, checkpointable):
        async def write():
            (await directory.await_creation() / "recorded.txt").write_text("recorded")

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        raise NotImplementedError

    async def metadata(self, directory):
        return None

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, dict) and any(type(leaf) is object for leaf in checkpointable.values())

    def is_abstract_handleable(self, abstract_checkpointable):
        return False


@pytest.mark.parametrize("is_first", [True, False])
def test_trees_that_another_handler_claims_stay_its_own(tmp_path, is_first):
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for handler in (Recorder, ocp.handlers.PyTreeHandler) if is_first else (ocp.handlers.PyTreeHandler, Recorder):
        registry.add(handler)
    base = ocp.Context()
    base.checkpointables.registry = registry
    with ot.v1.context(ot.v1.context(base)):
        ocp.save_checkpointables(tmp_path / "1", {"model": {"a": object()}, "other": {"w": np.ones(2)}})
        refused(lambda: ocp.save_checkpointables(tmp_path / "2", {"model": {"a": 1j}}), "is of type complex")
    assert (tmp_path / "1" / "model" / "recorded.txt").read_text() == "recorded"
    assert (tmp_path / "1" / "other" / "_CHECKSUMS.json").exists()


@pytest.mark.parametrize("make", [ocp.Context, ot.v1.context])
def test_what_is_no_tree_has_no_handler(tmp_path, make):
    with make():
        refused(lambda: ocp.save_checkpointables(tmp_path / "1", {"model": object()}), "valid handler", KeyError)
        unsortable = {"a": object(), 1: object()}
        refused(lambda: ocp.save_checkpointables(tmp_path / "1", {"model": unsortable}), "valid handler", KeyError)
