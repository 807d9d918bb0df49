"""`RepeatLayers`: deeper, shallower and reordered models, unrolled and scanned, with their optimizers."""

import functools
import re

import flax.serialization
import flax.training.train_state
import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import assert_same, run
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import followed_networks
from tests.support import transform_oracle as oracle
from tests.support.memory_checkpoint import checkpoint
from tests.support.transform_cases import LAYERS, arrays, only_problem

PATTERN = r"(?:.*/)?layers_(?P<i>\d+)/.*"
OLD, NEW = 12, 24
HOW = ["interleave", "append", [*range(OLD), *reversed(range(OLD))]]


@st.composite
def unrolled(draw):
    """Towers of one to five layers, of which some lack leaves or are lacking, and other leaves."""
    state = {"norm": np.ones(1)}
    for tower in draw(st.lists(st.sampled_from(["enc/", "dec/", "", "opt_state/0/mu/enc/"]), unique=True)):
        for i in draw(st.sets(st.integers(0, 4), max_size=5)):
            for leaf in draw(st.sets(st.sampled_from(["w", "b/c"]), min_size=1)):
                state[f"{tower}layers_{i}/{leaf}"] = np.full(2, len(state))
    return state


@st.composite
def ways(draw):
    depth = draw(st.integers(1, 7))
    layers = st.lists(st.integers(0, 4), min_size=depth, max_size=depth)
    return depth, draw(st.sampled_from(["interleave", "append"]) | layers)


@pytest.mark.slow
@given(unrolled(), ways())
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_unrolled_layers_are_the_oracles(state, way):
    result, diagnostics = run(tr.RepeatLayers(PATTERN, *way), state)
    try:
        expected = oracle.repeat_layers(state, PATTERN, *way)
    except oracle.Wrong as wrong:
        assert str(wrong) in {problem.kind for problem in diagnostics.problems}
    else:
        assert not diagnostics.problems
        assert_same(result, expected)


@given(ways(), st.integers(1, 5), st.sampled_from([0, 1, -1, -3]))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_stacked_layers_are_numpys_take(way, old, axis):
    shape = [2, 3, 4]
    shape[axis] = old
    value = np.arange(np.prod(shape)).reshape(shape)
    result, diagnostics = run(tr.RepeatLayers("w", *way, axis=axis), {"w": value})
    try:
        expected = oracle.repeat_stacked(value, *way, axis)
    except oracle.Wrong:
        assert [problem.kind for problem in diagnostics.problems] == ["shape"]
    else:
        assert_same(result, {"w": expected})


@given(ways(), st.integers(1, 5))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_the_way_back_is_there_where_every_layer_has_a_copy(way, old):
    there = tr.RepeatLayers(PATTERN, *way)
    state = {f"layers_{i}/w": np.full(2, i) for i in range(old)}
    try:
        copies = set(there.sources(old))
        back = there.inverse(old)
    except ValueError:
        assert max(way[1]) >= old if not isinstance(way[1], str) and max(way[1]) >= old else len(copies) < old
        return
    result, _ = run(tr.Chain((there, back)), state)
    assert copies == set(range(old))
    assert_same(result, state)


def test_a_list_of_layers_has_its_way_back_without_a_depth():
    there = tr.RepeatLayers("w", 3, [2, 0, 1], axis=0)
    assert there.inverse() == tr.RepeatLayers("w", 3, [1, 2, 0], axis=0) and there.inverse().inverse() == there
    with pytest.raises(ValueError, match="needs the checkpoint's depth"):
        tr.RepeatLayers("w", 3, axis=0).inverse()
    with pytest.raises(ValueError, match="layers 1 have no copy"):
        tr.RepeatLayers("w", 2, [0, 2], axis=0).inverse()


def test_numbers_keep_their_zeros_and_a_tower_its_bias():
    state = {f"block_{i:03d}/w": np.full(1, i) for i in range(2)}
    assert list(run(tr.RepeatLayers(r"block_(\d+)/w", 4), state)[0]) == [f"block_{i:03d}/w" for i in range(4)]
    state = {"layers_0/bias": np.ones(1), "layers_0/w": np.zeros(1), "layers_1/w": np.ones(1)}
    assert sorted(run(tr.RepeatLayers(PATTERN, 3), state)[0]) == ["layers_0/bias", *(f"layers_{i}/w" for i in range(3))]


@pytest.mark.parametrize(
    "arguments",
    [
        ("layers_0/w", 2),
        (PATTERN, 0),
        (PATTERN, 1_000_000),
        (PATTERN, 2, "repeat"),
        (PATTERN, 2, [0]),
        (PATTERN, 2, [0, -1]),
        (r"(\d)(\d)", 2),
    ],
)
def test_what_cannot_be_meant_is_a_value_error(arguments):
    with pytest.raises(ValueError, match="RepeatLayers: "):
        tr.RepeatLayers(*arguments)


def test_problems_name_the_leaf():
    repeat = tr.RepeatLayers(r"(.*)/layers_(?P<i>\d+)/(.*)", 2, [0, 4])
    (problem,) = run(repeat, {name: value for name, value in LAYERS.items() if "dec" not in name})[1].problems
    assert problem.kind == "rule" and "no layer 4 among 3" in problem.message
    missing = {name: value for name, value in LAYERS.items() if "enc/layers_1" not in name}
    problem = only_problem(tr.RepeatLayers(PATTERN, 4), missing)
    assert problem.kind == "missing" and "layer 1 of 3 is missing" in problem.message
    problem = only_problem(tr.RepeatLayers("w", 4, axis=2), arrays(w=(2, 3)))
    assert problem.kind == "shape" and "no axis 2" in problem.message


# -- 12 layers to 24, with the optimizer


@functools.cache
def network(layout):
    """A network of twelve layers and its Adafactor state, with T5X's names and shapes and any values."""
    layer = {"wi/kernel": ((6, 8), ("embed", "mlp")), "scale": ((6,), ("embed",))}
    leaves = {"token_embedder/embedding": ((10, 6), ("vocab", "embed"))}
    for name, (shape, axes) in layer.items():
        if layout == "scanned":
            leaves[f"encoder/encoder/{name}"] = (shape[0], OLD, *shape[1:]), (axes[0], "layers", *axes[1:])
        else:
            leaves |= {f"encoder/layers_{i}/{name}": (shape, axes) for i in range(OLD)}
    rng = np.random.default_rng(0)
    params = unflatten({name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in leaves.items()})
    axes = unflatten({name: PartitionSpec(*axes) for name, (_, axes) in leaves.items()})
    definition = followed_networks.adafactor({"axes": axes}, beta1=0.9)
    state = flatten(jax.tree.map(np.asarray, definition.create(params).state_dict()))
    return {
        name: value if value.size == 1 else rng.standard_normal(value.shape).astype(value.dtype)
        for name, value in state.items()
    }


def deeper(state, layout, how):
    """Every layer's leaves, the optimizer's included, under the names or on the axis of the new layers."""
    if layout == "unrolled":
        return oracle.repeat_layers(state, r".*layers_(?P<i>\d+)/.*", NEW, how)
    return {
        name: oracle.repeat_stacked(value, NEW, how, value.shape.index(OLD))
        if "encoder" in name and OLD in value.shape
        else value
        for name, value in state.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW, ids=["interleave", "append", "list"])
@pytest.mark.parametrize("layout", ["unrolled", "scanned"])
def test_twelve_layers_become_24_with_adafactor(layout, how):
    state = network(layout)
    expected = deeper(state, layout, how)
    assert expected["state/param_states/encoder/layers_20/scale/v" if layout == "unrolled" else "state/step"].size
    repeat = tr.RepeatLayers(r"target/encoder/encoder/.*", NEW, how, axis=1)
    if layout == "unrolled":
        repeat = tr.RepeatLayers(r"target/encoder/layers_(\d+)/.*", NEW, how)
    target = unflatten({name: np.zeros_like(value) for name, value in expected.items()})
    plan = ot.plan_restore(checkpoint(state), target, tr.FollowOptimizer(repeat))
    assert_same(flatten(plan.execute()), expected)
    # Each layer once; of the zeros in place of slots that are not in use one is enough.
    assert 0 <= sum(value.nbytes for value in state.values()) - plan.report.bytes_read <= 4
    back = ot.restore(checkpoint(expected), unflatten(state), tr.FollowOptimizer(repeat.inverse(OLD)))
    assert_same(flatten(back), state)


def test_twelve_layers_become_24_in_a_flax_train_state_with_adam():
    def train_state(depth):
        params = {f"block_{i}": {"kernel": np.full((2, 3), i, np.float32)} for i in range(depth)}
        return flax.training.train_state.TrainState.create(apply_fn=print, params=params, tx=optax.adam(1e-3))

    new, leaves = train_state(NEW), flatten(flax.serialization.to_state_dict(train_state(OLD)))
    leaves = {name: np.full_like(value, at) for at, (name, value) in enumerate(leaves.items())}
    repeat = tr.FollowOptimizer(tr.RepeatLayers(r"params/block_(\d+)/.*", NEW))
    state = ot.restore(checkpoint(leaves), new, repeat)
    found = flatten(jax.tree.map(np.asarray, flax.serialization.to_state_dict(state)))
    for name, value in found.items():
        was = re.sub(r"block_(\d+)", lambda match: f"block_{int(match[1]) // 2}", name)
        np.testing.assert_array_equal(value, leaves[was])


def test_a_pack_after_it_sees_the_new_layers():
    """Twelve layers of one layout to 24 of another."""
    state = {f"target/encoder/layers_{i}/mlp/wo/kernel": np.full((3, 2), i, np.float32) for i in range(OLD)}
    chain = [tr.RepeatLayers(PATTERN, NEW), ot.rules.t5_unscanned_to_scanned()]
    kernel = ot.restore(checkpoint(state), None, chain)["target"]["encoder"]["encoder"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(kernel[0, :, 0], np.arange(NEW) // 2)
