"""`ot.register_type_handlers`: lazy arrays in Orbax's own PyTreeSave and PyTreeRestore; stock Orbax is the oracle."""

import threading

import flax.linen.partitioning
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.handlers.type_handlers.numpy_or_lazy import NumpyOrLazyHandler
from orbax_t5x.lazy import as_view
from tests.support.jax_job import run_script
from tests.support.memory_checkpoint import AwaitedLeaf, FailingLeaf
from tests.support.pytrees import LAZY, noise, restore, save
from tests.support.saving import data_files
from tests.support.type_tables import in_another_process

MIB = 1 << 20
known = ocp.type_handlers


def own_table():
    return known.create_type_handler_registry(
        (int, known.ScalarHandler()), (np.ndarray, known.NumpyHandler()), (jax.Array, known.ArrayHandler())
    )


def test_a_manager_goes_on_after_a_leaf_that_cannot_be_stored(tmp_path, registered):
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        bad = as_view(AwaitedLeaf("w", np.zeros((0, 3), np.float32)))
        manager.save(0, args=ocp.args.PyTreeSave({"bad": bad, "good": as_view(AwaitedLeaf("w", np.ones(3)))}))
        with pytest.raises(UnsupportedCheckpointError, match="has no elements"):
            manager.wait_until_finished()
        manager.save(1, args=ocp.args.PyTreeSave({"good": as_view(AwaitedLeaf("w", np.ones(3)))}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_without_registration_orbax_refuses(tmp_path):
    with pytest.raises(ValueError, match="TypeHandler lookup failed"):
        save(tmp_path / "item", {"w": as_view(AwaitedLeaf("w", np.ones(2)))})


def test_standard_saves_read_lazy_leaves_whole(tmp_path, registered):
    """Before any handler is asked, as without registration."""
    leaf = AwaitedLeaf("w", noise(512, 1024))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": as_view(leaf)})
    assert leaf.boxes == [((0, 512), (0, 1024))]
    np.testing.assert_array_equal(restore(tmp_path / "item")["w"], leaf.array)


def test_a_manager_saves_in_the_background_and_a_failure_surfaces(tmp_path, registered):
    w, gate = noise(64, 8), threading.Event()

    def read():
        assert gate.wait(60)
        return w

    value = np.ones(3)
    error = CheckpointIOError("no such luck", path="/memory", leaf="w")
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        lazy = ot.LazyThreadPoolArray(w.shape, w.dtype, read)
        tree = {
            "w": lazy,
            "value": as_view(value),
            "both": ot.concatenate([as_view(lazy)[0, :3], as_view(value).astype("f4")]),
        }
        tree["made of it"] = as_view(value).astype(np.float32)
        manager.save(0, args=ocp.args.PyTreeSave(tree))
        value[:] = 0  # the save has a copy
        gate.set()
        manager.wait_until_finished()
        manager.save(1, args=ocp.args.PyTreeSave({"w": as_view(FailingLeaf("w", w, error)), "value": value}))
        with pytest.raises(CheckpointIOError, match="no such luck"):
            manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        assert manager.all_steps() == [0]
        restored = manager.restore(0, args=ocp.args.PyTreeRestore())
    np.testing.assert_array_equal(restored["w"], w)
    np.testing.assert_array_equal(restored["value"], np.ones(3))
    np.testing.assert_array_equal(restored["made of it"], np.ones(3))
    np.testing.assert_array_equal(restored["both"], [*w[0, :3], 1, 1, 1])


def test_a_source_that_is_closed_too_early_says_so(tmp_path, registered):
    save(tmp_path / "source", {"w": noise(64, 8)})
    with ot.open_checkpoint(tmp_path / "source") as opened:
        lazy = opened.leaves["w"]
    with pytest.raises(ValueError, match="the checkpoint is closed"):
        save(tmp_path / "item", {"w": lazy})


def test_undo_restores_the_table():
    before = known.get_type_handler(np.ndarray)
    registration = ot.register_type_handlers()
    assert isinstance(known.get_type_handler(np.ndarray), NumpyOrLazyHandler)
    assert known.get_type_handler(ot.LazyArray) is known.get_type_handler("np.ndarray")
    assert known.get_type_handler(np.ndarray).typestr() == before.typestr()
    registration.undo()
    registration.undo()
    assert known.get_type_handler(np.ndarray) is known.get_type_handler("np.ndarray") is before
    assert not known.has_type_handler(ot.LazyArray)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_registrations_are_undone_in_any_order(tmp_path, order):
    """The settings of the newest that is left hold."""
    w, told = noise(4, 4), []
    before = known.get_type_handler(np.ndarray)
    made = [ot.register_type_handlers(progress=lambda *_, n=n: told.append(n)) for n in range(3)]
    left = {0, 1, 2}
    for number, one in enumerate(order):
        save(tmp_path / f"item_{number}", {"w": as_view(AwaitedLeaf("w", w))})
        assert told.pop() == max(left) and not told
        made[one].undo()
        left.remove(one)
    assert known.get_type_handler(np.ndarray) is before


def test_nested_with_blocks_of_equal_settings():
    with ot.register_type_handlers():
        with ot.register_type_handlers():
            pass
        assert known.has_type_handler(ot.LazyArray)
    assert not known.has_type_handler(ot.LazyArray)


def test_undo_keeps_a_handler_registered_since():
    before = known.get_type_handler(np.ndarray)
    other = known.NumpyHandler()
    with ot.register_type_handlers():
        known.register_type_handler(np.ndarray, other, override=True)
    assert known.get_type_handler(np.ndarray) is other
    known.register_type_handler(np.ndarray, before, override=True)


def test_a_registry_of_a_handler_is_registered_separately(tmp_path):
    table, w = own_table(), noise(8, 8)
    tree = {"w": as_view(AwaitedLeaf("w", w)), "step": 3}
    with ot.register_type_handlers(table):
        path = save(tmp_path / "item", tree, type_handler_registry=table)
        lazy = restore(path, {"w": LAZY, "step": ocp.RestoreArgs()}, type_handler_registry=table)["w"]
        with pytest.raises(ValueError, match="lookup failed"):
            save(tmp_path / "global", tree)
    np.testing.assert_array_equal(lazy.get(), w)
    assert not table.has(ot.LazyArray)


def test_options_of_the_numpy_handler_are_kept(tmp_path):
    """What stood in the table writes what is no lazy array."""
    table = known.create_type_handler_registry((np.ndarray, known.NumpyHandler(metadata_key="other.json")))
    with ot.register_type_handlers(table):
        path = save(tmp_path / "item", {"w": noise(2)}, type_handler_registry=table, use_ocdbt=False)
    assert (path / "w" / "other.json").exists()


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "said"),
    [
        ((ocp.PyTreeCheckpointHandler(),), {}, TypeError, "type_handler_registry="),
        ((np.ndarray,), {}, TypeError, "not a table of type handlers"),
        ((known.create_type_handler_registry((int, known.ScalarHandler())),), {}, ValueError, r"registry\.add\("),
        ((), {"memory_limit_bytes": 0}, ValueError, "at least 1"),
        ((), {"memory_limit_bytes": "1G"}, TypeError, "not '1G'"),
        ((), {"progress": "foo"}, ValueError, "'bar'"),
        ((), {"active_processes": set()}, ValueError, "pass None for all processes"),
        ((), {"active_processes": {-1}}, ValueError, "has -1; processes are numbered from 0"),
        ((), {"active_processes": 0}, TypeError, r"such as {0, 1}, not 0$"),
        ((), {"active_processes": "0"}, TypeError, r"not '0'$"),
        ((), {"active_processes": {True}}, TypeError, r"not {True}$"),
    ],
)
def test_arguments_that_cannot_be(arguments, keywords, error, said):
    with pytest.raises(error, match=said):
        ot.register_type_handlers(*arguments, **keywords)


@pytest.mark.parametrize("processes", [{1}, [0, 5], {np.int64(1)}])
@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_unknown_active_processes_are_refused(tmp_path, processes, kind):
    """Their chunks would not be written, and the save would end without an error."""
    tree = {"lazy": ot.LazyThreadPoolArray((3,), np.float32, lambda: np.ones(3, np.float32)), "numpy": np.ones(3)}
    message = "but the last process is number 0"
    stock = ocp.PyTreeCheckpointHandler()
    with ot.register_type_handlers(active_processes=processes), kind(stock) as checkpointer:
        with pytest.raises(ValueError, match=message):
            checkpointer.save(tmp_path / "stock", args=ocp.args.PyTreeSave(tree))
            if isinstance(checkpointer, ocp.AsyncCheckpointer):
                checkpointer.wait_until_finished()
        checkpointer.save(tmp_path / "numpy", args=ocp.args.PyTreeSave({"numpy": np.ones(3)}))
    options = ocp.options.MultiprocessingOptions(active_processes=set(processes), barrier_sync_key_prefix="absent")
    with kind(ot.TrainStateHandler(multiprocessing_options=options)) as checkpointer:
        with pytest.raises(ValueError, match=message):
            checkpointer.save(tmp_path / "ours", args=ot.args.TrainStateSave(tree))
    assert not (tmp_path / "stock").exists() and not [name for name in data_files(tmp_path) if name.startswith("ours")]
    assert (tmp_path / "numpy" / "_METADATA").exists()


@pytest.mark.parametrize("given", [False, True])
def test_a_registration_leaves_the_train_state_handler_unchanged(tmp_path, given):
    """Checksums are written for NumPy arrays, and leaves are restored by a plan."""
    table = own_table() if given else None
    w = noise(8, 8)
    with ot.register_type_handlers(table):
        handler = ot.TrainStateHandler(type_handler_registry=table)
        with ocp.Checkpointer(handler) as checkpointer:
            tree = {"numpy": w, "lazy": as_view(AwaitedLeaf("w", w)), "jax": jnp.asarray(w)}
            checkpointer.save(tmp_path / "item", args=ot.args.TrainStateSave(tree))
            target = {name: jax.ShapeDtypeStruct((8, 8), np.float32) for name in tree}
            restored = checkpointer.restore(tmp_path / "item", args=ot.args.TrainStateRestore(target))
    assert all(isinstance(leaf, jax.Array) for leaf in restored.values())
    assert {leaf.name: leaf.status for leaf in ot.verify(tmp_path / "item").leaves} == dict.fromkeys(tree, "ok")


def variables():
    names = flax.linen.partitioning.AxisMetadata
    return {
        "params": {"dense": {"kernel": jnp.asarray(noise(16, 8)), "bias": jnp.ones(8)}},
        "params_axes": {"dense": {"kernel_axes": names(names=("embed", "mlp")), "bias_axes": names(names=("mlp",))}},
    }


def optimizer(name):
    adafactor = ot.adafactor.Adafactor(0.1, min_dim_size_to_factor=4)
    if name == "multi":
        traversal = flax.traverse_util.ModelParamTraversal
        parts = (traversal(lambda path, _: "bias" in path), adafactor)
        rest = (traversal(lambda path, _: "bias" not in path), ot.optimizers.adamw(0.1))
        return ot.optimizers.MultiOptimizer([parts, rest])
    return adafactor if name == "adafactor" else ot.optimizers.adamw(0.1)


# Flax deprecates the traversals that T5X's MultiOptimizer takes; T5X's users have nothing else to pass.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`flax.traverse_util.Traversal`:DeprecationWarning")
@pytest.mark.parametrize("name", ["adafactor", "adamw", "multi", "inference"])
def test_t5x_states_in_orbaxs_own_saves(tmp_path, registered, name):
    """Whole as a pytree, its leaves lazy or not; back by Orbax into the same type, and by a plan of ours."""
    if name == "inference":
        state = ot.train_state.InferenceState.create(variables())
    else:
        state = ot.train_state.FlaxOptimTrainState.create(optimizer(name), variables())
    lazy = jax.tree.map(lambda leaf: as_view(AwaitedLeaf("leaf", np.asarray(leaf))), state)
    for saved in (state, lazy):
        path = save(tmp_path / type(jax.tree.leaves(saved)[0]).__name__, saved)
        with ocp.PyTreeCheckpointer() as checkpointer:
            args = ocp.checkpoint_utils.construct_restore_args(state)
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=state, restore_args=args))
            asked = jax.tree.map(lambda _: LAZY, state)
            unread = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=state, restore_args=asked))
        assert type(restored) is type(unread) is type(state)
        assert all(isinstance(leaf, ot.LazyArray) for leaf in jax.tree.leaves(unread))
        for one in (restored, unread):
            assert jax.tree.structure(one) == jax.tree.structure(state)
            jax.tree.map(np.testing.assert_array_equal, one, state)
        if name != "inference":
            ours = ot.restore(path, jax.eval_shape(lambda: state))
            jax.tree.map(np.testing.assert_array_equal, ours, state)


BEFORE = """
    import orbax_t5x as ot
    ot.register_type_handlers().undo()  # asks JAX for nothing, which may be initialized later
"""
SCRIPT = """
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    root, source = sys.argv[1:]
    written = []
    progress = lambda *told: written.append(told)
    with (
        ot.register_type_handlers(memory_limit_bytes=1 << 16, progress=progress),
        ot.open_checkpoint(source) as opened,
        ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as manager,
    ):
        tree = {"lazy": opened.leaves["a"], "small": opened.leaves["b"], "numpy": np.arange(4)}
        manager.save(0, args=ocp.args.PyTreeSave(tree))
        manager.wait_until_finished()
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=ot.LazyArray), tree)
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=args))
        half = slice(256 * process, 256 * (process + 1))
        np.testing.assert_array_equal(restored["lazy"][half].get(), opened.leaves["a"][half].get())
    tell(len(written))
    if process == 0:
        # One process alone saves, and writes all chunks.
        alone = dict(primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone")
        alone = ocp.options.MultiprocessingOptions(**alone)
        one_by_one = ot.register_type_handlers(memory_limit_bytes=1, active_processes={0})
        with ot.open_checkpoint(source) as opened, one_by_one:
            stock = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
            own = ot.TrainStateHandler(multiprocessing_options=alone)
            tree = {"lazy": opened.leaves["a"]}
            for handler, args in (
                (stock, ocp.args.PyTreeSave(tree)),
                (own, ot.args.TrainStateSave(tree, memory_limit_bytes=1)),
            ):
                name = f"{root}_{type(handler).__name__}"
                with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
                    checkpointer.save(name, args=args)
                with ot.open_checkpoint(name) as saved:
                    np.testing.assert_array_equal(saved.leaves["lazy"].get(), opened.leaves["a"].get())
    multihost_utils.sync_global_devices("end")
"""


def test_two_processes_share_the_chunks(tmp_path):
    a = np.frombuffer(np.random.default_rng(0).bytes(8 * MIB), np.uint8).reshape(512, -1)  # 8 chunks of the least size
    b = np.arange(3, dtype=np.uint8)
    source = tmp_path / "source.safetensors"
    safetensors.numpy.save_file({"a": a, "b": b}, source)
    pieces = [lines[-1] for lines in run_script(SCRIPT, 2, tmp_path / "root", source, devices=1, before=BEFORE)]
    assert min(pieces) >= 3 and sum(pieces) == 8 + 1
    code = """
        import sys
        import numpy as np, orbax.checkpoint as ocp
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(sys.argv[1] + "/0/default")
        assert not [name for name in sys.modules if name.startswith("orbax_t5x")]
        np.savez(sys.argv[2], **restored)
    """
    in_another_process(code, tmp_path / "root", tmp_path / "restored.npz")
    with np.load(tmp_path / "restored.npz") as restored:
        for name, wanted in {"lazy": a, "small": b, "numpy": np.arange(4)}.items():
            np.testing.assert_array_equal(restored[name], wanted)
