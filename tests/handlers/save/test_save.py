"""What the handler writes: plain Orbax, checked before a byte is written; and nothing, where a save fails."""

import json

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.saving import custom_metadata, files, run, save, stock


@pytest.fixture
def sharded():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return NamedSharding(mesh, PartitionSpec("x", "y"))


@flax.struct.dataclass
class TrainState:
    """The two methods by which a T5X train state is known."""

    params: dict
    step: jax.Array

    def state_dict(self):
        return {
            "target": self.params,
            "state": {"step": self.step, "param_states": {"w": {"m": None, "v": jnp.ones(4)}}},
        }

    def restore_state(self, state_dict):
        return TrainState(params=state_dict["target"], step=state_dict["state"]["step"])


def test_stock_orbax_restores_it_in_a_process_that_never_imports_this_package(tmp_path, sharded):
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = TrainState({"dense": {"w": jax.device_put(w, sharded), "b": np.ones(3, ml_dtypes.bfloat16)}}, jnp.int32(7))
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(3, args=ot.args.TrainStateSave(state))
    np.save(tmp_path / "w.npy", w)
    code = f"""
        import sys, warnings
        import jax, ml_dtypes, numpy as np, orbax.checkpoint as ocp
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        root = {str(tmp_path / "root")!r}
        def check(restored):
            target = restored["target"]["dense"]
            np.testing.assert_array_equal(target["w"], np.load({str(tmp_path / "w.npy")!r}))
            assert target["b"].dtype == ml_dtypes.bfloat16 and (target["b"] == 1).all()
            assert restored["state"]["step"] == 7
            assert restored["state"]["param_states"]["w"]["m"] is None
        for args in (None, ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
            with ocp.CheckpointManager(root) as manager:
                check(manager.restore(3, args=args))
        check(ocp.PyTreeCheckpointer().restore(root + "/3/default"))
        check(ocp.StandardCheckpointer().restore(root + "/3/default"))
        check(ocp.v1.load_checkpointables(root + "/3")["default"])
        assert not [name for name in sys.modules if name.startswith("orbax_t5x")]
    """
    run(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}]
)
def test_any_other_tree_is_written_as_stock_orbax_writes_it(tmp_path, sharded, options):
    tree = {
        "array": jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), sharded),
        "numpy": np.arange(6, dtype=np.int64),
        "bool": np.array([True, False]),
        "scalars": [1, 2.5, True, np.float32(3)],
        "text": "words",
        "none": None,
        "empty": {},
        "tuple": (np.ones(2), (np.zeros(1),)),
        "optax": optax.adam(0.1).init({"w": jnp.ones(3)}),
        "key": jax.random.key(3),
    }
    ours = save(tmp_path / "ours", tree, options)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "stock", args=ocp.args.PyTreeSave(tree))

    metadata = [json.loads((tmp_path / name / "_METADATA").read_text()) for name in ("ours", "stock")]
    # That no rules were applied is recorded, too; all else is equal.
    assert metadata[0].pop("custom_metadata") == {provenance.KEY: {"provenance": []}}
    metadata[1].pop("custom_metadata")
    assert metadata[0] == metadata[1]
    steps = [json.loads((tmp_path / name / "_CHECKPOINT_METADATA").read_text()) for name in ("ours", "stock")]
    assert steps[0]["item_handlers"] == steps[1]["item_handlers"]
    tops = [{name.split("/")[0] for name in files(directory)} for directory in (ours, tmp_path / "stock")]
    assert tops[0] == tops[1] | {"_CHECKSUMS.json"}
    restored, expected = stock(ours), stock(tmp_path / "stock")
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_placeholders_are_orbaxs(tmp_path):
    save(tmp_path / "c", {"left out": ..., "kept": np.ones(2)})
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "c")
    assert restored["left out"] is ... and restored["kept"].sum() == 2
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        assert checkpointer.restore(tmp_path / "c")["left out"] is ...


def test_stock_orbax_restores_into_the_same_tree(tmp_path):
    tree = {"layers": [jnp.ones(3), (jnp.zeros(2),)], "optax": optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones(3)})}
    save(tmp_path / "ours", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "ours", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


def test_an_nnx_state_keeps_the_trailing_value_and_takes_dtype_for_its_params(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)))
            self.mean = nnx.BatchStat(jnp.zeros(3))
            self.count = nnx.Variable(jnp.int32(4))

    state = nnx.state(Model())
    save(tmp_path / "ours", state, dtype=jnp.bfloat16)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "stock", args=ocp.args.PyTreeSave(state))
    restored, expected = stock(tmp_path / "ours"), stock(tmp_path / "stock")
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    assert restored["kernel"]["value"].dtype == jnp.bfloat16
    assert restored["mean"]["value"].dtype == jnp.float32
    assert restored["count"]["value"] == 4


@pytest.mark.parametrize("top", ["target", "params"])
def test_dtype_casts_floating_point_model_parameters_and_nothing_else(tmp_path, sharded, top):
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8)
    state = {
        top: {
            "w": jax.device_put(values, sharded),
            "host": values,
            "ids": np.arange(3),
            "half": np.ones(2, np.float16),
        },
        "state": {"step": jnp.int32(1100001), "v": values},
    }
    save(tmp_path / "c", state, dtype="bfloat16")
    restored = stock(tmp_path / "c")
    for name in ("w", "host"):
        assert restored[top][name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(restored[top][name]), values.astype(ml_dtypes.bfloat16))
    assert restored[top]["ids"].dtype == np.int64 and restored[top]["half"].dtype == jnp.bfloat16
    assert restored["state"]["step"] == 1100001 and restored["state"]["v"].dtype == np.float32


def test_dtype_that_applies_to_nothing_is_an_error(tmp_path):
    with pytest.raises(RestorePlanError, match="Cast"):
        save(tmp_path / "c", {"weights": np.ones(3, np.float32)}, dtype="bfloat16")
    with pytest.raises(RestorePlanError, match="int32"):
        save(tmp_path / "c", {"params": np.ones(3, np.float32)}, dtype="int32")
    assert files(tmp_path) == []


def test_names_that_orbax_would_join_to_one_are_an_error(tmp_path):
    """Stock Orbax writes one of the two over the other and says nothing."""
    with pytest.raises(RestorePlanError, match=r"a\.b") as raised:
        save(tmp_path / "c", {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)})
    assert raised.value.problems[0].kind == "duplicate"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (np.zeros((0, 2)), "no elements"),
        (10**400, "'x' is an integer that does not fit into 64 bits"),
        (-(2**63) - 1, "does not fit into 64 bits"),
        (object(), "is of type object"),
    ],
)
def test_only_what_may_be_skipped_is_said_to_be(tmp_path, leaf, said):
    with pytest.raises(UnsupportedCheckpointError, match=said) as raised:
        save(tmp_path / "c", {"x": leaf, "w": np.ones(2)})
    assert "on_unsupported='skip'" in str(raised.value)
    with pytest.raises(UnsupportedCheckpointError, match=said) as raised:
        save(tmp_path / "c", {"x": leaf})
    assert "on_unsupported" not in str(raised.value)


@pytest.mark.parametrize("given", ["x", 3, [{"source": "/data"}], {"source": "/data"}])
def test_what_is_no_provenance_is_no_damage(tmp_path, given):
    with pytest.raises(ValueError, match=r"^provenance=.* pass plan\.provenance of a restore, or \(\)") as raised:
        save(tmp_path / "c", {"w": np.ones(2)}, provenance=given)
    assert not isinstance(raised.value, ot.errors.CheckpointError)
    with pytest.raises(ValueError, match=r"pass plan\.provenance"):
        ot.v1.context(provenance=given)


def test_a_memory_limit_is_a_number(tmp_path):
    with pytest.raises(TypeError, match="a number of bytes, such as 1 << 30, not '1G'"):
        save(tmp_path / "c", {"w": np.ones(2)}, memory_limit_bytes="1G")


def test_skipped_leaves_are_left_out_and_recorded(tmp_path):
    state = {
        "a": {"zero": np.zeros((0, 4), np.float32), "kept": np.ones(2)},
        "u": np.zeros((2, 3), ml_dtypes.uint4),
        "list": [np.zeros(0, np.int8), np.ones(1)],
    }
    save(tmp_path / "c", state, on_unsupported="skip")
    restored = stock(tmp_path / "c")
    assert restored.keys() == {"a", "list"} and restored["a"].keys() == {"kept"}
    assert restored["list"][0] is None and restored["list"][1] == 1
    assert provenance.skipped_from_metadata(custom_metadata(tmp_path / "c")) == {
        "a/zero": ((0, 4), "float32"),
        "u": ((2, 3), "uint4"),
        "list/0": ((0,), "int8"),
    }
    with pytest.raises(UnsupportedCheckpointError, match=r"without them there is nothing to save$"):
        save(tmp_path / "d", {"zero": np.zeros(0), "o": object()}, on_unsupported="skip")
    with pytest.raises(ValueError, match="on_unsupported"):
        save(tmp_path / "d", {"k": np.ones(1)}, on_unsupported="drop")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_provenance_and_custom_metadata_are_stored_side_by_side(tmp_path):
    record = {"text": "Translate()", "digest": "0"}
    save(tmp_path / "c", {"a": np.ones(2)}, provenance=[record], custom_metadata={"mine": [1, 2]})
    metadata = custom_metadata(tmp_path / "c")
    assert metadata["mine"] == [1, 2]
    assert provenance.from_metadata(metadata) == (record,)
    save(tmp_path / "d", {"a": np.ones(2)})
    assert provenance.from_metadata(custom_metadata(tmp_path / "d")) == ()
    save(tmp_path / "e", {"a": np.ones(2)}, provenance=())
    assert provenance.from_metadata(custom_metadata(tmp_path / "e")) == ()
    with pytest.raises(ValueError, match="provenance"):
        save(tmp_path / "f", {"a": np.ones(2)}, custom_metadata={provenance.KEY: {}})


class Doubled:
    def __call__(self, state_dict, target_state_dict, *, is_resuming=False):
        assert not is_resuming
        return {"renamed": state_dict["target"]["w"], "doubled": np.asarray(state_dict["target"]["b"]) * 2}


def test_transforms_are_applied_before_saving_and_keep_shardings(tmp_path, sharded):
    w = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), sharded)
    state = TrainState({"w": w, "b": np.arange(3.0)}, jnp.int32(0))
    save(tmp_path / "c", state, transforms=[Doubled()])
    restored = stock(tmp_path / "c")
    assert restored.keys() == {"renamed", "doubled"}
    np.testing.assert_array_equal(restored["renamed"], w)
    assert restored["renamed"].sharding == w.sharding
    np.testing.assert_array_equal(restored["doubled"], [0, 2, 4])


def test_transforms_that_do_not_fit_fail_before_anything_is_written(tmp_path):
    with pytest.raises(RestorePlanError):
        save(tmp_path / "c", {"a": np.ones(2)}, transforms=[ot.transforms.StackLayers(r"l(\d+)", "l", 0)])
    assert files(tmp_path) == []


def test_the_legacy_call_without_args_works(tmp_path):
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": np.ones(2)})
    np.testing.assert_array_equal(stock(tmp_path / "c")["a"], np.ones(2))


def test_metadata_is_orbaxs(tmp_path):
    handler = ot.TrainStateHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=ot.args.TrainStateSave({"a": jnp.ones((2, 3))}))
        manager.wait_until_finished()
        assert manager.item_metadata(0).tree["a"].shape == (2, 3)


def test_transforms_move_typed_keys_as_one_element_each(tmp_path):
    keys = jax.random.split(jax.random.key(5), 2)
    tree = {"keys": keys, "other": jax.random.key(3, impl="rbg"), "params": {"w": jnp.ones(3)}}

    def turned(state, target):
        return {**state, "turned": state["keys"][::-1]}

    path = save(
        tmp_path / "item",
        tree,
        transforms=[ot.transforms.Rename([("other", "params/moved")]), turned, ot.transforms.Drop(["keys"])],
        dtype="bfloat16",
    )
    found = stock(path)
    assert found["params"]["w"].dtype == jnp.bfloat16
    for one, other in ((found["turned"], keys[::-1]), (found["params"]["moved"], tree["other"])):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))


@pytest.mark.parametrize(
    "transform",
    [
        ot.transforms.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 1),
        ot.transforms.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 0),
        ot.transforms.UnstackLayers("keys", "keys_{i}", -1),
        ot.transforms.Slice("keys", np.s_[..., ::-1]),
        ot.transforms.Transpose("keys"),
        ot.transforms.Reshape("keys", (4,)),
        ot.transforms.Cast("keys", "float32"),
        ot.transforms.Cast(".*", "bfloat16"),
        ot.transforms.Repeat("keys", 2, -1),
        ot.transforms.Pad("keys", (3,)),
        ot.transforms.Split("keys", ["a", "b"], -1),
        ot.transforms.Concat(["layers_0/key", "layers_1/key"], "key", 0),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_no_transform_reaches_into_a_typed_key_that_is_saved(tmp_path, transform):
    keys = jax.random.split(jax.random.key(5), 2)
    tree = {"keys": keys, "layers_0": {"key": keys[0]}, "layers_1": {"key": keys[1]}}
    with pytest.raises(RestorePlanError, match="key_data"):
        save(tmp_path / "item", tree, transforms=[transform])
    assert not (tmp_path / "item").exists()
