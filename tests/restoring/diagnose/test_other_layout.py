"""A forgotten rule pack or `Translate` is one problem, and its fix runs."""

import dataclasses

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.restoring.diagnose.other_layout import other_pack
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.text.code import calls_code
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts, t5_model
from tests.support.failed_plans import (
    BUNDLE,
    HF,
    HF_CONFIG,
    applied,
    assert_cured,
    parameters,
    problems_of,
    unmatched_of,
)
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_pack_is_proposed_as_text_that_makes_it(is_scanned):
    target = parameters(dataclasses.replace(HF_CONFIG, scan_layers=is_scanned))
    with ot.open_checkpoint(HF) as checkpoint:
        (remedy,) = other_pack(unmatched_of(checkpoint.leaves, target))
        expected = run(rules.infer(checkpoint.leaves, target), checkpoint.leaves, target)[0]
        result = dict(checkpoint.leaves)
        for step in eval(f"[{calls_code(remedy.transforms)}]", {"ot": ot}):
            result = dict(run(step, result, target)[0])
        assert {name: np.asarray(as_numpy(value)).shape for name, value in result.items()} == {
            name: leaf.shape for name, leaf in target.items()
        }
        assert_same(result, expected)


def test_no_pack_is_proposed_where_none_fits_or_none_is_needed():
    target = parameters(HF_CONFIG)
    for state in (target, {"a": jax.ShapeDtypeStruct((2,), "float32"), "b": None}):
        assert list(other_pack(unmatched_of(state, target))) == []


def test_a_bundle_that_translate_helps_little_is_said_to_be_one():
    """One leaf in three has a counterpart, of another shape."""
    target = {"target/encoder/encoder_norm/scale": jax.ShapeDtypeStruct((8,), "float32"), "a": 1, "b": 2}
    hint, *others = problems_of(BUNDLE, target, strict=False)
    assert "no match by name in the checkpoint: the checkpoint's names are Mesh TensorFlow's" in hint.message
    assert applied(hint.fix) == [ot.transforms.Translate()] and len(others) == 3


def test_translate_is_not_proposed_to_a_target_with_the_names_of_the_bundle():
    with ot.open_checkpoint(BUNDLE) as bundle:
        target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in bundle.leaves.items()}
    target.pop("global_step")  # int64
    (problem,) = problems_of(BUNDLE, {**target, "decoder/new/kernel": target["decoder/logits/kernel"]}, strict=False)
    assert problem.leaf == "decoder/new/kernel" and not problem.fix.transforms


@pytest.mark.parametrize("source", [HF, BUNDLE])
def test_names_show_the_way_into_a_model_of_another_size(source):
    target = parameters(dataclasses.replace(HF_CONFIG, embed=48, mlp=96, decoder_layers=2))
    cause, *others = problems_of(source, target, strict=False)
    assert cause.kind == "missing" and "no match by name in the checkpoint: a rule pack leads from" in cause.message
    assert len(others) > 40 and {problem.kind for problem in others} == {"shape"}
    after = problems_of(source, target, applied(cause.fix), strict=False)
    assert [(problem.kind, problem.leaf) for problem in after] == [(problem.kind, problem.leaf) for problem in others]


LAYOUTS = {"minimal": {}, "scanned": {"scan_layers": True}, "unscanned": {"split_heads": True, "per_layer_bias": True}}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["target", "params", ""])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_hugging_face_are_one_problem(layout, prefix):
    _, variables = t5_model.init(dataclasses.replace(HF_CONFIG, **LAYOUTS[layout]))
    abstract = jax.eval_shape(lambda: variables["params"])
    plan, _ = assert_cured(HF, {prefix: abstract} if prefix else abstract)
    source = dict(ot.open_checkpoint(HF).leaves)
    wanted = flatten({"target": abstract})
    expected = run(rules.infer(source, wanted), source, wanted)[0]
    start = f"{prefix}/" if prefix else ""
    restored = flatten(plan.execute())
    assert_same(restored, {start + name.removeprefix("target/"): as_numpy(leaf) for name, leaf in expected.items()})


@pytest.mark.slow
def test_a_fallback_hides_no_forgotten_pack():
    _, variables = t5_model.init(HF_CONFIG)
    params = {"target": jax.tree.map(np.asarray, variables["params"])}
    assert_cured(HF, params, kind="nothing_restored", fallback=params)


@pytest.mark.slow
def test_a_bundle_without_translate_is_one_problem():
    translated = ot.plan_restore(BUNDLE, None, [ot.transforms.Translate()]).execute()
    plan, problem = assert_cured(BUNDLE, translated)
    assert str(problem.fix) == "add transforms=[ot.transforms.Translate()]" and "mesh tf" in problem.message
    assert_same(flatten(plan.execute()), flatten(translated))


@pytest.mark.parametrize("name", ["encoder/encoder_norm/scale", "token_embedder/embedding"])
def test_a_part_of_a_model_without_translate_is_one_problem(name):
    """So small a part has no layout that `infer` could tell."""
    whole = ot.plan_restore(BUNDLE, None, [ot.transforms.Translate()]).execute()
    target = unflatten({f"target/{name}": flatten(whole)[f"target/{name}"]})
    (problem,) = problems_of(BUNDLE, target, strict=False)
    assert str(problem.fix).startswith("add transforms=[ot.transforms.Translate()")
    restored = ot.restore(BUNDLE, target, applied(problem.fix), strict=False)
    assert_same(flatten(restored), flatten(target))


@pytest.mark.slow
def test_a_pack_is_added_to_what_was_given():
    """A scanned target, and a rule of the caller's own."""
    minimal = {name: np.zeros(leaf.shape, np.float32) for name, leaf in parameters(HF_CONFIG).items()}
    source = {name.replace("target/token_embedder", "target/embedder"): leaf for name, leaf in minimal.items()}
    own = [ot.transforms.Rename([("target/embedder/(.*)", r"target/token_embedder/\1")])]
    target = parameters(dataclasses.replace(HF_CONFIG, scan_layers=True))
    _, problem = assert_cured(checkpoint(source), target, own)
    assert str(problem.fix).startswith("pass transforms=[*transforms, ot.rules.t5_minimal_to_scanned(")


def test_a_pack_is_proposed_in_place_of_translate():
    """Names of Hugging Face, and the transform for Mesh TensorFlow's."""
    target = parameters(HF_CONFIG)
    (problem,) = problems_of(HF, target, [ot.transforms.Translate()])
    assert str(problem.fix) == "pass transforms=[ot.rules.hf_t5_to_t5x()]"
    assert problem.message.endswith("without the transforms of the call")
    assert ot.plan_restore(HF, target, applied(problem.fix)).unused == ()


@pytest.mark.slow
def test_auto_finds_what_a_pack_leaves_below_another_prefix():
    """A head, which no pack knows; where a leaf lacks, the rest is one rule more after the pack."""
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in ot.open_checkpoint(HF).leaves.items()}
    arrays |= {f"model/head/{name}": np.ones(2, np.float32) for name in ("kernel", "bias", "scale")}
    target = {
        **parameters(HF_CONFIG),
        **{f"head/{name}": np.ones(2, np.float32) for name in ("kernel", "bias", "scale")},
    }
    plan = ot.plan_restore(checkpoint(arrays), target, "auto")
    assert plan.unused == () and "model/head/(.*)" in str(plan.provenance)
    target["other"] = np.ones(7, np.float32)
    problem, _ = problems_of(checkpoint(arrays), target, "auto")
    assert str(problem.fix).startswith("pass transforms=[ot.rules.hf_t5_to_t5x(), ot.transforms.")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "/value"])
def test_a_forgotten_pack_is_one_problem_for_a_model_of_other_words(end):
    """Layers in a list, as NNX has them: the pack and one Rename, not a problem for each leaf."""
    plain = t5_layouts.minimal()
    sources = {"hf_t5_to_t5x": checkpoint(t5_layouts.hugging_face(plain)), "Translate": BUNDLE}
    for pack, source in sources.items():
        if source is BUNDLE:
            translated = ot.restore(BUNDLE, None, [ot.transforms.Translate()])["target"]
            plain = {f"target/{name}": value for name, value in flatten(translated).items()}
        target = {name.replace("layers_", "layers/") + end: np.zeros_like(value) for name, value in plain.items()}
        first, *_ = problems_of(source, unflatten(target))
        assert any(text in str(first.fix) for text in ("Translate()", "transforms='auto'"))
        plan = ot.plan_restore(source, unflatten(target), "auto")
        assert pack.replace("Translate", "mesh_tf_to_t5x") in repr(plan.found_rules)
        found = flatten(plan.execute())
        for name, value in plain.items():
            np.testing.assert_array_equal(found[name.replace("layers_", "layers/") + end], value)


def test_a_pack_goes_before_rules_that_are_written_for_its_names():
    target = parameters(HF_CONFIG)
    name = "target/token_embedder/embedding"
    target[name] = jax.ShapeDtypeStruct((target[name].shape[0] + 8, *target[name].shape[1:]), np.float32)
    pad = ot.transforms.Pad(".*token_embedder/embedding", (target[name].shape[0], None))
    (problem,) = problems_of(HF, unflatten(target), [pad])
    assert problem.kind == "missing" and "a rule pack leads" in problem.message
    rules = problem.fix.arguments["transforms"]
    assert rules[-1] == pad and applied(problem.fix, [pad]) == list(rules)
    plan = ot.plan_restore(HF, unflatten(target), rules)
    assert {entry.action for entry in plan.entries} == {"read"} and not plan.unused


def test_a_pack_that_functions_of_the_caller_may_need_follows_them():
    (problem,) = problems_of(HF, unflatten(parameters(HF_CONFIG)), [lambda state, target: state])
    assert str(problem.fix).startswith("pass transforms=[*transforms, ot.rules.hf_t5_to_t5x()")


def test_a_pack_that_knows_no_name_is_replaced():
    """Added after it, the right rules would leave its problem."""
    plan = ot.plan_restore(BUNDLE, None, [ot.transforms.Translate()])
    leaves = {entry.name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for entry in plan.entries}
    target = unflatten({name: leaf for name, leaf in leaves.items() if name.startswith("target/")})
    (problem,) = problems_of(BUNDLE, target, [ot.rules.hf_t5_to_t5x()])
    assert problem.message.endswith("without the transforms of the call")
    assert not ot.plan_restore(BUNDLE, target, problem.fix.arguments["transforms"]).unused
