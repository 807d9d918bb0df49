"""Leaves are restored as lazy arrays on request, and read when they are needed."""

import asyncio

import flax.linen.partitioning
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError, CheckpointNotFoundError, CorruptCheckpointError
from tests.support.pytrees import LAZY, noise, restore, save


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_leaves_are_restored_lazily_on_request(tmp_path, registered, use_ocdbt):
    w, v = noise(64, 8), noise(8)
    tree = {"a.b": {"w": w}, "list": [v, jnp.ones((8, 2))], "step": 3}
    path = save(tmp_path / "item", tree, use_ocdbt=use_ocdbt)
    args = {"a.b": {"w": LAZY}, "list": [ocp.RestoreArgs(), LAZY], "step": LAZY}
    restored = restore(path, args)
    assert type(restored["list"][0]) is np.ndarray
    lazy = {"w": restored["a.b"]["w"], "jax": restored["list"][1], "step": restored["step"]}
    assert all(isinstance(leaf, ot.LazyArray) for leaf in lazy.values())
    assert (lazy["w"].shape, lazy["w"].dtype) == ((64, 8), np.float32)
    np.testing.assert_array_equal(lazy["w"].get(), w)
    np.testing.assert_array_equal(lazy["w"][3:5].get(), w[3:5])
    np.testing.assert_array_equal(lazy["jax"].get(), np.ones((8, 2)))
    assert lazy["step"].item() == 3
    # Saved again, they are streamed from the one item into the other.
    again = save(tmp_path / "again", restored)
    np.testing.assert_array_equal(restore(again)["a.b"]["w"], w)


def test_lazy_leaves_are_read_on_demand(tmp_path, registered):
    path = save(tmp_path / "item", {"w": noise(64, 8), "v": noise(8)}, use_ocdbt=False)
    (path / "w" / "0.0").write_bytes(b"damaged")
    restored = restore(path, {"w": LAZY, "v": LAZY})
    np.testing.assert_array_equal(restored["v"].get(), noise(8))
    with pytest.raises(CorruptCheckpointError) as caught:
        restored["w"].get()
    assert caught.value.leaf == "w"


def test_the_dtype_of_a_lazy_leaf(tmp_path, registered):
    path = save(tmp_path / "item", {"w": noise(64, 8)})
    lazy = restore(path, {"w": ocp.RestoreArgs(restore_type=ot.LazyArray, dtype=jnp.bfloat16)})["w"]
    assert lazy.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(lazy.get(), noise(64, 8).astype(ml_dtypes.bfloat16))


def test_a_target_of_its_own_classes(tmp_path, registered):
    """Names come from the item's keys, whatever holds the leaves."""
    state = flax.core.FrozenDict({"params": {"w": noise(4, 2)}})
    path = save(tmp_path / "item", state)
    with ocp.PyTreeCheckpointer() as checkpointer:
        lazy = jax.tree.map(lambda _: LAZY, state)
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=state, restore_args=lazy))
    assert isinstance(restored, flax.core.FrozenDict)
    np.testing.assert_array_equal(restored["params"]["w"].get(), noise(4, 2))


def test_a_step_that_is_removed_is_gone(tmp_path, registered):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.CheckpointManager(tmp_path / "root", options=options, item_handlers=handler) as manager:
        manager.save(0, args=ocp.args.PyTreeSave({"w": noise(64, 8)}))
        lazy = manager.restore(0, args=ocp.args.PyTreeRestore(restore_args={"w": LAZY}))["w"]
        np.testing.assert_array_equal(lazy[:1].get(), noise(64, 8)[:1])
        manager.save(1, args=ocp.args.PyTreeSave({"w": noise(64, 8)}))
        with pytest.raises(CheckpointGoneError):
            lazy.get()


def test_lazy_text_has_dtype_object(tmp_path, registered):
    path = save(tmp_path / "item", {"text": "words", "w": noise(2)})
    lazy = restore(path, {"text": LAZY, "w": ocp.RestoreArgs()})["text"]
    assert lazy.dtype == np.dtype(object) and lazy.get() == np.asarray(b"words", object)


def test_a_key_that_is_not_stored(tmp_path, registered):
    path = save(tmp_path / "item", {"w": noise(2)})
    handler = ocp.type_handlers.get_type_handler(np.ndarray)
    info = ocp.type_handlers.ParamInfo(
        name="other", parent_dir=epath.Path(path), ts_context=ocp.type_handlers.get_ts_context()
    )
    with pytest.raises(CheckpointNotFoundError, match="'other'"):
        asyncio.run(handler.deserialize([info], [LAZY]))
