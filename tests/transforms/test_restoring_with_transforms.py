"""Transforms through `ot.restore` and a CheckpointManager: the same maps on every format, against what others read."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS

# Three leaves of one shape in each checkpoint.
LEAVES = {
    "orbax": ("target/a/w", "target/b/w", "target/c/w"),
    "bundle": tuple(f"encoder/block_000/layer_000/SelfAttention/{p}" for p in "qkv"),
    "safetensors": tuple(f"encoder.block.0.layer.0.SelfAttention.{p}.weight" for p in "qkv"),
    "t5x_orbax": tuple(f"target/encoder/layers_0/attention/{p}/kernel" for p in ("query", "key", "value")),
}


def stock_tree():
    rng = np.random.default_rng(0)

    def leaf():
        return jnp.asarray(rng.standard_normal((8, 6)), jnp.float32)

    names = "abc"
    return {
        "target": {name: {"w": leaf()} for name in names},
        "state": {"step": jnp.int32(4), "param_states": {"0": {"mu": {name: {"w": leaf()} for name in names}}}},
    }


@pytest.fixture(scope="module")
def manager_root(tmp_path_factory):
    """A root with step 4, saved by stock Orbax."""
    root = tmp_path_factory.mktemp("stock") / "root"
    with ocp.CheckpointManager(root) as manager:
        manager.save(4, args=ocp.args.StandardSave(stock_tree()))
        manager.wait_until_finished()
    return root


@pytest.fixture(scope="module")
def sources(manager_root):
    """Format -> (path, keywords, values by name as others read them)."""
    orbax = {name: np.asarray(leaf) for name, leaf in flatten(stock_tree()).items()}
    with np.load(GOLDENS / "safetensors" / "t5_1_1_expected.npz") as file:
        safetensors = {name: file[name] for name in LEAVES["safetensors"]}
    with np.load(GOLDENS / "importer" / "t5_1_1_f32.npz") as file:
        translated = {"q": "query", "k": "key", "v": "value"}
        bundle = {
            name: file[f"target/encoder/layers_0/attention/{translated[name[-1]]}/kernel"] for name in LEAVES["bundle"]
        }
    with np.load(GOLDENS / "t5x_orbax" / "d1_adamw_oldjax" / "expected.npz") as file:
        t5x = {name: file[name] for name in LEAVES["t5x_orbax"]}
    return {
        "orbax": (manager_root, {}, orbax),
        "bundle": (GOLDENS / "tf_bundle" / "t5_1_1_f32", {}, bundle),
        "safetensors": (GOLDENS / "safetensors" / "t5_1_1", {}, safetensors),
        "t5x_orbax": (GOLDENS / "t5x_orbax" / "d1_adamw_oldjax", {"item": "state"}, t5x),
    }


def sharded(shape):
    mesh = Mesh(np.asarray(jax.devices()).reshape(8), ("x",))
    spec = PartitionSpec("x") if shape[0] % 8 == 0 else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def assert_leaves(result, expected):
    flat = flatten(result)
    assert sorted(flat) == sorted(expected)
    for name, value in expected.items():
        assert np.array_equal(np.asarray(flat[name]), value), name


def e(name):
    return re.escape(name)


MAPS = {
    "swap": lambda a, b, c: ([(e(a), b), (e(b), a)], {a: b, b: a, c: c}),
    "rotation": lambda a, b, c: ([(e(a), b), (e(b), c), (e(c), a)], {a: b, b: c, c: a}),
    "one_for_two": lambda a, b, c: ([("new/(1|2)", b)], {"new/1": b, "new/2": b, c: c}),
    "over_another": lambda a, b, c: ([(e(a), b)], {a: b, b: b, c: c}),
    "drop_and_fallback": lambda a, b, c: ([(e(a), None), (e(b), c)], {b: c, c: c}),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kind", LEAVES)
def test_maps_give_the_right_values(sources, kind, name):
    path, keywords, values = sources[kind]
    rules_, wanted = MAPS[name](*LEAVES[kind])
    shape = next(iter(values[leaf].shape for leaf in LEAVES[kind]))
    expected = {new: values[old] for new, old in wanted.items()}
    fallback = None
    if name == "drop_and_fallback":
        left_out = LEAVES[kind][0]
        expected[left_out] = np.full(shape, 7, np.float32)
        fallback = unflatten({left_out: expected[left_out]})
    target = unflatten({new: sharded(value.shape) for new, value in expected.items()})
    result = ot.restore(path, target, [tr.AssignmentMap(rules_)], strict=False, fallback=fallback, **keywords)
    assert_leaves(result, expected)


@pytest.mark.parametrize("name", ["swap", "rotation", "one_for_two", "drop_and_fallback"])
def test_maps_on_steps_that_stock_orbax_saved(manager_root, sources, name):
    _, _, values = sources["orbax"]
    rules_, wanted = MAPS[name](*LEAVES["orbax"])
    expected = {new: values[old] for new, old in wanted.items()}
    fallback = None
    if name == "drop_and_fallback":
        expected[LEAVES["orbax"][0]] = np.zeros((8, 6), np.float32)
        fallback = unflatten({LEAVES["orbax"][0]: expected[LEAVES["orbax"][0]]})
    target = unflatten({new: sharded(value.shape) for new, value in expected.items()})
    with ocp.CheckpointManager(manager_root, item_handlers=ot.TrainStateHandler()) as manager:
        args = ot.args.TrainStateRestore(target, transforms=[tr.AssignmentMap(rules_)], strict=False, fallback=fallback)
        assert_leaves(manager.restore(4, args=args), expected)


def test_a_swap_takes_the_optimizer_along(manager_root, sources):
    _, _, values = sources["orbax"]
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), stock_tree())
    swap = tr.FollowOptimizer(tr.AssignmentMap([("target/a/w", "target/b/w"), ("target/b/w", "target/a/w")]))
    plan = ot.plan_restore(manager_root, target, [swap])
    name = "state/param_states/0/mu/a/w"
    assert "followed (exact)" in plan.explain(name)
    flat = flatten(plan.execute())
    assert np.array_equal(flat[name], values["state/param_states/0/mu/b/w"])
    assert np.array_equal(flat["state/param_states/0/mu/c/w"], values["state/param_states/0/mu/c/w"])


def test_stacked_layers_read_each_layer_once_and_one_tower_alone(tmp_path):
    tree = {
        t: {f"layers_{i}": {"w": np.full((8, 4), i + 10 * (t == "dec"), np.float32)} for i in range(3)}
        for t in ("enc", "dec")
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
    stack = tr.StackLayers(r"(enc|dec)/layers_(\d+)/(.*)", r"\1/\3", 1)
    both = {t: {"w": sharded((8, 3, 4))} for t in ("enc", "dec")}
    plan = ot.plan_restore(tmp_path / "c", both, [stack])
    assert plan.bytes_to_read == 6 * 8 * 4 * 4
    result = plan.execute()
    for tower, layers in tree.items():
        expected = np.stack([layers[f"layers_{i}"]["w"] for i in range(3)], 1)
        np.testing.assert_array_equal(np.asarray(result[tower]["w"]), expected)
    one = ot.plan_restore(tmp_path / "c", {"dec": both["dec"]}, [stack, tr.Drop("enc/.*")])
    assert one.bytes_to_read == 3 * 8 * 4 * 4


def test_several_sources_with_precedence_and_averaged(manager_root, sources, tmp_path):
    _, _, values = sources["orbax"]
    newer = {"target": {"a": {"w": np.zeros((8, 6), np.float32)}}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "newer", newer)
    target = {"target": {name: {"w": np.zeros((8, 6), np.float32)} for name in "ab"}}
    both = {"new": tmp_path / "newer", "old": manager_root}
    over = [tr.Overlay(("new", "old")), tr.Keep("target/[ab]/w")]
    result = ot.restore(both, target, over)
    assert_leaves(result, {"target/a/w": np.zeros((8, 6), np.float32), "target/b/w": values["target/b/w"]})
    mean = [tr.Keep("(new|old)/target/a/w"), tr.Average({"old": 1, "new": 3})]
    plan = ot.plan_restore(both, {"target": {"a": {"w": sharded((8, 6))}}}, mean)
    assert plan.bytes_to_read == 2 * 8 * 6 * 4
    np.testing.assert_allclose(np.asarray(plan.execute()["target"]["a"]["w"]), values["target/a/w"] / 4, rtol=1e-6)


def test_all_problems_of_a_chain_come_at_once(manager_root):
    chain = [
        tr.Rename([("nothing", "x")]),
        tr.Reshape("target/a/w", (5, 5)),
        tr.AssignmentMap([("target/q", "target/gone"), ("target/typo", None)]),
    ]
    target = {"target": {"q": np.zeros(3)}}
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(manager_root, target, chain)
    kinds = [problem.kind for problem in caught.value.problems]
    assert {"unused_rule", "shape"} <= set(kinds) and kinds.count("unused_rule") == 2
    assert [problem.leaf for problem in caught.value.problems if problem.kind == "missing"] == ["target/q"]


def test_a_hugging_face_model_restores_into_scanned_layers(sources):
    path, _, _ = sources["safetensors"]
    config = json.loads((path / "config.json").read_text())
    heads = (config["num_heads"], config["d_kv"])
    with np.load(GOLDENS / "safetensors" / "t5_1_1_expected.npz") as file:
        wanted = np.stack(
            [file[f"decoder.block.{i}.layer.1.EncDecAttention.o.weight"].T.reshape(*heads, 32) for i in range(3)], 1
        )
    target = {"decoder": {"decoder": {"encoder_decoder_attention": {"out": {"kernel": sharded((6, 3, 8, 32))}}}}}
    chain = [rules.hf_t5_to_t5x(), rules.t5_minimal_to_scanned(*heads)]
    result = ot.restore(path, target, chain, strict=False)
    assert_leaves(result, {"decoder/decoder/encoder_decoder_attention/out/kernel": wanted})


@pytest.mark.parametrize("name", ["swap", "rotation", "one_for_two"])
def test_maps_on_steps_that_t5x_saved_through_orbax(sources, tmp_path, name):
    """T5X itself ignores a swap there, and restores wrong weights without an error."""
    path, _, values = sources["t5x_orbax"]
    root = tmp_path / "root"
    shutil.copytree(path, root, ignore=shutil.ignore_patterns("expected*"))
    rules_, wanted = MAPS[name](*LEAVES["t5x_orbax"])
    expected = {new: values[old] for new, old in wanted.items()}
    target = unflatten({new: sharded(value.shape) for new, value in expected.items()})
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    with ocp.CheckpointManager(root, item_handlers={"state": ot.TrainStateHandler()}, options=options) as manager:
        args = ot.args.TrainStateRestore(target, transforms=[tr.AssignmentMap(rules_)], strict=False)
        assert_leaves(manager.restore(3, args=ocp.args.Composite(state=args))["state"], expected)
