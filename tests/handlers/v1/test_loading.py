"""Loads by a plan, for Orbax v1."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.restoring.plan import RestorePlan
from tests.support.orbax_v1 import abstract_of, assert_same
from tests.support.train_states import sharded, training_state
from tests.support.v1_trees import mesh, placed

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


@pytest.mark.slow
def test_what_stock_orbax_saved_is_renamed_and_resharded(tmp_path):
    tree = {"old": placed(jnp.arange(64.0).reshape(8, 8), "x"), "step": 3}
    ocp.save(tmp_path / "1", tree)
    rows = NamedSharding(mesh(), P(None, "y"))
    target = {"params": {"new": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)}, "step": 0}
    rules = [ot.transforms.Rename([("old", "params/new")])]
    with ot.v1.context():
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(target, rules))
    assert loaded["step"] == 3 and loaded["params"]["new"].sharding == rows
    np.testing.assert_array_equal(loaded["params"]["new"], tree["old"])


def test_the_keywords_of_restore(tmp_path):
    tree = {"params": {"w": jnp.arange(8, dtype=jnp.float32)}, "left": np.ones(2)}
    ocp.save(tmp_path / "1", tree)
    told = []
    target = {"params": {"w": jnp.zeros(8), "new": jax.ShapeDtypeStruct((2,), jnp.float32)}, "step": ...}
    abstract = ot.v1.AbstractTrainState(
        target,
        strict=False,
        dtype=jnp.bfloat16,
        allow_lossy_cast=True,
        fallback={"params": {"new": jnp.full(2, 7.0)}},
        verify="full",
        progress=lambda *progress: told.append(progress),
        memory_limit_bytes=1 << 20,
    )
    with ot.v1.context():
        loaded = ocp.load(tmp_path / "1", abstract)
    assert {name: leaf.dtype for name, leaf in loaded["params"].items()} == dict.fromkeys(("w", "new"), jnp.bfloat16)
    np.testing.assert_array_equal(loaded["params"]["new"], np.full(2, 7, jnp.bfloat16))
    assert loaded["step"] is ... and told


@pytest.mark.slow
def test_everything_as_numpy_and_what_metadata_tells_as_a_target(tmp_path):
    tree = {"a": placed(jnp.arange(8), "x"), "b": {"c": np.ones((2, 3)), "d": 3}}
    with ot.v1.context():
        ocp.save(tmp_path / "1", tree)
        assert_same(ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None)), jax.tree.map(np.asarray, tree))
        told = ocp.metadata(tmp_path / "1")
        assert told.metadata["a"].shape == (8,)
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(told))
    assert_same(loaded, tree)
    assert loaded["a"].sharding == tree["a"].sharding


def test_the_contexts_limit_on_reads_bounds_the_plans(tmp_path, monkeypatch):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    limits = []
    run = RestorePlan.run
    monkeypatch.setattr(RestorePlan, "run", lambda plan, reading: limits.append(reading.limit) or run(plan, reading))
    made = ot.v1.context()
    made.memory.read_concurrent_bytes = 1 << 20
    with made:
        ocp.load(tmp_path / "1", ot.v1.AbstractTrainState({"w": np.zeros(2)}))
        ocp.load(tmp_path / "1", ot.v1.AbstractTrainState({"w": np.zeros(2)}, memory_limit_bytes=1 << 10))
        ot.v1.load_and_transform(tmp_path / "1", {"w": np.zeros(2)})
    assert limits == [1 << 20, 1 << 10, 1 << 20]


@pytest.mark.slow
def test_load_and_transform_takes_any_path(tmp_path, goldens):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    target = sharded(training_state())
    rules = [ot.transforms.Translate()]
    expected = ot.restore(bundle, target, rules)
    assert_same(ot.v1.load_and_transform(bundle, target, rules), expected)
    with ocp.Context():
        assert_same(ot.v1.load_and_transform(str(bundle), target, rules), expected)
    with ot.v1.context():
        ocp.save(tmp_path / "1", {"a": np.ones(2)})
        assert_same(ot.v1.load_and_transform(tmp_path / "1", {"a": np.zeros(2)}), {"a": np.ones(2)})
        # Orbax looks at its own path first; what is loaded is the source.
        abstract = ot.v1.AbstractTrainState(target, rules, source=bundle)
        assert_same(ocp.load(tmp_path / "1", abstract), expected)


def test_several_sources(tmp_path):
    for name, value in (("x", 1.0), ("y", 3.0)):
        ocp.save(tmp_path / name, {"w": np.full(4, value, np.float32)})
    sources = {"x": tmp_path / "x", "y": tmp_path / "y"}
    rules = [ot.transforms.Average({"x": 0.5, "y": 0.5})]
    loaded = ot.v1.load_and_transform(sources, {"w": jnp.zeros(4)}, rules)
    np.testing.assert_array_equal(loaded["w"], np.full(4, 2.0, np.float32))


def test_a_plans_problems_come_through_both_functions(tmp_path):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    abstract = ot.v1.AbstractTrainState({"v": np.zeros(2)})
    with ot.v1.context():
        for load in (
            lambda: ocp.load(tmp_path / "1", abstract),
            lambda: ocp.load_checkpointables(tmp_path / "1", {"state": abstract}),
        ):
            with pytest.raises(RestorePlanError) as raised:
                load()
            assert "missing" in {problem.kind for problem in raised.value.problems}


@pytest.mark.slow
def test_loads_work_inside_a_running_event_loop(tmp_path):
    pytest.importorskip("uvloop")
    tree = {"w": placed(jnp.arange(16.0).reshape(8, 2), "x")}

    async def notebook():
        with ot.v1.context():
            ocp.save(tmp_path / "1", tree)
            return ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract_of(tree)))

    assert_same(asyncio.run(notebook()), tree)


@pytest.mark.parametrize(
    "call",
    [
        lambda path, rules, target: ot.v1.load_and_transform(path, target, rules),
        lambda path, rules, target: ot.v1.load_and_transform(path, transform_fn=rules, abstract_tree=target),
        lambda path, rules, target: ot.v1.load_and_transform(path, abstract_tree=target, transform_fn=rules),
        lambda path, rules, target: ot.v1.load_and_transform(path, abstract_tree=target, transforms=rules),
        lambda path, rules, target: ot.v1.load_and_transform(path=path, transforms=rules, target=target),
    ],
)
@pytest.mark.parametrize(
    "rules", [ot.transforms.Rename([("old", "new")]), lambda tree: {"new": tree["old"]}], ids=["rule", "function"]
)
def test_arguments_in_the_order_of_orbaxs_guide(tmp_path, call, rules):
    ocp.save(tmp_path / "1", {"old": np.arange(3)})
    assert_same(call(tmp_path / "1", rules, {"new": np.zeros(3, int)}), {"new": np.arange(3)})


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, "takes \\(path, target, transforms\\)"),
        ((lambda tree: tree, {}), {}, "by keyword in any order"),
        (({},), {"abstract_tree": {}}, "abstract_tree= is another name of target"),
        (({}, ()), {"transform_fn": ()}, "transform_fn= is another name of transforms"),
    ],
)
def test_a_target_is_given_once_and_in_its_position(arguments, keywords, message):
    with pytest.raises(TypeError, match=message):
        ot.v1.load_and_transform("nowhere", *arguments, **keywords)


TREE = {"i": 3, "f": 1.5, "n": np.arange(3), "j": np.arange(3.0, dtype=np.float32), "s": "hello"}


@pytest.mark.parametrize("form", ["metadata", "plain tree of it", "types"])
@pytest.mark.parametrize("load", ["ocp.load", "load_and_transform", "ot.restore"])
def test_leaves_of_orbaxs_abstract_trees_are_targets(tmp_path, form, load):
    tree = {**TREE, "j": jnp.asarray(TREE["j"])}
    with ot.v1.context(provenance=()):
        ocp.save(tmp_path / "1", tree)
        metadata = ocp.metadata(tmp_path / "1")
        types = {**metadata.metadata, "i": int, "f": float, "s": str, "j": tree["j"]}
        abstract = {"metadata": metadata, "plain tree of it": metadata.metadata, "types": types}[form]
        if load == "ocp.load":
            loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract))
        elif load == "load_and_transform":
            loaded = ot.v1.load_and_transform(tmp_path / "1", abstract)
        else:
            loaded = ot.restore(tmp_path / "1", metadata.metadata if form == "metadata" else abstract)
    assert_same(loaded, tree)


def test_a_save_of_the_context_records_what_the_load_applied(tmp_path):
    state, swap = {"x": np.zeros(2), "y": np.ones(2)}, ot.transforms.Rename([("x", "y"), ("y", "x")])
    with ot.v1.context(provenance=()):
        ocp.save(tmp_path / "0", state)
    with ot.v1.context():
        ocp.save(tmp_path / "1", ot.v1.load_and_transform(tmp_path / "0", state, swap))
        for load in (ot.v1.load_and_transform, lambda *args: ocp.load(args[0], ot.v1.AbstractTrainState(*args[1:]))):
            np.testing.assert_array_equal(load(tmp_path / "1", state, swap)["x"], state["y"])
