"""Resumptions that once lost moments, crossed counts or were refused, each against NumPy's truth."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import orbax_t5x as ot
from tests.transforms.follow.resume_layouts import leaves_by_name, with_leaves

T = ot.transforms


def plain(rule):
    return rule


@pytest.fixture(params=[plain, T.FollowOptimizer], ids=["rule", "FollowOptimizer"])
def form(request):
    """A rule as it is, and in its older form."""
    return request.param


def filled(tree):
    """Numbers that differ from leaf to leaf, in place of an abstract tree's leaves."""
    random = np.random.default_rng(0)
    return with_leaves(tree, {name: new_value(random, leaf) for name, leaf in leaves_by_name(tree).items()})


def new_value(random, leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(random.integers(0, 2**32, 2, dtype=np.uint32))
    if leaf.dtype == bool:
        return np.ones(leaf.shape, bool)
    return random.integers(10, 10**6, leaf.shape).astype(leaf.dtype)


def saved(path, state):
    ocp.PyTreeCheckpointer().save(path / "state", state)
    return path / "state"


def assert_equal(actual, expected):
    """Compares all leaves, by name."""
    actual, expected = leaves_by_name(actual), leaves_by_name(expected)
    assert actual.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not np.array_equal(data(actual[name]), data(value))]
    assert not wrong


def data(value):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


class Attention(nnx.Module):
    def __init__(self):
        for name in "qko":
            setattr(self, name, nnx.Linear(3, 3, rngs=nnx.Rngs(0)))


def nnx_state(model, optimizer):
    return nnx.eval_shape(
        lambda: (
            lambda module: nnx.state({"model": module, "optimizer": nnx.Optimizer(module, optimizer, wrt=nnx.Param)})
        )(model())
    )


# V1: the moments of an NNX checkpoint followed only the first of several rules.


def turned(name):
    return T.Transpose(f"model/{name}/kernel/value")


def turned_leaves(state, *names):
    values = leaves_by_name(state)
    return with_leaves(
        state,
        {
            name: value.T if name.endswith(tuple(f"{one}/kernel" for one in names)) else value
            for name, value in values.items()
        },
    )


@pytest.mark.parametrize("names", ["k", "qk", "qkoqk"])
def test_moments_of_nnx_follow_every_rule_of_a_list(tmp_path, form, names):
    state = filled(nnx_state(Attention, optax.adam(0.1)))
    odd = [name for name in "qko" if names.count(name) % 2]
    rules = [form(turned(name)) for name in names]
    assert_equal(ot.restore(saved(tmp_path, state), state, rules), turned_leaves(state, *odd))


def test_moments_of_nnx_follow_a_swap_after_a_rename(tmp_path, form):
    state = filled(nnx_state(Attention, optax.adam(0.1)))
    same = T.Rename([("model/o/(.*)", r"model/o/\1")])
    swap = T.Rename([("model/q/(.*)", r"model/k/\1"), ("model/k/(.*)", r"model/q/\1")])
    values = leaves_by_name(state)
    others = {"q": "k", "k": "q", "o": "o"}
    expected = {}
    for name in values:
        parts = [others.get(part, part) for part in name.split("/")]
        expected[name] = values["/".join(parts)]
    assert_equal(ot.restore(saved(tmp_path, state), state, [form(same), form(swap)]), with_leaves(state, expected))


# V6: a copy beside the parameters did not follow; a teacher and a second tower must not.


@pytest.mark.parametrize("rule", ["turn", "swap"])
@pytest.mark.parametrize(
    ("copy", "follows"),
    [
        *((name, True) for name in ("ema_params", "ema", "target_params", "average", "slow", "shadow")),
        *((name, False) for name in ("teacher", "teacher_params", "discriminator")),
    ],
)
def test_copies_follow_if_their_root_says_that_they_are(tmp_path, form, rule, copy, follows):
    shapes = {name: {"kernel": jax.ShapeDtypeStruct((3, 3), np.float32)} for name in "qk"}
    state = {"params": shapes, copy: shapes, "opt_state": jax.eval_shape(optax.adam(0.1).init, shapes)}
    state = filled(state)
    rules = {
        "turn": T.Transpose("params/q/kernel"),
        "swap": T.Rename([("params/q/(.*)", r"params/k/\1"), ("params/k/(.*)", r"params/q/\1")]),
    }

    def after(tree):
        if rule == "turn":
            return tree | {"q": {"kernel": tree["q"]["kernel"].T}}
        return {"q": tree["k"], "k": tree["q"]}

    adam, empty = state["opt_state"]
    adam = adam._replace(mu=after(adam.mu), nu=after(adam.nu))
    expected = {
        "params": after(state["params"]),
        copy: after(state[copy]) if follows else state[copy],
        "opt_state": (adam, empty),
    }
    assert_equal(ot.restore(saved(tmp_path, state), state, [form(rules[rule])]), expected)


# F2: an integer scalar in the model was taken for the parameters of `optimizer/step`.


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Blocks(nnx.Module):
    """Two blocks of which one has another name after the change, with a Dropout in none, one or both."""

    def __init__(self, name, dropouts):
        rngs = nnx.Rngs(0)
        setattr(self, name, Block(rngs) if dropouts > 1 else nnx.Linear(4, 4, rngs=rngs))
        self.out = Block(rngs) if dropouts > 1 else nnx.Linear(4, 4, rngs=rngs)
        if dropouts == 1:
            self.drop = nnx.Dropout(0.1, rngs=rngs)


EVERYWHERE = T.Rename([(r"(.*)/old/(.*)", r"\1/new/\2")])
PARAMETERS = T.Rename([(r"model/old/(.*)", r"model/new/\1")])


def renamed(values):
    return {name.replace("/old/", "/new/"): value for name, value in values.items()}


@pytest.mark.parametrize("dropouts", [0, 1, 2])
@pytest.mark.parametrize("rule", [EVERYWHERE, PARAMETERS], ids=["everywhere", "parameters"])
def test_dropouts_are_no_parameters(tmp_path, form, rule, dropouts):
    state = filled(nnx_state(lambda: Blocks("old", dropouts), optax.adamw(0.1)))
    target = nnx_state(lambda: Blocks("new", dropouts), optax.adamw(0.1))
    expected = with_leaves(target, renamed(leaves_by_name(state)))
    assert_equal(ot.restore(saved(tmp_path, state), filled(target), [form(rule)]), expected)


def test_roots_may_be_given(tmp_path):
    state = filled(nnx_state(lambda: Blocks("old", 1), optax.adamw(0.1)))
    target = nnx_state(lambda: Blocks("new", 1), optax.adamw(0.1))
    expected = with_leaves(target, renamed(leaves_by_name(state)))
    rule = T.FollowOptimizer(PARAMETERS, roots=[("model", "optimizer")])
    assert_equal(ot.restore(saved(tmp_path, state), filled(target), [rule]), expected)


# F3, F4, B4: the same optimizer at another place, of which counts stayed behind or went astray.

ADAM = optax.adamw(0.1)
SLOW = optax.scale_by_schedule(lambda count: 0.1)
# Name -> the optimizer after the change, and where the old one's state is in it.
CHANGES = {
    "none": (ADAM, ""),
    "clip before": (optax.chain(optax.clip_by_global_norm(1.0), ADAM), "1/"),
    "two before": (optax.chain(optax.clip(1.0), optax.zero_nans(), ADAM), "2/"),
    "ema before": (optax.chain(optax.ema(0.9), ADAM), "1/"),
    "ema after": (optax.chain(ADAM, optax.ema(0.9)), "0/"),
    "trace before": (optax.chain(optax.trace(0.9), ADAM), "1/"),
    "schedule before": (optax.chain(SLOW, ADAM), "1/"),
    "schedule after": (optax.chain(ADAM, SLOW), "0/"),
    "schedule inside": (optax.adamw(lambda count: 0.1), ""),
    "ema on both sides": (optax.chain(optax.ema(0.9), ADAM, optax.ema(0.5)), "1/"),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), "inner_state/"),
    "apply_if_finite": (optax.apply_if_finite(ADAM, 5), "inner_state/"),
    "MultiSteps": (optax.MultiSteps(ADAM, 4).gradient_transformation(), "inner_opt_state/"),
    "clip in MultiSteps": (
        optax.MultiSteps(optax.chain(optax.clip(1.0), ADAM), 4).gradient_transformation(),
        "inner_opt_state/1/",
    ),
    "one label": (
        optax.multi_transform({"all": ADAM}, lambda tree: jax.tree.map(lambda _: "all", tree)),
        "inner_states/all/inner_state/",
    ),
    "masked": (optax.masked(ADAM, lambda tree: jax.tree.map(lambda _: True, tree)), "inner_state/"),
}


def linen_state(name, optimizer):
    layer = {"kernel": jax.ShapeDtypeStruct((3, 4), np.float32), "bias": jax.ShapeDtypeStruct((4,), np.float32)}
    parameters = {name: layer, "out": {"kernel": jax.ShapeDtypeStruct((4, 3), np.float32)}}
    state = jax.eval_shape(optimizer.init, parameters)
    step = jax.ShapeDtypeStruct((), np.int32)
    return TrainState(step=step, apply_fn=None, params=parameters, tx=optimizer, opt_state=state)


STATES = {
    "linen": (linen_state, "params/", "opt_state/"),
    "NNX": (lambda name, optimizer: nnx_state(lambda: Blocks(name, 0), optimizer), "model/", "optimizer/opt_state/"),
    "NNX with Dropout": (
        lambda name, optimizer: nnx_state(lambda: Blocks(name, 1), optimizer),
        "model/",
        "optimizer/opt_state/",
    ),
}


def ones(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(np.ones(2, np.uint32)) if is_key else np.ones(leaf.shape, leaf.dtype)


def moved(old_values, new_names, box, place, is_renamed):
    """The old leaves by their new names; leaves of the optimizer that are new are not among them."""
    values = renamed(old_values) if is_renamed else old_values
    moved_values = {}
    for name, value in values.items():
        new = box + place + name.removeprefix(box) if name.startswith(box) else name
        assert new in new_names
        moved_values[new] = value
    return moved_values


@pytest.mark.parametrize("layout", STATES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", ["none", "rename"])
def test_moments_and_counts_go_where_the_same_optimizer_is(tmp_path, layout, change, rule):
    create, root, box = STATES[layout]
    optimizer, place = CHANGES[change]
    state = filled(create("old", ADAM))
    target = create("new" if rule == "rename" else "old", optimizer)
    names = leaves_by_name(target)
    fallback = {name: ones(leaf) for name, leaf in names.items()}
    taken = moved(leaves_by_name(state), names, box, place, rule == "rename")
    expected = with_leaves(target, fallback | taken)
    rules = [T.Rename([(f"{root}old/(.*)", rf"{root}new/\1")])] if rule == "rename" else []
    options = {"fallback": with_leaves(target, fallback), "fallback_for": sorted(names.keys() - taken.keys())}
    plan = ot.plan_restore(saved(tmp_path, state), filled(target), rules, **options)
    assert sorted(plan.filled) == options["fallback_for"]
    assert_equal(plan.execute(), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_auto_finds_the_same_optimizer_behind_a_wrapper(tmp_path, change):
    test_moments_and_counts_of_a_given_list(tmp_path, change, "auto")


def test_moments_and_counts_of_a_given_list(tmp_path, change="clip before", rules=()):
    optimizer, place = CHANGES[change]
    state, target = filled(linen_state("old", ADAM)), linen_state("old", optimizer)
    names = leaves_by_name(target)
    fallback = {name: ones(leaf) for name, leaf in names.items()}
    taken = moved(leaves_by_name(state), names, "opt_state/", place, is_renamed=False)
    options = {"fallback": with_leaves(target, fallback), "fallback_for": sorted(names.keys() - taken.keys())}
    restored = ot.restore(saved(tmp_path, state), filled(target), rules, **options)
    assert_equal(restored, with_leaves(target, fallback | taken))


@pytest.mark.parametrize("rules", [(), "auto"])
def test_moments_of_parameters_that_are_frozen_are_left(tmp_path, rules):
    """One label trains as before, and the other keeps no moments."""
    labels = {"old": "trained", "out": "frozen"}
    frozen = optax.multi_transform({"trained": ADAM, "frozen": optax.set_to_zero()}, labels)
    state, target = filled(linen_state("old", ADAM)), linen_state("old", frozen)
    names = leaves_by_name(target)
    place = "inner_states/trained/inner_state/"
    values = {
        "opt_state/" + place + name.removeprefix("opt_state/") if name.startswith("opt_state/") else name: value
        for name, value in leaves_by_name(state).items()
        if not name.startswith("opt_state/") or "/out/" not in name
    }
    assert values.keys() == names.keys()
    restored = ot.restore(saved(tmp_path, state), filled(target), rules, strict=False)
    assert_equal(restored, with_leaves(target, values))


def test_moments_stay_in_their_own_tower(tmp_path):
    """Nothing of one tower goes to the other, also where its own moments have no place any more."""
    layer = {"kernel": jax.ShapeDtypeStruct((3, 3), np.float32)}
    old, new = {"a": layer, "b": layer}, {"c": layer, "b": layer}

    def towers(first, second, parameters):
        return {
            "gen_params": parameters,
            "gen_opt": jax.eval_shape(first.init, parameters),
            "dis_params": old,
            "dis_opt": jax.eval_shape(second.init, old),
        }

    state = filled(towers(optax.adam(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2), old))
    target = filled(towers(optax.adam(0.1), optax.adam(0.1), new))
    rules = [T.Rename([("gen_params/a/(.*)", r"gen_params/c/\1")], follow=False)]
    options = {"fallback": target, "fallback_for": ["(gen|dis)_opt/.*"], "strict": False}
    plan = ot.plan_restore(saved(tmp_path, state), target, rules, **options)
    restored = plan.execute()
    assert "dis_opt/0/mu/a/kernel" in plan.filled and "dis_opt/0/nu/b/kernel" in plan.filled
    assert_equal(restored["dis_opt"], target["dis_opt"])


def test_two_places_of_one_kind_are_a_question(tmp_path):
    """Neither trace is the old one more than the other."""
    state = filled(linen_state("old", optax.trace(0.9)))
    target = filled(linen_state("old", optax.chain(optax.trace(0.9), optax.scale(0.5), optax.trace(0.5))))
    with pytest.raises(ot.RestorePlanError):
        ot.restore(saved(tmp_path, state), target, strict=False)


# U7: a rename of the parameters alone left the moments behind.


def test_a_rename_of_the_parameters_takes_all_moments_along(tmp_path):
    state, target = filled(linen_state("old", optax.adam(0.1))), linen_state("new", optax.adam(0.1))
    expected = with_leaves(target, renamed(leaves_by_name(state)))
    rules = [T.Rename([("params/old/(.*)", r"params/new/\1")])]
    plan = ot.plan_restore(saved(tmp_path, state), filled(target), rules, fallback=filled(target), strict=False)
    assert not plan.filled and not plan.warnings
    assert_equal(plan.execute(), expected)


def test_moments_from_a_fallback_beside_restored_ones_are_a_warning(tmp_path):
    state, target = filled(linen_state("old", optax.adam(0.1))), filled(linen_state("new", optax.adam(0.1)))
    rules = [T.AssignmentMap([("params/new/(.*)", r"params/old/\1")])]
    path = saved(tmp_path, state)
    plan = ot.plan_restore(path, target, rules, fallback=target, strict=False)
    assert plan.filled and len(plan.warnings) == 1
    followed = [T.FollowOptimizer(rules[0])]
    plan = ot.plan_restore(path, target, followed, fallback=target, strict=False)
    assert not plan.filled
