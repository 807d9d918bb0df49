"""What a plan proposes when leaves are missing: text that can be pasted, and that maps what it says."""

import dataclasses
import re

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.restoring.diagnose import cures, similar
from orbax_t5x.restoring.diagnose.proposals import pack_text, proposed_pack
from orbax_t5x.restoring.diagnose.similar import Similar, named
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint

BUNDLE = ot.__path__[0] + "/cli/demo_data/model.ckpt-1000000"
HF = GOLDENS / "safetensors" / "t5_1_1"
HF_CONFIG = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)


def pasted(text):
    """The transforms that a description stands for."""
    return eval(f"[{text}]", {"ot": ot})


def parameters(config):
    """Flat abstract parameters below `target/`."""
    _, variables = t5_model.init(config)
    return flatten({"target": jax.eval_shape(lambda: variables["params"])})


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_pack_is_proposed_as_text_that_makes_it(is_scanned):
    target = parameters(dataclasses.replace(HF_CONFIG, scan_layers=is_scanned))
    with ot.open_checkpoint(HF) as checkpoint:
        proposal = proposed_pack(checkpoint.leaves, target)
        assert proposal is not None
        expected = run(proposal.transform, checkpoint.leaves, target)[0]
        result = dict(checkpoint.leaves)
        for step in pasted(proposal.description):
            result = dict(run(step, result, target)[0])
        assert {name: np.asarray(as_numpy(value)).shape for name, value in result.items()} == {
            name: leaf.shape for name, leaf in target.items()
        }
        assert_same(result, expected)


def test_the_way_back_is_proposed_in_the_order_of_its_packs():
    both = rules.infer(ot.open_checkpoint(HF).leaves, parameters(dataclasses.replace(HF_CONFIG, scan_layers=True)))
    back = [rules.t5_minimal_to_scanned(6, 8).inverse(), rules.hf_t5_to_t5x().inverse()]
    assert pasted(pack_text(both.inverse())) == back


def test_no_pack_is_proposed_where_none_fits_or_none_is_needed():
    target = parameters(HF_CONFIG)
    assert proposed_pack(target, target) is None
    assert proposed_pack({"a": jax.ShapeDtypeStruct((2,), "float32"), "b": None}, target) is None


def test_of_two_ways_to_change_a_prefix_the_one_without_problems_is_proposed():
    """An optimizer's names begin alike on both sides: a rule for all of the target asks too much."""
    source = GOLDENS / "t5x_orbax" / "d8_adafactor"
    target = flatten(ot.restore(source, None))
    target = {name.removeprefix("target/"): leaf for name, leaf in target.items()}
    with pytest.raises(ot.RestorePlanError) as raised:
        ot.plan_restore(source, target)
    (problem,) = raised.value.problems
    chain = str(problem.fix).removeprefix("add transforms=")
    assert not ot.plan_restore(source, target, eval(chain, {"ot": ot})).unused


# -- one problem, one fix


def problems_of(source, target, transforms=(), **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, transforms, **keywords)
    assert len(str(caught.value).splitlines()) < 60
    return caught.value.problems


def applied(fix, transforms=()):
    """The transforms that a fix says to pass."""
    code = re.search(r"transforms=(\[.*\])", fix)
    assert code is not None, fix
    return eval(code[1], {"ot": ot, "transforms": transforms})


def assert_cured(source, target, transforms=(), **keywords):
    """One problem, and its fix restores every leaf from the checkpoint."""
    (problem,) = problems_of(source, target, transforms, **keywords)
    assert (problem.kind, problem.leaf) == ("missing", None)
    plan = ot.plan_restore(source, target, applied(str(problem.fix), transforms), **keywords)
    assert {entry.action for entry in plan.entries} <= {"read", "value"} and not plan.unused
    return plan, problem


LAYOUTS = {
    "minimal": {},
    "scanned": {"scan_layers": True},
    "unscanned": {"split_heads": True, "per_layer_bias": True},
}


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


def test_a_fallback_hides_no_forgotten_pack():
    _, variables = t5_model.init(HF_CONFIG)
    params = {"target": jax.tree.map(np.asarray, variables["params"])}
    assert_cured(HF, params, fallback=params)


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
    assert str(problem.fix) == "add transforms=[ot.transforms.Translate()]"
    restored = ot.restore(BUNDLE, target, applied(str(problem.fix)), strict=False)
    assert_same(flatten(restored), flatten(target))


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
    assert str(problem.fix) == "pass transforms=[ot.rules.hf_t5_to_t5x()] for Translate()"
    assert ot.plan_restore(HF, target, applied(str(problem.fix))).unused == ()


def test_what_is_missing_after_auto_is_added_to_what_it_found():
    """A head under another name, which no pack knows: a rule more, and the pack written out."""
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in ot.open_checkpoint(HF).leaves.items()}
    arrays |= {f"head/old/{name}": np.ones(2, np.float32) for name in ("kernel", "bias", "scale")}
    target = {
        **parameters(HF_CONFIG),
        **{f"head/new/{name}": np.ones(2, np.float32) for name in ("kernel", "bias", "scale")},
    }
    (problem,) = problems_of(checkpoint(arrays), target, "auto")
    assert str(problem.fix).startswith("pass transforms=[ot.rules.hf_t5_to_t5x(), ot.transforms.AssignmentMap(")
    assert ot.plan_restore(checkpoint(arrays), target, applied(str(problem.fix))).unused == ()


ARRAYS = {f"layer_{i}/{name}": np.full((2, 3), i, np.float32) for i in range(3) for name in ("kernel", "bias")}


@pytest.mark.parametrize("theirs", ["", "params/", "state/model/", "a.b(c)/", "it's/"])
@pytest.mark.parametrize("ours", ["", "target/", "x\\1/"])
def test_another_prefix_is_one_problem(theirs, ours):
    source = checkpoint({theirs + name: array for name, array in ARRAYS.items()})
    target = {ours + name: array for name, array in ARRAYS.items()}
    if theirs == ours:
        ot.plan_restore(source, target)
        return
    plan, _ = assert_cured(source, target)
    assert_same(plan.execute(), target)


def test_a_prefix_leaves_what_fits_already_where_it_is():
    source = checkpoint({"step": np.int32(3), **{f"params/{name}": array for name, array in ARRAYS.items()}})
    plan, _ = assert_cured(source, {"step": np.int32(0), **ARRAYS})
    assert plan.execute()["step"] == 3


def test_a_prefix_is_found_beside_an_optimizer():
    """Parameters alone into a train state of Flax: the pack or prefix, and then what the checkpoint really lacks."""
    state = flax.training.train_state.TrainState.create(
        apply_fn=print, params={"dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}, tx=optax.adam(1e-3)
    )
    source = checkpoint({"step": np.int32(3), "target/dense/kernel": np.ones((2, 3)), "target/dense/bias": np.ones(3)})
    found = problems_of(source, jax.eval_shape(lambda: state), dtype=None, allow_lossy_cast=True)
    assert found[0].leaf is None and "5 problems are left" in found[0].message
    assert {problem.leaf.rpartition("/")[0] for problem in found[1:]} == {
        "opt_state/0", "opt_state/0/mu/dense", "opt_state/0/nu/dense"
    }  # fmt: skip
    plan = ot.plan_restore(source, state, applied(str(found[0].fix)), fallback=state, allow_lossy_cast=True)
    np.testing.assert_array_equal(plan.execute().params["dense"]["bias"], np.ones(3))


def test_two_prefixes_that_fit_are_none():
    source = checkpoint({f"{prefix}/{name}": array for prefix in ("one", "two") for name, array in ARRAYS.items()})
    found = problems_of(source, ARRAYS)
    assert len(found) == len(ARRAYS) + 1 and not any("ot.transforms.Assign" in str(problem.fix) for problem in found)


@pytest.mark.parametrize("momenta", ["opt_state/0/mu", "ema", "state/param_states"])
def test_the_parameters_are_meant_not_their_momenta(momenta):
    arrays = {f"{prefix}/{name}": array for prefix in ("params", momenta) for name, array in ARRAYS.items()}
    found = problems_of(checkpoint(arrays), ARRAYS)
    assert len(found) == 2 and found[1].kind == "leftover"
    assert_same(ot.restore(checkpoint(arrays), ARRAYS, applied(str(found[0].fix)), strict=False), ARRAYS)


def test_nothing_is_proposed_to_a_run_that_goes_on():
    """Its transforms are not applied again, so a rule more would not be, either."""
    source = checkpoint({f"params/{name}": array for name, array in ARRAYS.items()})
    found = problems_of(source, ARRAYS, [ot.transforms.Intersect()], is_resuming=True)
    assert len(found) == len(ARRAYS) + 1 and not any("transforms" in str(problem.fix) for problem in found[:-1])


# -- one leaf


def test_no_rule_for_a_leaf_of_the_demo_is_wrong():
    """Every leaf by itself, among all names of the bundle; of the rules proposed before, 17 of 20 were wrong."""
    plan = ot.plan_restore(BUNDLE, None, [ot.transforms.Translate()])
    right = {entry.name: entry.sources for entry in plan.entries}
    target = {entry.name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for entry in plan.entries}
    missing = named(target)
    found = Similar(missing, named(ot.open_checkpoint(BUNDLE).leaves))
    proposed = {leaf.name: found.to(leaf) for leaf in missing}
    assert {name: same for name, same in proposed.items() if same is not None and (same,) != right[name]} == {}


@pytest.mark.parametrize(
    "theirs",
    [
        "decoder/layers_1/self_attention/kernel",  # a word more
        "layers_1/attention/kernel",  # a word less
        "decoder/layers_1/atention/kernel",  # a letter less
        "decoder/layers_1/attnetion/kernel",  # two letters swapped
        "decoder/layers_01/attention/kernel",
        "decoder/Layers1/attention/kernel",
    ],
)
def test_a_name_that_can_only_mean_one_leaf_is_a_rule(theirs):
    array, other = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    source = checkpoint({theirs: array, "decoder/mlp_1/wi/kernel": other})
    (problem,) = problems_of(source, {"decoder/layers_1/attention/kernel": other}, strict=False)
    rule = re.fullmatch(r"map it with (ot\.transforms\.AssignmentMap\(.*\))", str(problem.fix))
    got = ot.restore(source, {"decoder/layers_1/attention/kernel": other}, eval(rule[1], {"ot": ot}), strict=False)
    np.testing.assert_array_equal(got["decoder/layers_1/attention/kernel"], array)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("encoder/norm/scale", "decoder/norm/scale"),
        ("layers_0/mlp/wi/kernel", "layers_1/mlp/wi/kernel"),
        ("mlp/wi_0/kernel", "mlp/wi_1/kernel"),
        ("attention/query/kernel", "attention/key/kernel"),
        ("param_states/norm/v", "param_states/norm/v_row"),
        ("mu/dense/kernel", "dense/kernel"),
        ("mu/dense/kernel", "nu/dense/kernel"),
        ("dense/kernel", "dense/bias"),
        ("p0", "final_layer_norm/scale"),
    ],
)
def test_a_name_that_may_mean_another_leaf_is_none(ours, theirs):
    array = np.ones((4,), np.float32)
    (problem,) = problems_of(checkpoint({theirs: array}), {ours: array}, strict=False)
    assert str(problem.fix) == "give fallback= values, or put ... in the target to leave it out"


def test_another_shape_or_dtype_or_a_second_candidate_is_none():
    target = {"encoder/kernel": np.ones((4,), np.float32)}
    for arrays in (
        {"encoder/kernels": np.ones((5,), np.float32)},
        {"encoder/Kernel": np.ones((4,), np.float64)},
        {"encoder/a/kernel": target["encoder/kernel"], "encoder/b/kernel": target["encoder/kernel"]},
    ):
        (problem,) = problems_of(checkpoint(arrays), target, strict=False)
        assert "AssignmentMap" not in str(problem.fix) and next(iter(arrays)) in problem.message


def test_two_leaves_that_may_mean_one_get_none():
    source = checkpoint({"encoder/kernel": np.ones(4, np.float32)})
    target = {f"encoder/{name}/kernel": np.ones(4, np.float32) for name in ("first", "second")}
    assert not any("AssignmentMap" in str(problem.fix) for problem in problems_of(source, target, strict=False))


# -- what has another reason


def test_none_on_disk_says_what_it_means():
    source = checkpoint({"a": np.ones(2, np.float32)}, empties={"m": None})
    (problem,) = problems_of(source, {"a": np.ones(2, np.float32), "m": np.ones(2, np.float32)})
    assert problem.leaf == "m" and "has None there" in problem.message and "closest" not in problem.message
    assert str(problem.fix) == "put None in the target there, or give fallback= values"
    assert ot.restore(source, {"a": np.ones(2, np.float32), "m": None})["m"] is None


@pytest.mark.parametrize("has_pack", [True, False])
def test_an_untied_checkpoint_and_a_tied_model(has_pack):
    """Without the matrix the model would compute other logits: `strict=False` is no cure."""
    target = parameters(dataclasses.replace(HF_CONFIG, tied=True))
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in ot.open_checkpoint(HF).leaves.items()}
    arrays["lm_head.weight"] = np.zeros_like(arrays["shared.weight"])
    found = problems_of(checkpoint(arrays), target, [ot.rules.hf_t5_to_t5x()] if has_pack else ())
    head = found[-1]
    assert len(found) == (1 if has_pack else 2)
    assert (head.kind, head.leaf) == ("leftover", "target/decoder/logits_dense/kernel")
    assert "logits" in head.message and "embedding" in head.message
    assert (
        "logits_via_embedding=False" in str(head.fix) and "strict" not in str(head.fix) and "Drop" not in str(head.fix)
    )


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_model_of_another_size_or_kind_is_said_to_be_one(is_gated):
    source = parameters(dataclasses.replace(HF_CONFIG, gated=is_gated))
    target = parameters(dataclasses.replace(HF_CONFIG, gated=not is_gated, encoder_layers=4))
    stored = checkpoint({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()})
    one, another, *left = problems_of(stored, unflatten(target))
    assert {problem.kind for problem in left} == {"leftover"}
    fewer, other = sorted((one, another), key=lambda problem: problem.message)
    assert fewer.message == "the checkpoint's encoder has 2 layers, the target's 4"
    wanted = "mlp_activations=('gelu', 'linear')" if is_gated else "mlp_activations=('relu',)"
    assert "feed-forward" in other.message and wanted in str(other.fix)
    others = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in target.items() if name not in source}
    ot.plan_restore(stored, unflatten(target), fallback=unflatten(others), strict=False)


def test_other_leftovers_of_an_untied_checkpoint_are_told_apart():
    source = {**parameters(HF_CONFIG), "target/more": jax.ShapeDtypeStruct((2,), np.float32)}
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()}
    head, other = problems_of(checkpoint(arrays), parameters(dataclasses.replace(HF_CONFIG, tied=True)))
    assert "logits" in head.message and other.leaf == "target/more" and "strict=False" in str(other.fix)


# -- what it costs


def test_a_plan_that_fits_looks_for_no_cure(monkeypatch):
    monkeypatch.setattr(cures, "proposed_pack", None)
    monkeypatch.setattr(cures, "proposed_prefix", None)
    ot.plan_restore(checkpoint(ARRAYS), ARRAYS)


def test_names_that_do_not_meet_cost_little(monkeypatch):
    """Comparisons of names grow with the number of leaves, not with its square."""
    compared = []
    nearly_equal = similar._nearly_equal
    monkeypatch.setattr(similar, "_nearly_equal", lambda *both: compared.append(both) or nearly_equal(*both))
    array = np.zeros(2, np.float32)
    source = checkpoint({f"block_{i}/part_{j}/w": array for i in range(40) for j in range(20)})
    found = problems_of(source, {f"other/layer_{i}/thing_{j}/w": array for i in range(40) for j in range(20)})
    assert len(found) == 801 and len(compared) <= 4 * 800


def test_a_leaf_that_has_its_place_is_not_proposed_for_another():
    """The weights of one module are no cure for another one that the checkpoint lacks."""
    names = [f"{name}/kernel" for name in ("query", "key", "value", "out")]
    stored = {f"target/layers_0/self_attention/{name}": np.ones((4, 4), np.float32) for name in names}
    target = {**stored, **{f"target/layers_0/encoder_decoder_attention/{name}": np.ones((4, 4)) for name in names}}
    problems = problems_of(checkpoint(stored), unflatten(target))
    assert len(problems) == len(names)
    assert not any("AssignmentMap" in str(problem.fix) or "Rename" in str(problem.fix) for problem in problems)
