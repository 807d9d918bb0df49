"""A source with transforms of its own, and rules that are found by themselves: `ot.Source` and `transforms="auto"`."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint
from tests.support.pytrees import assert_trees_equal

T, R = ot.transforms, ot.rules
BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"
SWAP = T.Rename([("a", "b"), ("b", "a")])


def arrays(**values):
    return checkpoint({name: np.full((2,), value, np.float32) for name, value in values.items()})


def test_one_source_is_its_path_and_its_transforms():
    source = arrays(a=1, b=2)
    target = dict.fromkeys("ab", np.zeros(2, np.float32))
    got = ot.restore(ot.Source(source, [SWAP]), target)
    assert (got["a"][0], got["b"][0]) == (2, 1)
    # Its own come first.
    plan = ot.plan_restore(ot.Source(source, SWAP), {"c": target["a"]}, [T.Keep("a"), T.Rename([("a", "c")])])
    assert plan.execute()["c"][0] == 2
    written = ot.plan_restore(source, {"c": target["a"]}, [SWAP, T.Keep("a"), T.Rename([("a", "c")])])
    assert plan.provenance[0]["digest"] == written.provenance[0]["digest"]


def test_sources_stay_in_their_order():
    """Weights without names are for the sources in their order."""
    sources = {"x": ot.Source(arrays(a=1), T.Rename([("a", "b")])), "y": arrays(b=5)}
    assert ot.restore(sources, None, T.Average((3, 1)))["b"][0] == 2


def test_names_that_two_sources_share_stay_with_their_own():
    """`a/b` is a source, and `b/x` a leaf of the source `a`."""
    sources = {"a": ot.Source(checkpoint({"b/x": np.ones(2)}), T.Rename([("b/x", "b/y")])), "a/b": arrays(z=5)}
    got = flatten(ot.restore(sources, None))
    assert sorted(got) == ["a/b/y", "a/b/z"]


def misspelt(state, target):
    return {"b": state["kernel"]}


def test_what_a_function_raises_is_a_problem_with_the_exception_as_its_cause(tmp_path):
    named = {"one": ot.Source(arrays(a=1), misspelt), "two": arrays(a=2)}
    saver = ocp.Checkpointer(ot.TrainStateHandler())
    calls = [
        lambda: ot.plan_restore(named, None),
        lambda: ot.plan_restore(arrays(a=1), {"b": np.zeros(2)}, [misspelt]),
        lambda: ot.plan_restore(arrays(a=1), None, [T.Chain((misspelt,))]),
        lambda: ot.diff(arrays(a=1), arrays(b=1), [misspelt]),
        lambda: ot.convert(arrays(a=1), tmp_path / "converted", [misspelt]),
        lambda: saver.save(tmp_path / "saved", args=ot.args.TrainStateSave({"a": np.zeros(2)}, transforms=[misspelt])),
    ]
    for call in calls:
        with pytest.raises(RestorePlanError, match=r"misspelt raised KeyError: 'kernel'") as caught:
            call()
        assert caught.value.problems[0].kind == "transform"
        assert type(caught.value.__cause__) is KeyError


def test_what_a_transform_of_the_package_raises_is_no_problem_of_the_callers(monkeypatch):
    monkeypatch.setattr(T.Keep, "apply", lambda *_: {}["lost"])
    with pytest.raises(UnsupportedCheckpointError, match="KeyError: 'lost'"):
        ot.plan_restore(arrays(a=1), None, T.Keep("a"))


def test_what_is_wrong_in_a_source_names_it():
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore({"one": ot.Source(arrays(a=1), T.Drop("nothing")), "two": arrays(a=2)}, None)
    (problem,) = caught.value.problems
    assert problem.kind == "unused_rule" and "source 'one'" in problem.message
    with pytest.raises(TypeError, match="an instance of it"):
        ot.Source("path", T.Translate)
    with pytest.raises(TypeError, match="'auto'"):
        ot.Source("path", "automatic")


def test_a_source_has_its_own_item_and_format(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                first=ocp.args.StandardSave({"a": np.ones(2)}), second=ocp.args.StandardSave({"b": np.zeros(2)})
            ),
        )
        manager.wait_until_finished()
    step = tmp_path / "run" / "0"
    assert list(ot.restore(ot.Source(step, item="second"), None)) == ["b"]
    both = {"x": ot.Source(step, item="first"), "y": ot.Source(step, item="second", format="orbax")}
    assert sorted(flatten(ot.restore(both, None))) == ["x/a", "y/b"]
    assert list(ot.restore(ot.Source(step, item="second"), None, item="first")) == ["b"]
    with pytest.raises(ValueError, match="format"):
        ot.restore(ot.Source(step, format="no such format"), None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_a_bundle_and_adapters_in_one_restore(tmp_path, parameters, kind):
    rng = np.random.default_rng(0)
    lora = {
        f"encoder/layers_{i}/attention/query/{name}": rng.standard_normal(shape).astype(np.float32)
        for i in range(2)
        for name, shape in {"lora_a": (16, 2), "lora_b": (2, 16)}.items()
    }
    if kind == "orbax":
        adapters = tmp_path / "adapters"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(adapters, unflatten(lora))
    else:
        adapters = tmp_path / "adapters.safetensors"
        safetensors.numpy.save_file({name.replace("/", "."): value for name, value in lora.items()}, adapters)
    rename = [(r"encoder.layers_(\d+).attention.query.(lora_[ab])", r"params/encoder/layers_\1/attention/query/\2")]
    expected = {"params": unflatten({**parameters, **lora})}
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
    sources = {
        "base": ot.Source(BUNDLE, [T.Translate(), T.Keep("params/.*")]),
        "lora": ot.Source(adapters, [T.Rename(rename)]),
    }
    plan = ot.plan_restore(sources, target, T.Overlay(["lora", "base"]))
    assert_trees_equal(plan.execute(), expected)
    assert [entry.get("source") for entry in plan.provenance] == ["base", "base", "lora", None]
    # "auto" between a source and the whole target: names that only one source has do not stand in its way.
    sources["base"] = ot.Source(BUNDLE, "auto")
    assert_trees_equal(ot.restore(sources, target, T.Overlay(["lora", "base"])), expected)


PREFIXES = ["", "target/", "params/", "params/params/"]
FOUND = {"translate": [T.Translate()], "auto": "auto", "pack": [R.mesh_tf_to_t5x()]}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("found", FOUND)
def test_the_transforms_of_a_source_see_the_target_below_its_name(prefix, found, parameters):
    below = {f"{prefix}{name.removeprefix('params/')}": leaf for name, leaf in parameters.items()}
    expected = unflatten({"base": unflatten(below), "other": {"a": np.full(2, 1, np.float32)}})
    target = jax.tree.map(np.zeros_like, expected)
    sources = {"base": ot.Source(BUNDLE, FOUND[found]), "other": arrays(a=1)}
    plan = ot.plan_restore(sources, target, strict=False)
    assert_trees_equal(plan.execute(), expected)
    # Where the target has nothing of the name, it is the whole target.
    rename = T.Rename([("base/(.*)", r"\1")])
    whole = {"base": sources["base"]}
    assert_trees_equal(ot.restore(whole, target["base"], [rename], strict=False), expected["base"])


@pytest.mark.parametrize(
    "target, seen",
    [
        ({"x": {"y": np.zeros(2)}, "z": np.zeros(2)}, {"y"}),
        ({"x": {"y": {"deep": np.zeros(2)}}, "xy": np.zeros(2)}, {"y"}),
        ({"xy": np.zeros(2), "z": {"x": np.zeros(2)}}, {"xy", "z"}),
        ({"x": ..., "z": np.zeros(2)}, {"x", "z"}),
        ({"x": np.zeros(2), "z": np.zeros(2)}, {"x", "z"}),
    ],
)
def test_a_function_of_a_source_gets_its_part_of_the_target(target, seen):
    got = []

    def function(state, target_state):
        got.append(set(target_state))
        return state

    ot.plan_restore(
        {"x": ot.Source(arrays(y=1), function)},
        target,
        strict=False,
        fallback=jax.tree.map(lambda leaf: leaf, {name: leaf for name, leaf in target.items() if leaf is not ...}),
        fallback_for=".*",
    )
    assert got == [seen]


@pytest.mark.slow
def test_handlers_and_convert_take_a_source(tmp_path):
    source = ot.Source(arrays(a=1, b=2), [SWAP])
    target = dict.fromkeys("ab", np.zeros(2, np.float32))
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "any", args=ot.args.TrainStateSave(target))
        got = checkpointer.restore(tmp_path / "any", args=ot.args.TrainStateRestore(target, source=source))
    assert (got["a"][0], got["b"][0]) == (2, 1)
    for on_unsupported in ("error", "skip"):
        out = tmp_path / on_unsupported
        ot.convert({"x": source, "y": arrays(a=3)}, out, on_unsupported=on_unsupported)
        assert {name: leaf[0] for name, leaf in flatten(ot.restore(out, None)).items()} == {
            "x/a": 2,
            "x/b": 1,
            "y/a": 3,
        }
    ot.convert(source, tmp_path / "one")
    assert ot.restore(tmp_path / "one", None)["a"][0] == 2


def double(state_dict, target_state_dict):
    """A function of T5X's protocol, of this module."""
    assert set(target_state_dict) == {"x", "y"}
    return {name: np.asarray(leaf) * 2 for name, leaf in state_dict.items()}


def test_each_of_several_sources_has_its_own_transforms():
    both = {"one": ot.Source(arrays(a=1, b=2), [SWAP]), "two": ot.Source(arrays(a=3), double), "three": arrays(a=4)}
    target = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
    plan = ot.plan_restore(both, target, T.AssignmentMap([("x", "one/a"), ("y", "two/a")]), strict=False)
    got = plan.execute()
    assert (got["x"][0], got["y"][0]) == (2, 6)
    everything = ot.restore({**both, "two": arrays(a=3)}, None)
    assert {name: leaf[0] for name, leaf in flatten(everything).items()} == {
        "one/a": 2,
        "one/b": 1,
        "two/a": 3,
        "three/a": 4,
    }
    assert [entry.get("source") for entry in plan.provenance] == ["one", "two", None]
    assert [entry["text"].partition("(")[0] for entry in plan.provenance] == [
        "Rename",
        f"{__name__}.double",
        "AssignmentMap",
    ]


def test_a_sources_transforms_count_in_the_digest():
    def digest(**sources):
        return [(entry["source"], entry["digest"]) for entry in ot.plan_restore(sources, None).provenance]

    swapped, kept = ot.Source(arrays(a=1, b=2), SWAP), ot.Source(arrays(a=1, b=2), T.Keep(["a"]))
    plain = arrays(a=1, b=2)
    digests = [
        digest(x=swapped, y=plain),
        digest(x=plain, y=swapped),
        digest(x=kept, y=plain),
        digest(x=plain, y=plain),
    ]
    assert len(set(map(tuple, digests))) == 4 and digests[-1] == []
    assert digest(x=swapped, y=plain) == digests[0]
    assert digest(x=ot.Source(plain, lambda state, target: state), y=plain) == [("x", None)]


def test_a_pack_after_a_sources_own_transforms():
    """ "auto" sees what the source's transforms leave."""
    source, _ = run(
        R.hf_t5_to_t5x().inverse(), {f"target/{n}": v for n, v in flatten(t5_model.init()[1]["params"]).items()}
    )
    named = checkpoint({f"model.{name}": as_numpy(value) for name, value in source.items()})
    target = {"params": jax.eval_shape(lambda: t5_model.init()[1]["params"])}
    got = ot.restore(ot.Source(named, [T.Rename([(r"model\.(.*)", r"\1")])]), target, "auto")
    assert_trees_equal(got["params"], t5_model.init()[1]["params"])


def test_a_function_that_no_module_has_is_a_transform():
    """As one that `exec` made is."""
    names = {"np": np}
    exec("def double(state, target, *, is_resuming=False):\n    return {'x': np.asarray(state['x']) * 2}", names)
    np.testing.assert_array_equal(ot.restore(arrays(x=1), {"x": np.zeros(2, np.float32)}, names["double"])["x"], [2, 2])
