"""Optimizer state follows its parameters: against the optimizers themselves, run on both layouts of one network."""

import dataclasses
import time

import jax
import numpy as np
import optax
import pytest
from flax.serialization import to_state_dict
from flax.traverse_util import ModelParamTraversal

from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.optimizers import MultiOptimizer, OptaxWrapper
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.trees.flat import flatten
from tests.support.followed_networks import (
    HEADS,
    SIZES,
    adafactor,
    after_steps,
    assert_close,
    mapped,
    minimal_adafactor,
    networks,
    random_like,
    state,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "layout", "beta1"),
    [*((sizes, "scanned", None) for sizes in SIZES), ("E=J", "scanned", 0.9), ("E=J", "unscanned", None)],
)
def test_adafactor_states_are_those_of_the_other_network(sizes, layout, beta1):
    """Two steps in both layouts: mapping the state of one gives the state of the other, square kernels included."""
    embed, head_dim = SIZES[sizes]
    if layout == "scanned":
        pack = rules.t5_minimal_to_scanned(HEADS, head_dim)
        minimal, other = networks(embed, head_dim)
    else:
        pack = rules.t5_minimal_to_unscanned(HEADS, head_dim)
        minimal, other = networks(embed, head_dim, "unscanned")
    params = minimal["params"]
    grads = [random_like(params, seed) for seed in range(2)]
    source = minimal_adafactor(embed, head_dim, beta1)
    expected = after_steps(adafactor(other, beta1=beta1), mapped(pack, params), [mapped(pack, grad) for grad in grads])
    result, diagnostics = run(pack, source, expected)
    assert diagnostics.problems == [] and diagnostics.warnings == []
    assert_close(result, expected)
    slots = [name for name in expected if name.startswith("state/param_states/")]
    assert set(diagnostics.fidelity) <= set(slots)
    approximate = {name for name, kind in diagnostics.fidelity.items() if kind == "approximate"}
    assert approximate and all("/relpos_bias/" in name for name in approximate)
    # Without a target the pack's own axes decide; and the way back is exact.
    assert_close(run(pack, source)[0], expected)
    for target in (source, {}):
        back, diagnostics = run(pack.inverse(), result, target)
        assert diagnostics.problems == []
        assert sorted(back) == sorted(source)
        assert all(np.array_equal(back[name], source[name]) for name in source)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_adam(), optax.scale(-0.1)),
        lambda: optax.masked(
            optax.adam(0.1), lambda p: jax.tree_util.tree_map_with_path(lambda k, _: "mlp" in str(k), p)
        ),
        lambda: optax.inject_hyperparams(optax.adam)(0.1),
        lambda: optax.MultiSteps(optax.adam(0.1), 2),
    ],
    ids=["chain", "masked", "hyperparams", "multi_steps"],
)
@pytest.mark.usefixtures("standard_dtype_promotion")
def test_optax_states_follow_exactly(make):
    """Elementwise optimizers, so the mapped state is the other network's, bit for bit but for rounding."""
    minimal, _ = networks(*SIZES["E<J"])
    pack = rules.t5_minimal_to_scanned(HEADS, 8)
    params = minimal["params"]
    grads = [random_like(params, 0)]
    source = after_steps(OptaxWrapper(make()), params, grads)
    expected = after_steps(OptaxWrapper(make()), mapped(pack, params), [mapped(pack, grad) for grad in grads])
    result, diagnostics = run(pack, source, expected)
    assert diagnostics.problems == [] and diagnostics.warnings == [] and "reset" not in diagnostics.fidelity.values()
    assert_close(result, expected)
    back, _ = run(pack.inverse(), result, source)
    assert sorted(back) == sorted(source) and all(np.array_equal(back[name], source[name]) for name in source)


@pytest.mark.filterwarnings("ignore:`flax.traverse_util.Traversal`:DeprecationWarning")
def test_multi_optimizer_nones_follow():
    minimal, scanned = networks(*SIZES["E>J"])
    pack = rules.t5_minimal_to_scanned(HEADS, 4)
    params = minimal["params"]

    def definition(variables):
        return MultiOptimizer([(ModelParamTraversal(lambda path, _: "mlp" in path), adafactor(variables))])

    source = after_steps_with_none(definition(minimal), params)
    expected = after_steps_with_none(definition(scanned), mapped(pack, params))
    result, diagnostics = run(pack, source, expected)
    assert diagnostics.problems == []
    assert sorted(result) == sorted(expected)
    nones = {name for name, value in expected.items() if value is None}
    assert nones and {name for name, value in result.items() if value is None} == nones


def after_steps_with_none(definition, params):
    state = definition.create(params).state_dict()
    return {name: None if leaf is None else np.asarray(leaf) for name, leaf in flatten(state).items()}


def test_optax_adafactor_follows_where_that_is_exact():
    """Optax factors over the two largest dimensions, whatever they mean."""
    params = {f"layers_{i}": {"w": np.ones((4, 6), np.float32), "b": np.ones(6, np.float32)} for i in range(3)}
    stacked = {"layers": {"w": np.ones((4, 3, 6), np.float32), "b": np.ones((6, 3), np.float32)}}

    def make():
        return optax.adafactor(0.1, min_dim_size_to_factor=4, multiply_by_parameter_scale=False)

    grads = random_like(params, 1)
    stack = tr.Chain(
        [
            tr.StackLayers(r"params/layers_(\d+)/(w)", r"params/layers/\2", 1),
            tr.StackLayers(r"params/layers_(\d+)/(b)", r"params/layers/\2", 1),
        ]
    )

    def tree(values, state):
        flat = flatten({"params": values, "opt_state": to_state_dict(state)})
        return {name: np.asarray(value) for name, value in flat.items()}

    def stacked_tree(values):
        return jax.tree.map(as_numpy, stack({"params": values}, {})["params"])

    source = tree(params, make().update(grads, make().init(params), params)[1])
    expected = tree(stacked, make().update(stacked_tree(grads), make().init(stacked), stacked)[1])
    result, diagnostics = run(tr.FollowOptimizer(stack), source, expected)
    assert diagnostics.problems == []
    assert_close(result, expected)


@pytest.mark.parametrize(("shape", "joined"), [((16, 4, 8), (16, 32)), ((4, 8, 16), (32, 16)), ((4, 2, 8), (8, 8))])
def test_optax_adafactor_follows_joined_heads(shape, joined):
    """A mean over more dimensions is made of the means over fewer: Optax averages heads only after they are joined."""

    def tree(param, grad):
        state = make().update({"w": grad}, make().init({"w": param}), {"w": param})[1]
        return flatten({"params": {"w": param}, "opt_state": to_state_dict(state)})

    def make():
        return optax.adafactor(0.1, min_dim_size_to_factor=4, multiply_by_parameter_scale=False)

    param, grad = np.ones(shape, np.float32), random_like({"w": np.ones(shape)}, 1)["w"]
    expected = tree(param.reshape(joined), grad.reshape(joined))
    result, diagnostics = run(tr.FollowOptimizer(tr.Reshape("params/w", joined)), tree(param, grad), expected)
    assert diagnostics.problems == diagnostics.warnings == [] and "reset" not in diagnostics.fidelity.values()
    assert_close(result, expected)


# -- small trees


W = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_the_transform_sees_parameters_and_step_alone():
    seen = []

    def look(flat_state, target):
        seen.append(sorted(flatten(flat_state)))
        return flat_state

    source = state({"a": W}, {"0/count": np.int32(1), "0/mu/a": W + 1, "a/v": W})
    result, diagnostics = run(tr.FollowOptimizer(look), source)
    assert seen == [["state/param_states/0/count", "state/step", "target/a"]]
    assert sorted(result) == sorted(source) and diagnostics.problems == []


# -- slots and factors


def test_following_costs_little():
    """Ten thousand parameters with two momenta each, in linear time (seconds would mean it is not)."""
    params = {f"m{i}/layers_{j}/w": W for i in range(100) for j in range(100)}
    source = state(params, {f"0/{kind}/{name}": value for kind in ("mu", "nu") for name, value in params.items()})
    start = time.process_time()
    stack = tr.StackLayers(r"target/(m\d+)/layers_(?P<i>\d+)/(.*)", r"target/\1/\3", 0)
    result, diagnostics = run(stack, source)
    assert len(result) == 301 and not diagnostics.problems
    assert time.process_time() - start < 10
    assert dataclasses.replace(diagnostics, problems=[]).fidelity["state/param_states/0/mu/m0/w"] == "exact"


STATE = {"params/w": (2, 3), "opt_state/0/mu/w": (2, 3), "opt_state/0/nu/w": (2, 3), "opt_state/0/count": ()}
MOVE = tr.FollowOptimizer(tr.Rename([("params/(.*)", r"model/\1")]))


def arrays(names):
    return {name: np.full(shape, at) for at, (name, shape) in enumerate(names.items())}


def test_without_a_target_slots_stay_in_their_container():
    result, diagnostics = run(MOVE, arrays(STATE))
    assert diagnostics.problems == []
    assert result.keys() == {name.replace("params/", "model/") for name in STATE}


def test_a_targets_container_gives_the_names():
    source = arrays(STATE)
    for container in ("opt/opt_state/", "trainer/optimizer/state/"):
        names = {name: name.replace("params/", "model/").replace("opt_state/", container) for name in STATE}
        target = {names[name]: np.zeros(shape) for name, shape in STATE.items()}
        result, diagnostics = run(MOVE, source, target)
        assert diagnostics.problems == [] and result.keys() == target.keys()
        for name, value in source.items():
            np.testing.assert_array_equal(result[names[name]], value, err_msg=name)


def test_a_wrapper_takes_each_of_equal_states_to_its_place():
    states = {f"opt_state/{label}/mu/{name}": (2,) for label, name in (("a", "v"), ("b", "w"))}
    source = arrays({"params/v": (2,), "params/w": (2,), **states})
    target = {name.replace("opt_state/", "opt_state/1/"): value for name, value in source.items()}
    result, _ = run(tr.FollowOptimizer(tr.Rename([("params/absent", "params/x")], require_match=False)), source, target)
    assert result.keys() == target.keys()
    assert all(np.array_equal(result[name.replace("opt_state/", "opt_state/1/")], source[name]) for name in states)
