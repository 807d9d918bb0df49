"""Names of leaves on their way through a save: what is accepted can be opened, by us and by stock Orbax; what cannot be
opened is refused before anything is written, and a stock save of it is unsupported, not damage."""

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, RestorePlanError, UnsafeCheckpointError, UnsupportedCheckpointError
from tests.support.saving import save

numbers = itertools.count()


def array():
    """An array that no other leaf equals."""
    return np.array([next(numbers), 0.5])


def save_stock(path, tree):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def assert_restored(path, tree):
    """Both readers give the tree back."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        stock = checkpointer.restore(path)
    ours = ot.restore(path, tree, verify="full")
    for restored in (stock, ours):
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, restored, tree)


IN_DATABASES = [
    {"a/": array(), "b": array()},
    {"a/": "text", "b": array()},
    {"a/": {"b": array()}},
    {"a/b": "text", "c/0": "other", "d": {"e": "third"}, "f": array()},
    {"a~0b": "text", "a~1b": "other", "b": array()},
    {"a//b": array(), "a/b": array()},
    {".": array(), "a/.": array(), "a": array()},
    {"a": array(), "a/b": array(), "a/0": array()},
    {"a": {"b": {}}, "a.b": array()},
    {"a": {}, "a/b": array()},
    {
        "_METADATA": array(),
        "array_metadatas": array(),
        "d": array(),
        "_strings.json": "text",
        "_CHECKSUMS.json": array(),
    },
    {"a\\b": array(), "a b": array(), "a\nb": array(), "%2e%2e": array(), "${x}": array(), "é": array()},
]
IN_DIRECTORIES = [
    {"a/": array(), "b": array()},
    {"a//b": "text", "array_metadatas": "other", "c": array()},
    {"a": {".": array(), "b": {}}, "a b": array()},
    {"d": array(), "ocdbt.process_0": array(), "%2e": array(), "%2e%2e": array()},
]


@pytest.mark.parametrize("tree", IN_DATABASES, ids=lambda tree: ",".join(map(repr, tree)))
def test_what_is_saved_in_a_database_is_restored(tmp_path, tree):
    assert_restored(save(tmp_path / "ours", tree), tree)
    assert_restored(save_stock(tmp_path / "stock", tree), tree)


@pytest.mark.parametrize("tree", IN_DIRECTORIES, ids=lambda tree: ",".join(map(repr, tree)))
def test_what_is_saved_in_directories_is_restored(tmp_path, tree):
    assert_restored(save(tmp_path / "ours", tree, {"use_ocdbt": False}), tree)


def refused(path, tree, **options):
    """The problems of a save that leaves nothing."""
    with pytest.raises(RestorePlanError) as raised:
        save(path / "step", tree, options)
    assert not list(path.iterdir())
    return [(problem.kind, problem.leaf) for problem in raised.value.problems]


WRONG = [
    ({"": array(), "w": array()}, ("name", ""), UnsupportedCheckpointError),
    ({"a": {"": array()}}, ("name", "a/"), UnsupportedCheckpointError),
    ({"": {"a": array()}}, ("name", "/a"), UnsupportedCheckpointError),
    ({"": None, "w": array()}, ("name", ""), UnsupportedCheckpointError),
    ({"": {}, "w": array()}, ("name", ""), UnsupportedCheckpointError),
    ({"": "text", "w": array()}, ("name", ""), UnsupportedCheckpointError),
    ({"a\0b": array()}, ("name", "a\0b"), UnsupportedCheckpointError),
    ({"a": {"b": array()}, "a/b": array()}, ("duplicate", "a/b"), UnsupportedCheckpointError),
    ({"a": {"b": None}, "a/b": array()}, ("duplicate", "a/b"), UnsupportedCheckpointError),
    ({"a": [{}], "a/0": array()}, ("duplicate", "a/0"), UnsupportedCheckpointError),
    ({"a": {"b": "text"}, "a/b": "other"}, ("duplicate", "a/b"), UnsupportedCheckpointError),
    ({"a": array(), "a/": array()}, ("duplicate", "a/"), CorruptCheckpointError),
    ({"a": {"b": array()}, "a.b": array()}, ("duplicate", "a.b"), CorruptCheckpointError),
    ({"/a": array()}, ("name", "/a"), UnsafeCheckpointError),
    ({"..": array()}, ("name", ".."), UnsafeCheckpointError),
    ({"a": {"../b": array()}}, ("name", "a/../b"), UnsafeCheckpointError),
]


@pytest.mark.parametrize(("tree", "problem", "kind"), WRONG, ids=[repr(list(tree)) for tree, _, _ in WRONG])
def test_what_could_not_be_opened_is_refused(tmp_path, tree, problem, kind):
    assert refused(tmp_path, tree) == [problem]
    assert refused(tmp_path, tree, use_ocdbt=False) == [problem]
    with pytest.raises(kind) as raised:
        ot.open_checkpoint(save_stock(tmp_path / "stock", tree))
    assert raised.value.leaf in (None if kind is UnsafeCheckpointError else problem[1], "a/b")


def test_half_a_character_is_refused(tmp_path):
    assert refused(tmp_path, {"a\ud800": None, "w": array()}) == [("name", "a\ud800")]


@pytest.mark.parametrize(
    "key", ["a//b", ".", "a/.", "a\\b", "_METADATA", "array_metadatas", "array_metadatas/a", "_strings.json"]
)
def test_what_no_directory_of_an_item_can_be_called_is_refused(tmp_path, key):
    assert refused(tmp_path, {key: array(), "w": array()}, use_ocdbt=False) == [("name", key)]


def test_an_absolute_key_writes_nothing_outside(tmp_path):
    """In directories of their own, Orbax writes the array to that path, outside of the checkpoint."""
    outside = tmp_path / "outside"
    (tmp_path / "run").mkdir()
    name = f"{outside}"
    assert refused(tmp_path / "run", {name: array()}, use_ocdbt=False) == [("name", name)]
    assert not outside.exists()


def test_a_skipped_leaf_has_its_name_alone(tmp_path):
    """What is recorded of it would stand in the place of the other leaf."""
    tree = {"a": {"b": np.zeros((0, 2))}, "a/b": array()}
    with pytest.raises(RestorePlanError) as raised, ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ot.args.TrainStateSave(tree, on_unsupported="skip"))
    assert [problem.kind for problem in raised.value.problems] == ["duplicate"]


def test_all_names_are_refused_together(tmp_path):
    tree = {"": array(), "..": array(), "a": {"b": array()}, "a/b": array(), "good": array()}
    assert refused(tmp_path, tree) == [("name", ""), ("name", ".."), ("duplicate", "a/b")]


# Orbax lets go of the coroutine that would have made the directories of a save.
@pytest.mark.filterwarnings("ignore:coroutine '_create_paths' was never awaited:RuntimeWarning")
@pytest.mark.parametrize(("tree", "ocdbt"), [({"a": {"b": array()}, "a/b": array()}, True), ({"a//b": array()}, False)])
def test_saves_of_orbax_v1_refuse_too(tmp_path, tree, ocdbt):
    made = ot.v1.context()
    made.array.saving.use_ocdbt = ocdbt
    with made, pytest.raises(RestorePlanError) as raised:
        v1.save_checkpointables(tmp_path / "step", {"state": tree})
    assert len(raised.value.problems) == 1 and not list(tmp_path.iterdir())
    # The coroutine's warning is to come here.
    raised.value.__traceback__ = None
    del raised
    gc.collect()


def test_a_run_does_not_begin_anew_over_a_step_with_such_names(tmp_path):
    """The newest step is whole, and nothing but its names keeps it from being restored."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave({"": jnp.ones(2), "w": jnp.ones(2)}))
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        with pytest.raises(UnsupportedCheckpointError, match="is empty"):
            ot.restore_or_initialize(manager, target, init_fn=lambda: {"w": jnp.zeros(2)})
