"""`nnx.State` as a target and as what is saved; stock Orbax and Flax's own state functions are the oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.query = nnx.Linear(size, size, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(size, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs, size=8, depth=2):
        self.layers = nnx.List([Block(size, rngs) for _ in range(depth)])
        self.scale = nnx.Param(jnp.ones((size,)), note="kept")


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


def other_state():
    """An abstract state of the same model."""
    return nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(1))))


def assert_same(got, expected):
    got_flat, expected_flat = dict(nnx.to_flat_state(got)), dict(nnx.to_flat_state(expected))
    assert set(got_flat) == set(expected_flat)
    for path, variable in expected_flat.items():
        assert type(got_flat[path]) is type(variable)
        assert got_flat[path].get_metadata() == variable.get_metadata()
        value, wanted = got_flat[path].get_value(), variable.get_value()
        assert value.dtype == wanted.dtype
        if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            value, wanted = jax.random.key_data(value), jax.random.key_data(wanted)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted))


def stock_saved(path, tree):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


@pytest.mark.slow
def test_names_have_no_value_and_integers_as_text(model):
    state = nnx.state(model)
    plan = ot.plan_restore(checkpoint({}), state, fallback_for=[".*"], fallback=state)
    assert_same(plan.execute(), state)
    names = {entry.name for entry in plan.entries}
    assert "layers/0/query/kernel" in names and "scale" in names and not any(name.endswith("/value") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_that_stock_orbax_saved(tmp_path, model, abstract):
    """With the trailing `value` that stock Orbax writes."""
    state = nnx.state(model)
    path = stock_saved(tmp_path / "state", state)
    with ot.open_checkpoint(path) as opened:
        assert "layers/0/query/kernel/value" in opened.leaves
    target = other_state() if abstract else nnx.state(Model(nnx.Rngs(1)))
    assert_same(ot.restore(path, target), state)


def test_a_pure_dict_that_stock_orbax_saved(tmp_path, model):
    """Without the trailing `value`; integer keys are text in the file and integers in what comes back."""
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    path = stock_saved(tmp_path / "pure", pure)
    restored = ot.restore(path, nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(1))), nnx.Param))
    assert_same(restored, nnx.state(model, nnx.Param))
    everything = nnx.restore_int_paths(ot.restore(path, None))
    np.testing.assert_array_equal(everything["layers"][1]["query"]["kernel"], pure["layers"][1]["query"]["kernel"])
    as_pure = ot.restore(path, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pure))
    assert list(as_pure["layers"]) == [0, 1]


def test_filters_choose_what_is_restored(tmp_path, model):
    state = nnx.state(model)
    path = stock_saved(tmp_path / "state", state)
    parameters, rest = nnx.split_state(other_state(), nnx.Param, ...)
    with pytest.raises(ot.RestorePlanError, match="no place in the target"):
        ot.restore(path, parameters)
    got = ot.restore(path, parameters, strict=False)
    assert_same(got, nnx.filter_state(state, nnx.Param))
    assert_same(nnx.merge_state(got, ot.restore(path, rest, strict=False)), state)


def test_dtype_is_for_nnx_params_alone(tmp_path, model):
    path = stock_saved(tmp_path / "state", nnx.state(model))
    got = dict(nnx.to_flat_state(ot.restore(path, other_state(), dtype=jnp.bfloat16)))
    assert got["scale",].get_value().dtype == jnp.bfloat16
    assert got["layers", 0, "norm", "mean"].get_value().dtype == jnp.float32


def test_shardings_are_used(tmp_path, model):
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    path = stock_saved(tmp_path / "state", nnx.state(model, nnx.Param))

    def shard(variable):
        leaf = variable.get_value()
        sharding = NamedSharding(mesh, P("x"))
        return variable.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))

    abstract = nnx.filter_state(other_state(), nnx.Param)
    target = nnx.from_flat_state([(key, shard(variable)) for key, variable in nnx.to_flat_state(abstract)])
    got = ot.restore(path, target)
    assert_same(got, nnx.state(model, nnx.Param))
    assert all(leaf.sharding.spec == P("x") for leaf in jax.tree.leaves(got))


def test_a_linen_t5x_checkpoint_into_an_nnx_model():
    """Through an assignment map from the target's names to T5X's."""
    kernels = [np.random.default_rng(layer).standard_normal((8, 8)).astype(np.float32) for layer in range(2)]
    source = checkpoint(
        {
            **{
                f"target/decoder/layers_{layer}/self_attention/query/kernel": kernel
                for layer, kernel in enumerate(kernels)
            },
            "target/decoder/decoder_norm/scale": np.arange(8, dtype=np.float32),
            "state/step": np.int32(3),
        }
    )
    target = nnx.filter_state(other_state(), lambda path, _: path[-1] == "kernel" or path == ("scale",))
    rules = ot.transforms.AssignmentMap(
        [
            (r"layers/(\d+)/query/kernel", r"target/decoder/layers_\1/self_attention/query/kernel"),
            (r"scale", r"target/decoder/decoder_norm/scale"),
        ]
    )
    got = ot.restore(source, target, [rules, ot.transforms.Drop(["state/.*"])])
    for layer, kernel in enumerate(kernels):
        np.testing.assert_array_equal(got["layers"][layer]["query"]["kernel"].get_value(), kernel)
    model = Model(nnx.Rngs(5))
    nnx.update(model, got)
    np.testing.assert_array_equal(model.scale.get_value(), np.arange(8))
    nnx.replace_by_pure_dict(target, nnx.to_pure_dict(got))


def test_what_is_saved_is_what_stock_orbax_saves(tmp_path, model):
    state = nnx.state(model)
    with ocp.CheckpointManager(tmp_path / "ours", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(0, args=ot.args.TrainStateRestore(other_state())), state)
    stock = stock_saved(tmp_path / "stock", state)
    with ot.open_checkpoint(tmp_path / "ours" / "0") as ours, ot.open_checkpoint(stock) as theirs:
        assert list(ours.leaves) == list(theirs.leaves)


def exported(path, item, **keywords):
    """What stock Orbax restores of an export in bfloat16: the names of leaves by dtype."""
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(path, args=ot.args.TrainStateSave(item, dtype="bfloat16", **keywords))
    with ocp.StandardCheckpointer() as checkpointer:
        flat = ot.state_utils.flatten_state_dict(checkpointer.restore(path))
    return {name.removesuffix("/value"): array.dtype.name for name, array in flat.items()}


def training(model):
    """A model and its optimizer, whose slots look like parameters and are none."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return nnx.state({"model": model, "opt": optimizer})


@pytest.mark.slow
def test_an_export_through_transforms_takes_dtype_for_params(model, tmp_path):
    """With transforms and without, the same leaves are written in `dtype`."""
    state = training(model)
    whole = exported(tmp_path / "whole", state)
    assert {"bfloat16", "float32"} <= set(whole.values())
    alone = exported(tmp_path / "alone", state, transforms=[ot.transforms.Drop(["opt/.*"])])
    assert alone == {name: dtype for name, dtype in whole.items() if not name.startswith("opt/")}
    assert alone["model/layers/0/query/kernel"] == "bfloat16" and alone["model/layers/0/norm/mean"] == "float32"


@pytest.mark.slow
def test_an_export_takes_dtype_for_params_beside_a_subtree_of_them(model, tmp_path):
    tree = {"params": {"a": jnp.ones(2)}, "m": training(model)}
    whole = exported(tmp_path / "whole", tree)
    alone = exported(tmp_path / "alone", tree, transforms=[ot.transforms.Drop(["m/opt/.*"])])
    assert alone["params/a"] == alone["m/model/scale"] == "bfloat16"
    assert alone == {name: dtype for name, dtype in whole.items() if not name.startswith("m/opt/")}


def test_params_stay_params_under_other_names(model, tmp_path):
    """Renamed, stacked, sliced, or changed by a function; and what takes a parameter's name is none for that."""
    T = ot.transforms

    def doubled(state, target):
        state["model"]["gain"]["b"] = state["model"]["gain"].pop("a") * 2
        state["model"]["gain"]["other"] = jnp.ones(2)
        return state

    def halved(state, target):
        state["model"]["gain"]["c"] = state["model"]["gain"]["c"] / 2
        return state

    dtypes = exported(
        tmp_path / "c",
        training(model),
        transforms=[
            T.Rename([(r"model/scale", "model/gain/a")]),
            T.StackLayers(r"model/layers/(?P<i>\d+)/query/kernel", "model/stack", 0),
            T.Slice("model/stack", np.s_[:, :4]),
            T.Rename([(r"model/layers/0/norm/mean", "model/scale")]),
            T.Rename([(r"model/layers/0/norm/bias", "model/gain/c")]),
            halved,
            doubled,
        ],
    )
    assert dtypes["model/stack"] == dtypes["model/gain/c"] == dtypes["model/layers/1/norm/bias"] == "bfloat16"
    assert dtypes["model/scale"] == dtypes["model/gain/other"] == dtypes["model/layers/1/norm/mean"] == "float32"
    assert {dtype for name, dtype in dtypes.items() if name.startswith("opt/")} <= {"float32", "uint32", "int32"}
    # A new array under a new name: a function does not say what it was made from.
    assert dtypes["model/gain/b"] == "float32"
