"""The handler behind `ocp.CheckpointManager`: what its users do with Orbax's own handlers, done with all three."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError


class Kind(NamedTuple):
    """A handler and its arguments."""

    handler: type
    save: type
    restore: type


KINDS = {
    "standard": Kind(ocp.StandardCheckpointHandler, ocp.args.StandardSave, ocp.args.StandardRestore),
    "pytree": Kind(ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
    "ours": Kind(ot.TrainStateHandler, ot.args.TrainStateSave, ot.args.TrainStateRestore),
}
# Of `PyTreeRestore` without shardings, for which two of the three do not ask.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request):
    return request.param


@pytest.fixture
def tree():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharded = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x", "y")))
    return {"w": sharded, "n": {"b": jnp.arange(3), "host": np.ones(2)}, "step": 3}


def manager(root, kind, **options):
    return ocp.CheckpointManager(root, item_handlers=kind.handler(), options=ocp.CheckpointManagerOptions(**options))


def assert_same(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert getattr(one, "sharding", None) == getattr(other, "sharding", None)


def save_steps(manager, kind, tree, steps, **given):
    for step in steps:
        manager.save(step, args=kind.save({**tree, "step": step}), **given)
    manager.wait_until_finished()


# -- which steps there are


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_to_keep": 2}, [2, 3]),
        ({"max_to_keep": 1, "keep_period": 2}, [0, 2, 3]),
        ({"save_interval_steps": 2}, [0, 2]),
        ({"step_prefix": "run", "step_format_fixed_length": 5}, [0, 1, 2, 3]),
        ({"enable_async_checkpointing": False}, [0, 1, 2, 3]),
        ({"todelete_subdir": "old", "max_to_keep": 1}, [3]),
        ({"atomicity_options": ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)}, [0, 1, 2, 3]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_decide_which_steps_there_are(tmp_path, kind, tree, options, steps):
    with manager(tmp_path, kind, **options) as written:
        save_steps(written, kind, tree, range(4))
        assert sorted(written.all_steps()) == steps
    assert ot.latest_step(tmp_path) == steps[-1]
    with manager(tmp_path, kind, **options, read_only=True) as read:
        assert sorted(read.all_steps()) == steps and read.latest_step() == steps[-1]
        for step in steps:
            assert_same(read.restore(step, args=kind.restore(tree)), {**tree, "step": step})


@pytest.mark.slow
def test_the_best_step_by_its_metrics(tmp_path, kind, tree):
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2}
    with manager(tmp_path, kind, **options) as written:
        for step, loss in enumerate((3.0, 1.0, 2.0)):
            written.save(step, args=kind.save(tree), metrics={"loss": loss})
        written.wait_until_finished()
        assert written.best_step() == 1 and sorted(written.all_steps()) == [1, 2]
        assert_same(written.restore(1, args=kind.restore(tree)), tree)


def test_steps_come_and_go(tmp_path, kind, tree):
    with manager(tmp_path, kind) as first, manager(tmp_path, kind) as second:
        save_steps(first, kind, tree, [0, 1])
        assert second.all_steps() == []
        second.reload()
        assert sorted(second.all_steps()) == [0, 1]
        first.delete(1)
        assert first.latest_step() == 0
        assert_same(first.restore(None, args=kind.restore(tree)), {**tree, "step": 0})
        assert not first.save(0, args=kind.save(tree))
        with pytest.raises(ValueError):
            first.save(0, args=kind.save(tree), force=True)
        first.check_for_errors()
        with pytest.raises(FileNotFoundError):
            first.restore(7, args=kind.restore(tree))


# -- what a step holds


def test_several_items(tmp_path, kind, tree):
    handlers = {"model": kind.handler(), "extra": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as both:
        items = ocp.args.Composite(model=kind.save(tree), extra=ocp.args.JsonSave({"a": 1}))
        both.save(0, args=items, metrics=None)
        both.wait_until_finished()
        restored = both.restore(0)
        assert_same(restored["model"], tree)
        assert restored["extra"] == {"a": 1}
        one = both.restore(0, args=ocp.args.Composite(model=kind.restore(tree)))
        assert list(one.keys()) == ["model"]
        assert_same(one["model"], tree)


def test_what_the_manager_tells_of_a_step_is_what_stock_orbax_tells(tmp_path, kind, tree):
    with manager(tmp_path, kind) as written:
        save_steps(written, kind, tree, [3])
        told = written.item_metadata(3)
    stock = ocp.PyTreeCheckpointHandler().metadata(written.directory / "3" / "default")
    assert jax.tree.structure(told.tree) == jax.tree.structure(stock.tree)
    for one, other in zip(jax.tree.leaves(told.tree), jax.tree.leaves(stock.tree), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert type(one) is type(other)


# -- kinds of leaves and trees


def chain():
    mask = {"w": True, "b": False}
    return optax.chain(optax.clip(1.0), optax.masked(optax.adamw(1e-3), mask)).init(
        {"w": jnp.ones(4), "b": jnp.ones(2)}
    )


class Pair(NamedTuple):
    """A container of its own type."""

    one: jax.Array
    two: dict


TREES = {
    "scalars": lambda: {"i": 3, "f": 2.5, "i8": np.ones(2, np.int8), "flag": np.array([True, False])},
    "empties": lambda: {"a": None, "b": {}, "c": [], "d": (), "w": jnp.ones(2)},
    "containers": lambda: {"l": [jnp.ones(2), (np.ones(3), jnp.zeros(()))], "p": Pair(jnp.ones(2), {"x": 1})},
    "optax": chain,
    "dtypes": lambda: {name: jnp.ones((2, 2), name) for name in ("bfloat16", "float16", "int8", "uint32", "bool")},
    "keys": lambda: {
        "typed": jax.random.key(1),
        "raw": jax.random.PRNGKey(1),
        "split": jax.random.split(jax.random.key(1)),
    },
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_trees_of_all_kinds_come_back(tmp_path, kind, make):
    tree = make()
    with manager(tmp_path, kind) as written:
        written.save(0, args=kind.save(tree))
        written.wait_until_finished()
        restored = written.restore(0, args=kind.restore(tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        if isinstance(other, jax.Array) and jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert type(one) is type(other) and np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one, other)


def test_other_meshes(tmp_path, kind, tree):
    with manager(tmp_path, kind) as written:
        save_steps(written, kind, tree, [3])
        for count in (4, 1, 2, 8):
            mesh = Mesh(np.array(jax.devices()[:count]), ("z",))
            rows = NamedSharding(mesh, PartitionSpec("z"))
            target = {**tree, "w": jax.ShapeDtypeStruct((8, 8), tree["w"].dtype, sharding=rows)}
            args = kind.restore(target)
            if kind.restore is ocp.args.PyTreeRestore:
                args = kind.restore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
            restored = written.restore(3, args=args)
            assert restored["w"].sharding == rows
            np.testing.assert_array_equal(restored["w"], tree["w"])


@pytest.mark.parametrize(
    "options",
    [{"use_ocdbt": False}, {"use_zarr3": True}, {"use_zarr3": True, "use_ocdbt": False}, {"use_compression": False}],
)
def test_layouts_are_those_that_stock_orbax_writes(tmp_path, tree, options):
    stock, ours = (
        ocp.Checkpointer(handler(**options)) for handler in (ocp.PyTreeCheckpointHandler, ot.TrainStateHandler)
    )
    with stock, ours:
        stock.save(tmp_path / "stock", args=ocp.args.PyTreeSave(tree))
        ours.save(tmp_path / "ours", args=ot.args.TrainStateSave(tree))
        assert_same(ours.restore(tmp_path / "stock", args=ot.args.TrainStateRestore(tree)), tree)
        assert_same(stock.restore(tmp_path / "ours", args=ocp.args.PyTreeRestore(tree)), tree)

    def files(name):
        found = (path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*"))
        return sorted(str(path) for path in found if "d" not in path.parts)

    assert files("ours") == sorted([*files("stock"), "_CHECKSUMS.json"])


# -- at the same time


def test_what_was_saved_is_what_was_there_when_save_was_called(tmp_path, kind):
    host = np.ones(1000)
    device = jnp.ones(1000)
    with manager(tmp_path, kind) as written:
        written.save(0, args=kind.save({"host": host, "device": device}))
        host[:] = 7
        jax.jit(lambda x: x * 2, donate_argnums=0)(device)
        written.wait_until_finished()
        restored = written.restore(0, args=kind.restore({"host": np.zeros(1000), "device": np.zeros(1000)}))
    np.testing.assert_array_equal(restored["host"], 1)
    np.testing.assert_array_equal(restored["device"], 1)


def test_an_older_step_is_restored_while_the_next_is_saved(tmp_path, kind, tree):
    with manager(tmp_path, kind) as written:
        save_steps(written, kind, tree, [0])
        written.save(1, args=kind.save(tree))
        assert_same(written.restore(0, args=kind.restore(tree)), {**tree, "step": 0})
        written.wait_until_finished()
        assert written.latest_step() == 1


# -- without item_handlers


@pytest.mark.parametrize("first", [None, ot.args.TrainStateRestore()], ids=["no args", "empty args"])
def test_a_manager_that_knows_no_handler_takes_it_from_the_first_arguments(tmp_path, tree, first):
    """`restore(step)` without arguments makes Orbax bind the handler whose name the step records, which is its own."""
    with ocp.CheckpointManager(tmp_path) as written:
        written.save(0, args=ot.args.TrainStateSave(tree))
    with ocp.CheckpointManager(tmp_path) as read:
        restored = read.restore(0) if first is None else read.restore(0, args=first)
        assert_same(restored, tree)
        if first is None:
            with pytest.raises(ValueError, match="does not match with any registered handler"):
                read.restore(0, args=ot.args.TrainStateRestore(tree))
            assert_same(read.restore(0, args=ocp.args.PyTreeRestore(tree)), tree)
        else:
            assert_same(read.restore(0, args=ot.args.TrainStateRestore(tree)), tree)
            assert read.save(1, args=ot.args.TrainStateSave(tree))
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as read:
        assert_same(read.restore(0), tree)
        assert_same(read.restore(0, args=ot.args.TrainStateRestore(tree)), tree)


def test_an_empty_root_and_another_source(tmp_path, tree):
    """A manager looks for the step before it asks a handler; a Checkpointer takes any directory that is there."""
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "other", args=ot.args.TrainStateSave(tree))
    args = ot.args.TrainStateRestore(tree, source=tmp_path / "other")
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=ot.TrainStateHandler()) as read:
        for step in (None, 0):
            with pytest.raises(FileNotFoundError, match=r"No steps found|not found"):
                read.restore(step, args=args)
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "run", args=args), tree)
    assert_same(ot.restore(tmp_path / "other", tree), tree)


def test_stock_orbaxs_item_is_told_apart_from_ours(tmp_path, tree):
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "item", tree)
        assert_same(checkpointer.restore(tmp_path / "item", tree), tree)
        with pytest.raises(RestorePlanError, match="pass the tree as target="):
            checkpointer.restore(tmp_path / "item", item=tree)
    recorded = json.loads((tmp_path / "item" / "_METADATA").read_text())
    assert recorded["custom_metadata"]["orbax_t5x"]["provenance"] == []
