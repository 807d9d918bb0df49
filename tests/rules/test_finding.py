"""What `transforms="auto"` finds: packs, an alignment of what they leave, the optimizer; or one problem."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.rules.finding import find_rules
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts
from tests.support.memory_checkpoint import checkpoint
from tests.support.prefixed_models import adafactor, parameters, t5x_state

PLAIN = t5_layouts.minimal()
HF = t5_layouts.hugging_face(PLAIN)


def as_list(tree, end=""):
    """The names of an NNX model whose layers are an `nnx.List`."""
    return {name.replace("layers_", "layers/") + end: value for name, value in tree.items()}


def as_blocks(tree):
    return {
        name.replace("encoder/encoder/", "encoder/blocks/").replace("decoder/decoder/", "dec/blocks/"): value
        for name, value in tree.items()
    }


def as_dec(tree):
    return {name.replace("decoder/", "dec/"): value for name, value in tree.items()}


WAYS = {
    "hf to nnx": (HF, as_list(PLAIN)),
    "hf below a prefix to nnx with value": (t5_layouts.below("module.text.", HF), as_list(PLAIN, "/value")),
    "nnx to hf": (as_list(PLAIN, "/value"), HF),
    "hf to nnx with heads": (HF, as_list(t5_layouts.unscanned(PLAIN))),
    "hf flax to nnx": (t5_layouts.hugging_face_flax(PLAIN), as_list(PLAIN)),
    "hf to scanned blocks": (HF, as_blocks(t5_layouts.scanned(PLAIN))),
    "scanned to nnx": (t5_layouts.below("target/", t5_layouts.scanned(PLAIN)), as_list(PLAIN)),
    "bundle to another decoder": (t5_layouts.mesh_tf(PLAIN), t5_layouts.below("target/", as_dec(PLAIN))),
    "nnx to t5x": (as_list(PLAIN), t5_layouts.below("target/", PLAIN)),
    "t5x to nnx with numbers of a generator": (PLAIN, {**as_list(PLAIN), "rngs/params/count": np.uint32(0)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_packs_are_composed_with_alignments(way):
    source, target = WAYS[way]
    diagnostics = Diagnostics()
    result = run_transforms(
        find_rules(source, target).parts, source, target, is_resuming=False, diagnostics=diagnostics
    )
    assert diagnostics.problems == []
    for name, value in target.items():
        if "rngs" not in name:
            np.testing.assert_array_equal(as_numpy(result[name]), value, err_msg=name)


def test_an_nnx_list_from_hugging_face_in_one_call():
    target = nnx.State(jax.tree.map(lambda leaf: nnx.Param(np.zeros_like(leaf)), unflatten(as_list(PLAIN))))
    state = ot.restore(checkpoint(HF), target, "auto")
    found = {name.removesuffix("/value"): leaf for name, leaf in flatten(nnx.to_pure_dict(state)).items()}
    assert found.keys() == as_list(PLAIN).keys()
    assert all(np.array_equal(found[name], value) for name, value in as_list(PLAIN).items())


@pytest.mark.slow
def test_several_readings_are_one_problem_with_the_rules_found():
    words = {"query": "red", "key": "green", "value": "blue"}
    target = {"/".join(words.get(part, part) for part in n.split("/")): v for n, v in as_list(PLAIN).items()}
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(checkpoint(HF), target, "auto")
    (problem,) = caught.value.problems
    assert "no single reading for 33 parameters of the target's 89" in problem.message
    assert re.search(
        r"decoder/layers/\{0…\d\}/(\w+)/\w+/kernel ×\d may be decoder/layers_\{0…\d\}/\1/", problem.message
    )
    assert "the rules found cover 56: transforms=[ot.rules.hf_t5_to_t5x()" in str(problem.fix)
    told = ot.transforms.Rename([(f"(.*)/{old}/kernel", rf"\1/{new}/kernel") for old, new in words.items()])
    first = ot.Source(checkpoint(HF), [ot.rules.hf_t5_to_t5x(), told])
    assert ot.plan_restore(first, target, "auto").unused == ()


def test_a_model_of_two_shapes_and_no_common_word_is_not_guessed():
    with pytest.raises(ot.RestorePlanError, match="no rule pack leads"):
        find_rules({"a": np.ones(2)}, {"b": np.ones(2)})
    with pytest.raises(ot.RestorePlanError, match="no rule pack leads"):
        find_rules({"params/ab/kernel": np.ones(2)}, {"params/cd/kernel": np.ones(2)})
    assert find_rules({"dec/w": np.ones(2)}, {"decoder/x": np.ones(2)}).parts


def test_models_of_other_sizes_are_told():
    """Neither stacking nor a transposition changes how many values a model has."""
    target = {f"{name}/value": np.ones([2 * size for size in value.shape]) for name, value in as_list(PLAIN).items()}
    sizes = [sum(value.size for value in tree.values()) for tree in (PLAIN, target)]
    for source in (HF, PLAIN):
        with pytest.raises(ot.RestorePlanError, match="no rule pack leads") as caught:
            find_rules(source, target)
        assert f"the checkpoint's model has {sizes[0]:,} values, the target's {sizes[1]:,}" in str(caught.value)
    with pytest.raises(ot.RestorePlanError, match="no rule pack leads") as caught:
        find_rules({f"x/{at}": np.ones(at + 2) for at in range(4)}, {f"y/{at}": np.ones(at + 9) for at in range(4)})
    assert "model has 14 values, the target's 42" in str(caught.value)


# Neither is the other turned: that would be two readings, and a question.
SHAPES = {"wide": (8, 16), "tall": (24, 8), "bias": (5,)}
RATE = 0.05
TX = optax.adafactor(RATE, min_dim_size_to_factor=8, multiply_by_parameter_scale=True)
OTHER_NAMES = {"wide": "net_wide", "tall": "net_tall", "bias": "net_bias"}


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def named(tree, names):
    return {names[name]: value for name, value in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("names", [dict(zip(SHAPES, SHAPES, strict=True)), OTHER_NAMES], ids=["same", "other"])
def test_t5xs_adafactor_goes_on_in_optax_and_back_for_five_steps(names):
    optimizer = Adafactor(RATE, min_dim_size_to_factor=8).create(drawn(0))
    for step in range(2):
        optimizer = optimizer.apply_gradient(drawn(10 + step))
    ours = named(drawn(0), names)
    target = jax.eval_shape(lambda: {"params": ours, "opt_state": TX.init(ours)})
    source = checkpoint(ot.state_utils.flatten_state_dict(optimizer.state_dict()))
    state = ot.restore(source, target, "auto")
    params, opt_state = state["params"], state["opt_state"]
    for step in range(2, 7):
        optimizer = optimizer.apply_gradient(drawn(10 + step))
        updates, opt_state = TX.update(named(drawn(10 + step), names), opt_state, params)
        params = optax.apply_updates(params, updates)
        for name, value in optimizer.target.items():
            np.testing.assert_allclose(params[names[name]], value, rtol=2e-5, atol=1e-6)
    flat = flatten({"params": params, "opt_state": {"0": {f: getattr(opt_state[0], f) for f in opt_state[0]._fields}}})
    back = ot.restore(checkpoint(flat), jax.eval_shape(lambda: optimizer.state_dict()), "auto")
    for name, value in ot.state_utils.flatten_state_dict(optimizer.state_dict()).items():
        found = ot.state_utils.flatten_state_dict(back)[name]
        np.testing.assert_allclose(np.asarray(found), np.asarray(value), rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_t5xs_train_state_in_flax_with_optax():
    source = ot.state_utils.flatten_state_dict(t5x_state("minimal", adafactor("minimal")).state_dict())
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    params = unflatten(parameters("minimal"))
    target = jax.eval_shape(lambda: flax_train_state.TrainState.create(apply_fn=None, params=params, tx=tx))
    plan = ot.plan_restore(checkpoint(source), target, "auto")
    assert {entry.fidelity for entry in plan.entries if entry.name.startswith("opt_state")} == {"exact"}
    assert plan.unused == () and plan.filled == ()


def norms(norm, *attentions):
    """Two towers, of which the decoder has one module more; all norms have one shape."""
    made = {}
    for tower, names in (("decoder", ("ln_attn", "ln_cross", "ln_ffn")), ("encoder", ("ln_attn", "ln_ffn"))):
        for layer in range(3):
            at = f"params/{tower}/block_{layer}"
            made |= {f"{at}/{name}/{norm}": (8,) for name in names}
            for attention in attentions[: len(names) - 1]:
                made |= {f"{at}/{attention}/{name}/kernel": (8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
            made |= {f"{at}/ffn/up/kernel": (8, 16), f"{at}/ffn/down/kernel": (16, 8)}
    return made


def test_a_module_with_another_last_word_is_the_same_module():
    """Shapes and order leave other readings of the norms; their paths do not."""
    rng = np.random.default_rng(0)
    old = {name: rng.normal(size=shape) for name, shape in norms("gamma", "self_attn", "cross_attn").items()}
    new = {name: np.zeros(shape) for name, shape in norms("scale", "attn", "xattn").items()}
    found = flatten(ot.restore(checkpoint(old), unflatten(new), "auto"))
    for name, value in found.items():
        stored = name.replace("/xattn/", "/cross_attn/").replace("/attn/", "/self_attn/").replace("/scale", "/gamma")
        np.testing.assert_array_equal(value, old[stored])


def test_of_readings_that_are_alike_none_is_proposed():
    rng = np.random.default_rng(0)
    old = {f"h/{i}/{name}/w": rng.normal(size=(4, 5)) for i in range(2) for name in ("a", "c")}
    old |= {f"h/{i}/query/w": rng.normal(size=(3, 4)) for i in range(2)} | {"norm": rng.normal(size=7)}
    new = {name.replace("/a/", "/x/").replace("/c/", "/y/"): np.zeros_like(value) for name, value in old.items()}
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(checkpoint(old), unflatten(new), "auto")
    (problem,) = caught.value.problems
    assert "may be" in problem.message and "given=" not in str(problem.fix)
