"""What is used of Orbax v1 beyond its documented interface is there, and means what `orbax_v1_names` takes it for."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as v1
from etils import epath

import orbax_t5x as ot
from orbax_t5x.handlers.orbax_names import step_directory
from orbax_t5x.handlers.v1.orbax_v1_names import (
    active_context,
    global_entries,
    manager_of,
    recorded_type,
    stored_dtype,
    transfer_limit,
)


def test_the_active_context_is_that_of_the_innermost_with():
    outer, inner = v1.Context(), v1.Context()
    inner.memory.read_concurrent_bytes = 7
    with outer:
        assert active_context() is outer
        with inner:
            assert active_context() is inner
        assert active_context() is outer
    assert active_context().memory.read_concurrent_bytes is None


def test_the_type_that_v1_records_is_the_one_that_is_taken_for_it(tmp_path):
    v1.save(tmp_path / "1", {"a": np.ones(2)})
    recorded = json.loads((tmp_path / "1" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert recorded == {"state": recorded_type()}


def test_the_dtype_that_v1_stores_is_the_one_that_is_taken_for_it(tmp_path):
    made = v1.Context()
    storage = made.array.saving.storage_options
    storage.dtype = np.float16
    made.array.saving.scoped_storage_options_creator = lambda path, value: (
        type(storage)(dtype=jnp.bfloat16) if "a" in jax.tree_util.keystr(path) else None
    )
    tree = {"a": jnp.ones(2), "b": np.ones(2, np.float32), "c": 2.0}
    with made:
        v1.save(tmp_path / "1", tree)
    with ot.open_checkpoint(tmp_path / "1") as opened:
        stored = {name: leaf.dtype for name, leaf in opened.leaves.items()}
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert stored == {path[0].key: stored_dtype(made, path, leaf) for path, leaf in paths}
    assert stored_dtype(v1.Context(), paths[0][0], tree["a"]) is None


def test_the_limit_on_transfers_is_the_contexts():
    made = v1.Context()
    assert transfer_limit(made) is None
    made.memory.transfer_concurrent_bytes = 5
    assert transfer_limit(made) == 5


def test_orbaxs_handler_takes_a_context_and_its_futures_can_be_waited_for(tmp_path):
    """What the handler of v1 delegates to: a context of one's own, and an awaitable that has Orbax's futures."""
    handler = v1.handlers.PyTreeHandler(context=v1.Context())
    futures = []

    class Recorder(v1.CheckpointableHandler):
        async def save(self, directory, checkpointable):
            written = await handler.save(directory, checkpointable)
            futures.extend(written.commit_futures)
            return written

        def is_handleable(self, checkpointable):
            return True

    registry = v1.handlers.local_registry(include_global_registry=False).add(Recorder)
    made = v1.Context()
    made.checkpointables.registry = registry
    with made:
        v1.save(tmp_path / "1", {"a": np.ones(2)})
    assert futures
    for future in futures:
        future.result()


def test_the_handlers_of_the_whole_process_are_a_list_that_a_new_context_reads():
    entries = global_entries()
    assert entries is global_entries() and (v1.handlers.PyTreeHandler, None) in entries
    last = entries.pop()
    try:
        assert last not in v1.Context().checkpointables.registry.get_all_entries()
    finally:
        entries.append(last)


def test_a_checkpointers_manager_knows_its_steps(tmp_path):
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"a": np.ones(2)})
        manager = manager_of(checkpointer)
        assert list(manager.all_steps()) == [3] and step_directory(manager, 3) == epath.Path(tmp_path / "3")
