"""Packs into every kind of target: below any prefix, into T5X's, Flax's and NNX's states; found by infer and by hand.

The parameters are those that T5X's importer made of the bundle; other layouts of them are by the table of `t5_model`.
"""

import inspect
from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.optimizers import adamw
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten, unflatten
from orbax_t5x.trees.named_leaves import named_leaves
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint

BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"
CONFIGS = {
    "minimal": t5_model.T5Config(),
    "unscanned": t5_model.T5Config(split_heads=True, per_layer_bias=True),
    "scanned": t5_model.T5Config(scan_layers=True),
}
HEADS = (4, 4)
TX = optax.adamw(1e-3)


@cache
def parameters(layout):
    """The model's parameters by name."""
    if layout == "scanned":
        return flatten(t5_model.scanned_from(unflatten(parameters("minimal")), CONFIGS["scanned"]))
    if layout == "unscanned":
        found = {}
        for name, value in parameters("scanned").items():
            tower, _, rest = name.partition("/")
            if rest.startswith(f"{tower}/"):
                layer = rest.removeprefix(f"{tower}/")
                found.update({f"{tower}/layers_{i}/{layer}": value[:, i] for i in range(value.shape[1])})
            else:
                found[name] = value
        return found
    with np.load(GOLDENS / "importer" / "t5_1_1_f32.npz") as values:
        return {name.removeprefix("target/"): values[name] for name in values if name.startswith("target/")}


def source(name):
    """A checkpoint of the model."""
    if name == "bundle":
        return ot.open_checkpoint(BUNDLE)
    if name in CONFIGS:
        return checkpoint({f"target/{leaf}": value for leaf, value in parameters(name).items()})
    pack = {"hugging face": rules.hf_t5_to_t5x, "hugging face flax": rules.hf_flax_t5_to_t5x}[name]().inverse()
    result, _ = run(pack, {f"target/{leaf}": value for leaf, value in parameters("minimal").items()})
    return checkpoint({leaf: as_numpy(value) for leaf, value in result.items()})


SOURCES = ("bundle", "hugging face", "hugging face flax", *CONFIGS)


def t5x_state(layout, optimizer):
    return FlaxOptimTrainState.create(optimizer, t5_model.init(CONFIGS[layout])[1])


def adafactor(layout):
    # Scalable T5 factors by logical axes.
    by_axes = {} if layout == "minimal" else {"logical_factor_rules": standard_logical_factor_rules()}
    return Adafactor(1e-3, min_dim_size_to_factor=8, **by_axes)


def nnx_state(params):
    return nnx.State(jax.tree.map(nnx.Param, params))


# Kind of target -> (what makes it from nested parameters, the prefix of the parameters in it).
TREES = {
    "target": (lambda params: {"target": params}, "target/"),
    "params": (lambda params: {"params": params}, "params/"),
    "variables in params": (lambda params: {"params": {"params": params}}, "params/params/"),
    "bare": (lambda params: params, ""),
    "in a tree": (lambda params: {"model": params, "more": [np.zeros(2)]}, "model/"),
    "flax train state": (
        lambda params: flax_train_state.TrainState.create(apply_fn=None, params=params, tx=TX),
        "params/",
    ),
    "flax train state of variables": (
        lambda params: flax_train_state.TrainState.create(apply_fn=None, params={"params": params}, tx=TX),
        "params/params/",
    ),
    "inference state": (lambda params: InferenceState(step=np.int32(0), params=params), "target/"),
    "nnx state": (nnx_state, ""),
    "nnx state in a dict": (lambda params: {"model": nnx_state(params), "seed": 3}, "model/"),
}
T5X_OPTIMIZERS = {"adafactor": adafactor, "adamw": lambda layout: adamw(1e-3)}


def target_of(kind, layout):
    if kind in T5X_OPTIMIZERS:
        return t5x_state(layout, T5X_OPTIMIZERS[kind](layout)), "target/"
    make, prefix = TREES[kind]
    return make(jax.tree.map(np.zeros_like, unflatten(parameters(layout)))), prefix


@cache
def tree(kind, layout):
    return target_of(kind, layout)


def check_parameters(plan, prefix, layout):
    views = {entry.name: entry.view for entry in plan.entries}
    for name, value in parameters(layout).items():
        if any(part in name for part in ("token_embedder", "relpos_bias", "/query/", "/out/", "/wo/")):
            np.testing.assert_array_equal(views[prefix + name].get(), value, err_msg=name)


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("kind", [*TREES, *T5X_OPTIMIZERS])
def test_what_infer_finds_works_on_that_very_target(kind, layout):
    target, prefix = tree(kind, layout)
    for name in SOURCES:
        with source(name) as opened:
            pack = rules.infer(opened, target)
            # The target's own values are what no checkpoint of these has: moments, and what else is in the tree.
            plan = ot.plan_restore(opened, target, pack, fallback=target)
            check_parameters(plan, prefix, layout)
            missing = {entry.name for entry in plan.entries if entry.action == "fallback"}
            assert not any(entry.startswith(prefix + "encoder/") for entry in missing), (name, missing)
            # What infer found is what its parts do.
            by_parts = ot.plan_restore(opened, target, pack.parts, fallback=target)
            check_parameters(by_parts, prefix, layout)


BY_HAND = {
    "mesh_tf_to_t5x": lambda: [rules.mesh_tf_to_t5x(), rules.t5_minimal_to_scanned(*HEADS)],
    "Translate": lambda: [tr.Translate(), rules.t5_minimal_to_scanned(*HEADS)],
}


@pytest.mark.parametrize("chain", BY_HAND)
def test_packs_by_hand_do_what_infer_does_into_adafactors_state(chain):
    target = t5x_state("scanned", Adafactor(1e-3, logical_factor_rules=standard_logical_factor_rules()))
    with ot.open_checkpoint(BUNDLE) as opened:
        expected = ot.plan_restore(opened, target, rules.infer(opened, target), fallback=target)
        plan = ot.plan_restore(opened, target, BY_HAND[chain](), fallback=target)
        assert [entry.name for entry in plan.entries] == [entry.name for entry in expected.entries]
        for entry, other in zip(plan.entries, expected.entries, strict=True):
            assert (entry.action, entry.fidelity, entry.how) == (other.action, other.fidelity, other.how), entry.name
        check_parameters(plan, "target/", "scanned")


@pytest.mark.parametrize("layout", ["minimal", "scanned"])
def test_the_momenta_of_t5x_go_to_flax_and_back(layout):
    """T5X's own optax state below `state/param_states` has the names of Flax's `opt_state`."""
    t5x = t5x_state("minimal", adamw(1e-3))
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(leaf.shape).astype(leaf.dtype) if leaf.ndim else np.asarray(7, leaf.dtype)
        for name, leaf in named_leaves(t5x).items()
    }
    target, _ = tree("flax train state", layout)
    opened = checkpoint(values)
    plan = ot.plan_restore(opened, target, rules.infer(opened, target))
    got = {entry.name: entry.view.get() for entry in plan.entries}
    assert got["step"] == 7 and got["opt_state/0/count"] == 7
    to_scanned = rules.t5_minimal_to_scanned(*HEADS)
    for root, ours in (("target/", "params/"), ("state/param_states/0/mu/", "opt_state/0/mu/")):
        below = {f"params/{name.removeprefix(root)}": value for name, value in values.items() if name.startswith(root)}
        expected = below if layout == "minimal" else run(to_scanned, below)[0]
        assert_same(
            {name.removeprefix(ours): value for name, value in got.items() if name.startswith(ours)},
            {name.removeprefix("params/"): as_numpy(value) for name, value in expected.items()},
        )
    back = ot.plan_restore(checkpoint(got), t5x, rules.infer(got, t5x))
    assert_same({entry.name: entry.view.get() for entry in back.entries}, values)


def test_translate_follows_the_prefix_by_hand():
    for kind in ("params", "variables in params", "bare", "in a tree", "nnx state in a dict"):
        target, prefix = tree(kind, "minimal")
        plan = ot.plan_restore(BUNDLE, target, tr.Translate(), fallback=target, strict=False)
        check_parameters(plan, prefix, "minimal")


def test_packs_follow_the_prefix_by_hand():
    pack = rules.t5_minimal_to_scanned(*HEADS)
    for kind in ("params", "variables in params", "bare", "in a tree", "nnx state"):
        for one, other, transform in (("minimal", "scanned", pack), ("scanned", "minimal", pack.inverse())):
            target, prefix = tree(kind, other)
            check_parameters(ot.plan_restore(source(one), target, transform, fallback=target), prefix, other)


def test_a_tree_of_several_models_keeps_its_names():
    params = {f"{name}/params/{leaf}": value for name in "ab" for leaf, value in parameters("minimal").items()}
    target = {f"params/{leaf}": value for leaf, value in parameters("scanned").items()}
    result, _ = run(rules.t5_minimal_to_scanned(*HEADS), params, target)
    assert {name.partition("/params/")[0] for name in result} == {"a", "b"}
    assert "a/params/encoder/encoder/mlp/wo/kernel" in result


# -- MaxText


def decoder_only(prefix):
    names = {
        name: value
        for name, value in parameters("minimal").items()
        if name.startswith("decoder/") and "cross" not in name and "encoder_decoder" not in name
    }
    return {prefix + name: value for name, value in names.items()}


@pytest.mark.parametrize("there", ["params/params/", "params/", ""])
@pytest.mark.parametrize("here", ["target/", "params/params/", ""])
def test_maxtext_below_any_prefix(here, there):
    full = decoder_only(here)
    named = {name: value for name, value in full.items() if "relpos" not in name}
    for scanned in (True, False):
        pack = rules.t5x_decoder_to_maxtext(*HEADS, scanned=scanned)
        result, _ = run(pack, named)
        values = {there + name.removeprefix("params/params/"): as_numpy(value) for name, value in result.items()}
        opened = checkpoint(full)
        drop = tr.Drop(r".*relpos_bias/.*")
        found = rules.infer(opened, values)
        assert "t5x_decoder_to_maxtext" in found.name
        for chain in ([drop, pack], [drop, found]):
            plan = ot.plan_restore(opened, values, chain)
            assert_same({entry.name: entry.view.get() for entry in plan.entries}, values)
        back = rules.infer(values, named)
        assert_same({name: as_numpy(value) for name, value in run(back, values, named)[0].items()}, named)


def test_what_maxtext_has_no_place_for_is_a_problem_that_drop_permits():
    pack = rules.t5x_decoder_to_maxtext(*HEADS)
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(decoder_only("target/")), None, pack)
    (problem,) = caught.value.problems
    assert problem.kind == "rule" and "no T5 relative bias" in problem.message and "relpos_bias" in problem.message
    both = checkpoint({f"target/{name}": value for name, value in parameters("minimal").items()})
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(both, None, pack)
    bias, encoder = caught.value.problems
    assert "no T5 relative bias" in bias.message and "have no encoder" in encoder.message
    # What the problems say is what permits it.
    permits = [
        eval(str(problem.fix).partition("put ")[2].partition(" before")[0], {"ot": ot}) for problem in (bias, encoder)
    ]
    plan = ot.plan_restore(both, None, [*permits, pack])
    assert not any("encoder/" in entry.name or "relpos" in entry.name for entry in plan.entries)
    assert pack.inverse().inverse() == pack
    with pytest.raises(RestorePlanError, match="relative bias"):
        pack(unflatten(decoder_only("target/")), {})


def test_the_parts_of_a_pack_are_what_somebody_would_write_out():
    target = {"target": t5_model.init(CONFIGS["scanned"])[1]["params"]}
    pack = rules.infer(source("hugging face"), target)
    assert pack.parts == (rules.hf_t5_to_t5x(), rules.t5_minimal_to_scanned(*HEADS))
    assert pack.inverse().parts == (rules.t5_minimal_to_scanned(*HEADS).inverse(), rules.hf_t5_to_t5x().inverse())
    # A changed digest would make recorded runs ask again.
    assert pack.digest() == "85bb5ae2db282ef5158b6f45abf8836d"
    assert rules.infer(target, target).parts == ()


@pytest.mark.parametrize("name", sorted(set(rules.__all__) - {"RulePack", "infer"}))
def test_a_pack_has_a_way_back_or_says_that_it_has_none(name):
    function = getattr(rules, name)
    takes_heads = "num_heads" in inspect.signature(function).parameters
    pack = function(*HEADS) if takes_heads else function()
    if name == "mesh_tf_to_t5x":
        with pytest.raises(RestorePlanError, match=r"mesh_tf_to_t5x\(\) has no inverse"):
            pack.inverse()
    else:
        assert pack.inverse().steps and pack.inverse().inverse() == pack


@pytest.mark.parametrize("layout", ["minimal", "scanned"])
def test_what_infer_finds_for_a_bundle_has_no_way_back(layout):
    """Neither alone, nor before another pack, and in each case before what drops the optimizer's leaves."""
    target = {f"target/{name}": value for name, value in parameters(layout).items()}
    pack = rules.infer(source("bundle"), target)
    assert any(isinstance(part, tr.Drop) for part in pack.parts)
    with pytest.raises(RestorePlanError, match=r"mesh_tf_to_t5x\(\) has no inverse"):
        pack.inverse()


def test_the_way_back_of_what_infer_drops_is_that_of_the_rest():
    target = {f"target/{name}": value for name, value in parameters("minimal").items()}
    scanned = {f"target/{name}": value for name, value in parameters("scanned").items()}
    pack = rules.infer(checkpoint(scanned | {"state/step": np.int32(3)}), target)
    assert any(isinstance(part, tr.Drop) for part in pack.parts)
    result, _ = run(pack.inverse(), target, scanned)
    assert_same({name: as_numpy(value) for name, value in result.items()}, scanned)
