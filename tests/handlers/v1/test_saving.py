"""Saves through Orbax v1."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from tests.support.orbax_v1 import abstract_of, assert_same
from tests.support.train_states import inference_state, sharded, training_state
from tests.support.v1_trees import placed, plain_tree

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


@pytest.mark.slow
@pytest.mark.parametrize("make", [training_state, inference_state])
def test_t5x_states_are_written_by_their_state_dict(tmp_path, make):
    state = make()
    with ot.v1.context():
        ocp.save(tmp_path / "1", state)
        target = sharded(state)
        # A T5X state is a target by itself: its names are no pytree's.
        for abstract in (ot.v1.AbstractTrainState(target), target):
            loaded = ocp.load(tmp_path / "1", abstract)
            assert_same(loaded, state)
            assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == [
                leaf.sharding for leaf in jax.tree.leaves(target)
            ]
    stock = ocp.load(tmp_path / "1")
    assert stock.keys() == state.state_dict().keys()
    jax.tree.map(np.testing.assert_array_equal, stock["target"], state.state_dict()["target"])


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["save", "save_checkpointables", "save_async", "save_checkpointables_async"])
def test_each_way_to_save(tmp_path, saves):
    tree = plain_tree()
    what = {"state": tree} if "checkpointables" in saves else tree
    with ot.v1.context():
        response = getattr(ocp, saves)(tmp_path / "1", what)
        if response is not None:
            response.result()
        loaded = ocp.load_checkpointables(tmp_path / "1", {"state": ot.v1.AbstractTrainState(abstract_of(tree))})
    assert_same(loaded["state"], tree)
    assert (tmp_path / "1" / "state" / "_CHECKSUMS.json").exists()


def test_the_caller_may_write_over_its_arrays_and_give_them_away(tmp_path):
    host, device = np.arange(1 << 16), jnp.arange(1 << 16)
    expected = host.copy()
    with ot.v1.context():
        response = ocp.save_async(tmp_path / "1", {"host": host, "device": device})
        host[:] = 0
        device = jax.jit(lambda array: array * 0, donate_argnums=0)(device)
        response.result()
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None))
    for array in loaded.values():
        np.testing.assert_array_equal(array, expected)


def options_of(context, name):
    saving = context.array.saving
    if name == "no ocdbt":
        saving.use_ocdbt = False
    elif name == "zarr2":
        saving.use_zarr3 = False
    elif name == "no compression":
        saving.use_compression = False
    elif name == "dtype":
        saving.storage_options.dtype = jnp.bfloat16
    elif name == "scoped dtype":
        storage = type(saving.storage_options)
        saving.storage_options.dtype = jnp.float16
        saving.scoped_storage_options_creator = lambda path, value: (
            storage(dtype=jnp.bfloat16) if "a" in jax.tree_util.keystr(path) else None
        )
    elif name == "chunks":
        saving.storage_options.chunk_byte_size = 64
    elif name == "transfers":
        context.memory.transfer_concurrent_bytes = 1 << 10
    return context


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["no ocdbt", "zarr2", "no compression", "dtype", "scoped dtype", "chunks", "transfers"]
)
def test_options_of_the_context_hold_and_what_is_stored_has_its_checksums(tmp_path, name):
    rng = np.random.default_rng(0)
    tree = {
        "a": placed(rng.normal(size=(8, 16)).astype(np.float32), "x"),
        "b": rng.normal(size=(4, 4)).astype(np.float32),
        "c": 2.7,
    }
    with options_of(ot.v1.context(), name):
        ocp.save(tmp_path / "ours", tree)
    with options_of(ocp.Context(), name):
        ocp.save(tmp_path / "stock", tree)
    report = ot.verify(tmp_path / "ours")
    assert {leaf.name: leaf.status for leaf in report.leaves} == dict.fromkeys("abc", "ok")
    with ot.open_checkpoint(tmp_path / "ours") as ours, ot.open_checkpoint(tmp_path / "stock") as stock:
        assert {n: (leaf.shape, leaf.dtype) for n, leaf in ours.leaves.items()} == {
            n: (leaf.shape, leaf.dtype) for n, leaf in stock.leaves.items()
        }
        for leaf in "abc":
            np.testing.assert_array_equal(ours.leaves[leaf].get(), stock.leaves[leaf].get())
