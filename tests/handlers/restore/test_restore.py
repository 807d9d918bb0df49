"""What the handler restores: with a target, any checkpoint through our plan; without one, what stock Orbax restores."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from jax.sharding import NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.saving import assert_same, data_files

BUNDLE = Path(__file__).parents[2] / "goldens" / "tf_bundle" / "t5_1_1_f32"
T5X_ORBAX = Path(__file__).parents[2] / "goldens" / "t5x_orbax"


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def registry(handler, item):
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    made.add(item, ot.args.TrainStateSave, handler)
    made.add(item, ot.args.TrainStateRestore, handler)
    return made


# How a manager is made, the item's name if it has one, and whether a manager that has not seen the item before can
# restore it without arguments: Orbax asks for a handler where names were given without one.
MANAGERS = {
    "one handler": (lambda root: ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()), None, True),
    "a handler by item": (
        lambda root: ocp.CheckpointManager(root, item_handlers={"state": ot.TrainStateHandler()}),
        "state",
        True,
    ),
    "a registry by item": (
        lambda root: ocp.CheckpointManager(root, handler_registry=registry(ot.TrainStateHandler(), "state")),
        "state",
        True,
    ),
    "a registry for any item": (
        lambda root: ocp.CheckpointManager(root, handler_registry=registry(ot.TrainStateHandler(), None)),
        "state",
        True,
    ),
    "found by its args": (lambda root: ocp.CheckpointManager(root), None, True),
    "found by its args, by item": (lambda root: ocp.CheckpointManager(root, item_names=("state",)), "state", False),
}


# Stock Orbax, where it finds its own handler for the item, warns that it takes the shardings from the file.
@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
@pytest.mark.parametrize(("make", "item", "knows"), MANAGERS.values(), ids=MANAGERS.keys())
def test_every_way_to_give_a_manager_the_handler(tmp_path, state, make, item, knows):
    def wrapped(args):
        return args if item is None else ocp.args.Composite(**{item: args})

    def unwrapped(restored):
        return restored if item is None else restored[item]

    with make(tmp_path) as manager:
        manager.save(0, args=wrapped(ot.args.TrainStateSave(state)))
        manager.wait_until_finished()
        assert_same(unwrapped(manager.restore(0, args=wrapped(ot.args.TrainStateRestore(abstract(state))))), state)
        assert_same(unwrapped(manager.restore(0)), state)
    with make(tmp_path) as manager:
        assert_same(unwrapped(manager.restore(0, args=wrapped(ot.args.TrainStateRestore(abstract(state))))), state)
    with make(tmp_path) as manager:
        if knows:
            assert_same(unwrapped(manager.restore(0)), state)


def test_restore_without_arguments_equals_stock_and_does_not_warn(tmp_path, state):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        for args in (None, ot.args.TrainStateRestore()):
            assert_same(manager.restore(0, args=args), state)


@pytest.mark.parametrize("save_args", [ocp.args.StandardSave, ocp.args.PyTreeSave])
def test_steps_that_stock_orbax_saved_restore_without_registration(tmp_path, mesh, state, save_args):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=save_args(state))
    rows = NamedSharding(mesh, PartitionSpec(("x", "y")))
    target = {
        "params": {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows), "b": np.zeros(4, np.float32)},
        "step": 0,
    }
    with ocp.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(5, args=ot.args.TrainStateRestore(target))
    assert restored["params"]["w"].sharding == rows
    np.testing.assert_array_equal(restored["params"]["w"], state["params"]["w"])
    assert type(restored["params"]["b"]) is np.ndarray and type(restored["step"]) is int


def test_target_none_is_everything_as_numpy(tmp_path, state):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ot.args.TrainStateRestore(None))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(restored))
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_keywords_without_a_target_are_an_error_that_names_them(tmp_path, state):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
        with pytest.raises(RestorePlanError, match=r"(?s)strict=.*target=None"):
            manager.restore(0, args=ot.args.TrainStateRestore(strict=False))


def test_the_keywords_of_restore_reach_the_plan(tmp_path, state):
    seen = []
    renamed = {"model": abstract(state["params"]), "extra": np.zeros(2), "old": ...}
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, provenance=()))
        manager.wait_until_finished()
        restored = manager.restore(
            0,
            args=ot.args.TrainStateRestore(
                renamed,
                ot.transforms.Rename([(r"params/(.*)", r"model/\1")]),
                fallback={"extra": np.full(2, 7.0)},
                strict=False,
                verify="off",
                memory_limit_bytes=1 << 20,
                progress=lambda done, total, leaf: seen.append((done, total, leaf)),
            ),
        )
        with pytest.raises(RestorePlanError) as raised:
            manager.restore(0, args=ot.args.TrainStateRestore({"params": {"w": np.zeros((3, 3), np.float32)}}))
        assert {problem.kind for problem in raised.value.problems} == {"shape", "leftover"}
    np.testing.assert_array_equal(restored["model"]["w"], state["params"]["w"])
    assert restored["extra"].tolist() == [7, 7] and restored["old"] is ...
    assert seen and seen[-1][0] == seen[-1][1]


def expected_of(directory):
    types = json.loads((directory / "expected_meta.json").read_text())["tensors"]
    with np.load(directory / "expected.npz") as values:
        return {name: values[name] for name in values.files}, types


def test_a_bundle_restores_from_its_directory_and_from_a_prefix_elsewhere(tmp_path, mesh):
    expected, _ = expected_of(BUNDLE)
    name = "encoder/block_000/layer_001/DenseReluDense/wo/kernel"
    shape = expected[name].shape
    target = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x", "y")))}
    tree = {}
    node = tree
    for part in name.split("/")[:-1]:
        node = node.setdefault(part, {})
    node[name.split("/")[-1]] = target[name]
    handler = ot.TrainStateHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        (tmp_path / "empty").mkdir()
        prefix = next(BUNDLE.glob("*.index")).with_suffix("")
        for directory, source in (
            (BUNDLE, None),
            (tmp_path / "empty", prefix),
            (tmp_path / "empty", str(prefix) + ".index"),
        ):
            restored = checkpointer.restore(
                directory, args=ot.args.TrainStateRestore(tree, source=source, strict=False)
            )
            (leaf,) = jax.tree.leaves(restored)
            np.testing.assert_array_equal(leaf, expected[name])
            assert leaf.sharding == target[name].sharding
            assert handler.provenance == ()
        with ot.open_checkpoint(BUNDLE) as opened:
            args = ot.args.TrainStateRestore(tree, source=opened, strict=False)
            checkpointer.restore(tmp_path / "empty", args=args)
            # The caller's own checkpoint stays open.
            assert opened.leaves[name].get().shape == shape


@pytest.mark.parametrize("fixture", ["d8_adafactor", "d1_adamw_oldjax"])
def test_t5x_through_orbax_roots(tmp_path, fixture):
    root = T5X_ORBAX / fixture
    with np.load(root / "expected.npz") as values:
        expected = {name: values[name] for name in values.files}
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", read_only=True)
    with ocp.CheckpointManager(root, item_handlers={"state": ot.TrainStateHandler()}, options=options) as manager:
        assert manager.latest_step() == 3
        restored = manager.restore(3, args=ocp.args.Composite(state=ot.args.TrainStateRestore(None)))["state"]
    flat = ot.state_utils.flatten_state_dict(restored)
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flat.items() if leaf is not None}
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, np.asarray(expected[name], np.float32))


@pytest.mark.slow
def test_a_t5x_train_state_is_written_in_t5xs_layout_and_comes_back(tmp_path, mesh):
    def create(seed):
        params = {"dense": {"kernel": jax.random.normal(jax.random.key(seed), (16, 8)), "bias": jnp.ones(8)}}
        axes = {"dense": {"kernel_axes": AxisMetadata(("embed", "mlp")), "bias_axes": AxisMetadata(("mlp",))}}
        variables = {"params": params, "params_axes": axes}
        optimizer = ot.adafactor.Adafactor(0.1, min_dim_size_to_factor=8)
        return ot.train_state.FlaxOptimTrainState.create(optimizer, variables)

    state = create(0)
    with ocp.CheckpointManager(tmp_path, item_handlers={"state": ot.TrainStateHandler()}) as manager:
        manager.save(0, args=ocp.args.Composite(state=ot.args.TrainStateSave(state)))
        manager.wait_until_finished()
        for target in (create(1), jax.eval_shape(create, 1)):
            restored = manager.restore(0, args=ocp.args.Composite(state=ot.args.TrainStateRestore(target))).state
            assert type(restored) is type(state)
            jax.tree.map(np.testing.assert_array_equal, restored.state_dict(), state.state_dict())
        stock = manager.restore(0).state
    assert stock.keys() == {"target", "state"} and stock["state"].keys() == {"step", "param_states"}
    assert (
        ot.state_utils.flatten_state_dict(stock).keys() == ot.state_utils.flatten_state_dict(state.state_dict()).keys()
    )


@pytest.mark.slow
def test_an_nnx_state_comes_back_as_one(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])

    state = nnx.state(Model(nnx.Rngs(0)))
    target = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(1))))
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ot.args.TrainStateRestore(target))
    assert isinstance(restored, nnx.State)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(restored), nnx.to_pure_dict(state))


def test_an_async_checkpointer_takes_the_handler(tmp_path, state):
    with ocp.AsyncCheckpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ot.args.TrainStateSave(state))
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "c", args=ot.args.TrainStateRestore(abstract(state))), state)
        with pytest.raises(UnsupportedCheckpointError):
            checkpointer.save(tmp_path / "d", args=ot.args.TrainStateSave({"a": np.zeros(0)}))
    assert {Path(name).parts[0] for name in data_files(tmp_path)} == {"c"}


def test_what_is_wrong_with_a_checkpoint_is_a_typed_error(tmp_path, state):
    (tmp_path / "empty").mkdir()
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        with pytest.raises(CheckpointError, match="empty"):
            checkpointer.restore(tmp_path / "empty", args=ot.args.TrainStateRestore(None))
        with pytest.raises(CheckpointError, match="nowhere"):
            checkpointer.restore(tmp_path / "empty", args=ot.args.TrainStateRestore(None, source=tmp_path / "nowhere"))


def test_skipped_zero_size_leaves_come_back(tmp_path):
    tree = {"a": {"zero": np.zeros((0, 4), np.float32), "kept": np.ones(2)}, "z": np.zeros((3, 0), np.int8)}
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ot.args.TrainStateSave(tree, on_unsupported="skip"))
        for target in (None, tree):
            restored = checkpointer.restore(tmp_path / "c", args=ot.args.TrainStateRestore(target))
            assert jax.tree.structure(restored) == jax.tree.structure(tree)
            for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape


@pytest.mark.parametrize(
    "record",
    [{"shape": [0], "dtype": "O"}, {"shape": [0], "dtype": "((("}, {"shape": [0] * 33, "dtype": "int8"}, {"shape": 0}],
)
def test_a_damaged_record_of_skipped_leaves_is_an_error(tmp_path, record):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = {provenance.KEY: {"skipped": {"zero": record}}}
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave({"a": np.ones(1)}, custom_metadata=metadata))
    with pytest.raises(CorruptCheckpointError, match="'zero'"):
        ot.open_checkpoint(tmp_path / "c")


def test_importing_the_package_registers_nothing():
    """Orbax's table of args is process-wide; it is filled when the handler or its args are first used."""
    code = (
        "import orbax.checkpoint as ocp, orbax_t5x as ot, sys\n"
        "from orbax.checkpoint import checkpoint_args\n"
        "names = lambda: [c.__name__ for c in checkpoint_args._SAVE_ARG_TO_HANDLER]\n"
        "assert 'TrainStateSave' not in names()\n"
        "ot.args\n"
        "assert 'TrainStateSave' in names()\n"
        "assert ocp.args.get_registered_handler_cls(ot.args.TrainStateSave) is ot.TrainStateHandler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
