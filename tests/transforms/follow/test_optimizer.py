"""Optimizer state follows its parameters: against the optimizers themselves, run on both layouts of one network."""

import dataclasses
import functools
import itertools
import time

import jax
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.serialization import to_state_dict
from flax.traverse_util import ModelParamTraversal
from jax.sharding import PartitionSpec

from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.adafactor import Adafactor, FactorDim, standard_logical_factor_rules
from orbax_t5x.optim.factored_dims import dims_by_rule, dims_by_size, possible_dims
from orbax_t5x.optimizers import MultiOptimizer, OptaxWrapper
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.slots import SlotNames
from orbax_t5x.trees.flat import flatten, unflatten

pytestmark = pytest.mark.slow

HEADS = 4
# embed > joined, embed = joined (Base, large, xl, xxl), embed < joined
SIZES = {"E>J": (24, 4), "E=J": (16, 4), "E<J": (16, 8)}


MLP, VOCAB, BUCKETS = 40, 48, 8
# A leaf of each kind: (name in a layer, shape of one minimal layer, its axes, shape with heads split, its axes).
_E, _J, _HD = "embed", "joined_kv", ("heads", "kv")


def _layer_leaves(embed, head_dim):
    joined, split = HEADS * head_dim, (HEADS, head_dim)
    return {
        "attention/query/kernel": ((embed, joined), (_E, _J), (embed, *split), (_E, *_HD)),
        "attention/out/kernel": ((joined, embed), (_J, _E), (*split, embed), (*_HD, _E)),
        "mlp/wi_0/kernel": ((embed, MLP), (_E, "mlp"), (embed, MLP), (_E, "mlp")),
        "mlp/wo/kernel": ((MLP, embed), ("mlp", _E), (MLP, embed), ("mlp", _E)),
        "pre_mlp_layer_norm/scale": ((embed,), (_E,), (embed,), (_E,)),
    }


@functools.cache
def network(embed, head_dim, layout):
    """Parameters and logical axes of a T5 of two encoder layers and one decoder layer, as far as kinds differ."""
    leaves = _layer_leaves(embed, head_dim)
    bias, bias_axes = (HEADS, BUCKETS), ("heads", "relpos_buckets")
    towers = {"encoder": (2, leaves), "decoder": (1, {"self_attention/out/kernel": leaves["attention/out/kernel"]})}
    found = {"token_embedder/embedding": ((VOCAB, embed), ("vocab", _E))}
    for tower, (depth, in_layer) in towers.items():
        if layout == "minimal":
            found[f"{tower}/relpos_bias/rel_embedding"] = (bias, bias_axes)
            below = {name: leaf[:2] for name, leaf in in_layer.items()}
        else:
            below = {"relpos_bias/rel_embedding": (bias, bias_axes)} | {n: leaf[2:] for n, leaf in in_layer.items()}
        for name, (shape, axes) in below.items():
            if layout == "scanned":
                stacked = ((shape[0], depth, *shape[1:]), (axes[0], "layers", *axes[1:]))
                found[f"{tower}/{tower}/{name}"] = stacked
            else:
                found.update({f"{tower}/layers_{i}/{name}": (shape, axes) for i in range(depth)})
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in found.items()}
    return {
        "params": unflatten(params),
        "axes": unflatten({name: PartitionSpec(*axes) for name, (_, axes) in found.items()}),
    }


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), tree)


def mapped(pack, params):
    return jax.tree.map(as_numpy, pack({"target": params}, {})["target"])


def adafactor(variables, **options):
    definition = Adafactor(
        0.1, min_dim_size_to_factor=4, logical_factor_rules=standard_logical_factor_rules(), **options
    )
    definition.set_param_axes(freeze(variables["axes"]))
    return definition


def after_steps(definition, params, grads):
    """The state dict after steps, each compiled as one program."""
    optimizer = definition.create(params)
    # Unoptimized code: compiling is what takes time here.
    options = {"xla_backend_optimization_level": 0}
    step = jax.jit(lambda optimizer, grad: optimizer.apply_gradient(grad), compiler_options=options)
    for grad in grads:
        optimizer = step(optimizer, grad)
    return flatten(jax.tree.map(np.asarray, optimizer.state_dict()))


@functools.cache
def minimal_adafactor(embed, head_dim, beta1=None):
    """The minimal network's state after two steps with gradients from seeds 0 and 1."""
    minimal = network(embed, head_dim, "minimal")
    grads = [random_like(minimal["params"], seed) for seed in range(2)]
    return after_steps(adafactor(minimal, beta1=beta1), minimal["params"], grads)


def networks(embed, head_dim, layout="scanned"):
    return network(embed, head_dim, "minimal"), network(embed, head_dim, layout)


def assert_close(result, expected):
    assert sorted(result) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(as_numpy(result[name]), value, rtol=2e-5, atol=1e-7, err_msg=name)


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
    assert set(diagnostics.fidelity) == set(slots)
    approximate = {name for name, kind in diagnostics.fidelity.items() if kind == "approximate"}
    assert approximate and all("/relpos_bias/" in name for name in approximate)
    # Without a target the pack's own axes decide; and the way back is exact.
    assert_close(run(pack, source)[0], expected)
    for target in (source, {}):
        back, diagnostics = run(pack.inverse(), result, target)
        assert diagnostics.problems == []
        assert sorted(back) == sorted(source)
        assert all(np.array_equal(back[name], source[name]) for name in source)


def test_a_wrong_swap_of_a_square_kernel_passes_every_shape_check():
    """Why values are tested: rows and columns of `out` trade places with equal shapes."""
    pack = rules.t5_minimal_to_scanned(HEADS, 4)
    source = minimal_adafactor(*SIZES["E=J"])
    result, _ = run(pack, source)
    name = "state/param_states/encoder/encoder/attention/out/kernel/v_row"
    unswapped = np.stack(
        [source[f"state/param_states/encoder/layers_{i}/attention/out/kernel/v_row"] for i in range(2)]
    )
    swapped = np.stack([source[f"state/param_states/encoder/layers_{i}/attention/out/kernel/v_col"] for i in range(2)])
    assert result[name].shape == unswapped.shape and not np.allclose(result[name], unswapped)
    np.testing.assert_array_equal(result[name], swapped)


def test_below_the_heuristics_limit_the_state_is_reset_and_said_so():
    minimal, scanned = networks(*SIZES["E>J"])
    definition = Adafactor(0.1, logical_factor_rules=standard_logical_factor_rules())  # 128
    source = after_steps(definition, minimal["params"], [])
    pack = rules.t5_minimal_to_scanned(HEADS, 4)
    expected = after_steps(adafactor(scanned), mapped(pack, minimal["params"]), [])
    result, diagnostics = run(pack, source, expected)
    reset = {name for name, kind in diagnostics.fidelity.items() if kind == "reset"}
    assert reset == set(expected) - set(result)
    assert {name.rsplit("/", 1)[1] for name in reset} == {"v_row", "v_col"}
    assert (
        len(diagnostics.warnings) == 1 and "reset" in diagnostics.warnings[0] and "fallback" in diagnostics.warnings[0]
    )
    assert all(result[name].shape == expected[name].shape for name in result)
    assert diagnostics.rule_for[min(reset)].startswith("reset:")


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


# -- small trees


def state(params, slots):
    return {
        **{f"target/{name}": value for name, value in params.items()},
        **{f"state/param_states/{name}": value for name, value in slots.items()},
        "state/step": np.int32(7),
    }


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


def test_any_rule_moves_the_state_with_the_parameter():
    slots = {"0/mu/a/w": W + 1, "0/nu/a/w": W + 2, "0/mu/b/w": W + 3, "0/nu/b/w": W + 4}
    source = state({"a/w": W, "b/w": -W}, slots)
    swap = tr.FollowOptimizer(tr.AssignmentMap([("target/a/w", "target/b/w"), ("target/b/w", "target/a/w")]))
    result, _ = run(swap, source, source)
    assert np.array_equal(result["target/a/w"], -W)
    assert np.array_equal(result["state/param_states/0/mu/a/w"], W + 3)
    assert np.array_equal(result["state/param_states/0/nu/b/w"], W + 2)
    dropped, _ = run(tr.FollowOptimizer(tr.Drop("target/a/.*")), source)
    assert sorted(dropped) == ["state/param_states/0/mu/b/w", "state/param_states/0/nu/b/w", "state/step", "target/b/w"]


@pytest.mark.usefixtures("standard_dtype_promotion")
def test_new_elements_have_seen_no_gradient():
    """Against the optimizers themselves: a larger network whose new rows never get a gradient."""
    small, large = (np.random.default_rng(1).normal(size=(rows, 24)).astype(np.float32) for rows in (40, 48))
    large[:40] = small
    grads = [np.random.default_rng(step).normal(size=(40, 24)).astype(np.float32) for step in range(3)]
    wide_grads = [np.pad(grad, [(0, 8), (0, 0)]) for grad in grads]
    grow = tr.FollowOptimizer(tr.Pad("target/w", (48, None), 0.5))
    for make in (
        lambda: OptaxWrapper(optax.chain(optax.trace(0.9), optax.scale_by_adam())),
        lambda: Adafactor(0.1, min_dim_size_to_factor=8),
        lambda: Adafactor(0.1, factored=False),
    ):
        source, expected = (
            after_steps(make(), {"w": params}, [{"w": grad} for grad in chosen])
            for params, chosen in ((small, grads), (large, wide_grads))
        )
        result, diagnostics = run(grow, source, expected)
        assert diagnostics.problems == [] and diagnostics.warnings == [] and sorted(result) == sorted(expected)
        assert np.array_equal(result["target/w"], np.pad(source["target/w"], [(0, 8), (0, 0)], constant_values=0.5))
        grown = [name for name in expected if expected[name].shape[:1] == (48,) and name != "target/w"]
        assert grown and {diagnostics.fidelity[name] for name in grown} == {"exact"}
        for name in grown:
            # Adafactor adds 1e-30 to squares.
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, atol=1e-29, err_msg=name)


def test_a_mean_over_what_has_grown_is_approximate_and_a_sum_of_products_is_reset():
    slots = {"a/v_row": np.ones(200, np.float32), "a/v_col": np.ones(300, np.float32), "a/v": np.zeros(1, np.float32)}
    source = state({"a": np.ones((200, 300), np.float32)}, slots)
    result, diagnostics = run(tr.FollowOptimizer(tr.Pad("target/a", (208, None))), source)
    fidelity = {kind: diagnostics.fidelity[f"state/param_states/a/{kind}"] for kind in ("v_row", "v_col")}
    shapes = {kind: result[f"state/param_states/a/{kind}"].shape for kind in ("v_row", "v_col")}
    assert shapes == {"v_row": (208,), "v_col": (300,)} and fidelity == {"v_row": "exact", "v_col": "approximate"}
    slots = {"0/mu/k": W, "0/mu/a": W[:, :1], "0/mu/b": W[:1]}
    source = state({"k": W, "a": W[:, :1], "b": W[:1]}, slots)
    merge = tr.FollowOptimizer(tr.AddLowRank("target/k", "target/a", "target/b", 2))
    for given in (source, {name: value for name, value in source.items() if name[-4:] not in ("mu/a", "mu/b")}):
        result, diagnostics = run(merge, given)
        assert sorted(result) == ["state/step", "target/k"]
        np.testing.assert_array_equal(result["target/k"], W + 2 * W[:, :1] @ W[:1])
        assert diagnostics.fidelity == {"state/param_states/0/mu/k": "reset"} and len(diagnostics.warnings) == 1


def test_casts_are_for_parameters_alone():
    source = state({"a": W}, {"0/mu/a": W + 1})
    result, _ = run(tr.FollowOptimizer(tr.Cast("target/.*", "bfloat16")), source)
    assert result["target/a"].dtype.name == "bfloat16" and result["state/param_states/0/mu/a"].dtype == np.float32


def test_one_parameter_for_two_is_approximate():
    source = state({"a": W, "b": W}, {"0/mu/a": W + 1, "0/mu/b": W + 2})
    target = {name: 0 for name in source} | {"target/c": 0, "state/param_states/0/mu/c": 0}
    share = tr.FollowOptimizer(tr.AssignmentMap([("target/c", "target/a")]))
    result, diagnostics = run(share, source, target)
    assert np.array_equal(result["state/param_states/0/mu/c"], W + 1)
    assert diagnostics.fidelity == {
        **dict.fromkeys(("state/param_states/0/mu/a", "state/param_states/0/mu/c"), "approximate"),
        "state/param_states/0/mu/b": "exact",
    }
    repeated, diagnostics = run(tr.FollowOptimizer(tr.Repeat("target/a", 2, 0)), source)
    assert diagnostics.fidelity["state/param_states/0/mu/a"] == "approximate"
    assert diagnostics.fidelity["state/param_states/0/mu/b"] == "exact"
    assert repeated["state/param_states/0/mu/a"].shape == (2, 2, 3)


def test_a_state_that_not_all_parts_have_is_reset():
    source = state({"l0": W, "l1": W}, {"0/mu/l0": W})
    result, diagnostics = run(tr.FollowOptimizer(tr.StackLayers(r"target/l(\d)", "target/l", 0)), source)
    assert sorted(result) == ["state/step", "target/l"]
    assert diagnostics.fidelity == {"state/param_states/0/mu/l": "reset"} and "not all" in diagnostics.warnings[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adafactor(0.1, min_dim_size_to_factor=8),
        lambda: OptaxWrapper(optax.adafactor(0.1, min_dim_size_to_factor=8)),
    ],
    ids=["t5x", "optax"],
)
def test_a_leaf_that_was_reset_stays_so_in_the_next_pass(make):
    """Factored before and not after: `v` is reset by the first of two passes, under any name that it has then."""
    source = after_steps(make(), {"w": np.ones((8, 8), np.float32)}, [])
    one, two = (tr.FollowOptimizer(tr.Slice("target/w", index)) for index in (np.s_[:, :4], np.s_[:4]))
    both = tr.FollowOptimizer(tr.Slice("target/w", np.s_[:4, :4]))
    rename = tr.FollowOptimizer(tr.Rename([("target/w", "target/u")]))
    for chain, name in (([one, two], "w"), ([both, rename], "u")):
        target = after_steps(make(), {name: np.ones((4, 4), np.float32)}, [])
        result, diagnostics = run(tr.Chain(chain), source, target)
        reset = min(set(target) - set(result))
        assert diagnostics.problems == [] and len(diagnostics.warnings) == 1 and repr(reset) in diagnostics.warnings[0]
        assert diagnostics.fidelity[reset] == "reset" and diagnostics.rule_for[reset].startswith("reset: factored on")
        assert {key: value.shape for key, value in result.items()} == {
            key: value.shape for key, value in target.items() if key != reset
        }


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_a_placeholder_of_a_parameter_of_one_element_stays_one(beta1):
    """With and without momentum, `m` of a parameter of shape (1,) has the shape (1,): the target tells them apart."""
    params = {"l0": np.ones(1, np.float32), "l1": np.ones(1, np.float32), "w": W}
    stack = tr.StackLayers(r"target/l(\d)", "target/l", 1)
    reshape = tr.Chain([tr.Reshape("target/l0", ()), tr.Drop("target/l1")])
    for transform, changed in ((stack, {"l": np.ones((1, 2), np.float32)}), (reshape, {"l0": np.ones((), np.float32)})):
        definition = Adafactor(0.1, beta1=beta1)
        source = after_steps(definition, params, [])
        expected = after_steps(definition, {"w": W, **changed}, [])
        # Without a target, the placeholder of `w` tells it.
        for target in (expected, {}):
            result, diagnostics = run(tr.FollowOptimizer(transform), source, target)
            assert diagnostics.problems == [] and diagnostics.warnings == []
            assert_close(result, expected)
            assert {name: leaf.shape for name, leaf in result.items()} == {n: x.shape for n, x in expected.items()}


@pytest.mark.parametrize(
    ("second", "name", "approximate"),
    [
        (tr.Rename([("target/b", "target/c")]), "c", {"w/v_row"}),
        (tr.Transpose("target/w"), "b", {"w/v_col"}),  # rows and columns of a square matrix change places
        (tr.Cast("target/w", "bfloat16"), "b", {"w/v_row"}),
    ],
    ids=["other", "swapped", "cast"],
)
def test_two_passes_have_the_fidelity_of_one(second, name, approximate):
    """What the first pass made approximate is so after the second, as in one pass that does both."""
    definition = Adafactor(0.1, min_dim_size_to_factor=2)
    source = after_steps(definition, {"w": W.T, "b": np.ones(3, np.float32)}, [])
    target = after_steps(definition, {"w": np.ones((3, 3), np.float32), name: np.ones(3, np.float32)}, [])
    pad = tr.Pad("target/w", (None, 3))
    _, one = run(tr.FollowOptimizer(tr.Chain([pad, second])), source, target)
    _, two = run(tr.Chain([tr.FollowOptimizer(pad), tr.FollowOptimizer(second)]), source, target)
    for diagnostics in (one, two):
        slots = {slot: diagnostics.fidelity[slot] for slot in target if slot.startswith("state/param_states/")}
        assert {slot[len("state/param_states/") :] for slot, kind in slots.items() if kind != "exact"} == approximate
        assert diagnostics.warnings == [] and diagnostics.problems == []


def test_split_and_joined_rows_are_classed():
    slots = {"a/v_row": np.float32([1, 2]), "a/v_col": np.float32([1, 2, 3]), "a/v": np.zeros(1, np.float32)}
    source = state({"a": W}, slots)
    # Columns are cut: v_col is cut exactly, v_row was averaged over both parts.
    cut = tr.FollowOptimizer(tr.Split("target/a", ["target/x", "target/y"], 1, [1, 2]))
    target = {
        f"state/param_states/{p}/{k}": np.zeros(s)
        for p, n in (("x", 1), ("y", 2))
        for k, s in (("v_row", 2), ("v_col", n), ("v", 1))
    }
    result, diagnostics = run(cut, source, target | {"target/x": W[:, :1], "target/y": W[:, 1:]})
    assert diagnostics.fidelity["state/param_states/y/v_row"] == "approximate"
    assert np.array_equal(result["state/param_states/y/v_col"], [2, 3])
    assert np.array_equal(result["state/param_states/y/v_row"], [1, 2])


def test_ambiguous_shapes_are_reset_unless_axes_are_given():
    """(2, 3, 3) with v_row (2, 3): either of the last two may be averaged."""
    cube = np.zeros((2, 3, 3), np.float32)
    slots = {
        "a/v_row": np.ones((2, 3), np.float32),
        "a/v_col": np.full((2, 3), 2, np.float32),
        "a/v": np.zeros(1, np.float32),
    }
    take = tr.UnstackLayers("target/a", "target/l{i}", 0)
    target = {f"target/l{i}": np.zeros((3, 3)) for i in range(2)} | {
        f"state/param_states/l{i}/{k}": np.zeros(s) for i in range(2) for k, s in (("v_row", 3), ("v_col", 3), ("v", 1))
    }
    result, diagnostics = run(tr.FollowOptimizer(take), state({"a": cube}, slots), target)
    assert set(diagnostics.fidelity.values()) == {"reset", "exact"} and "factors=" in diagnostics.warnings[0]
    rows_first = tr.FollowOptimizer(take, factors=[("a", ("BATCH", "ROW", "COLUMN"))])
    result, diagnostics = run(rows_first, state({"a": cube}, slots), target)
    assert set(diagnostics.fidelity.values()) == {"exact"} and np.array_equal(
        result["state/param_states/l0/v_row"], [1, 1, 1]
    )
    columns_first = tr.FollowOptimizer(take, factors={"a": ("batch", "column", "row")})
    result, _ = run(columns_first, state({"a": cube}, slots), target)
    assert np.array_equal(result["state/param_states/l0/v_row"], [2, 2, 2])


def test_sources_with_names_follow_too():
    one, two = state({"a": W}, {"0/mu/a": W + 1}), state({"a": -W}, {"0/mu/a": W + 2})
    source = {f"x/{n}": v for n, v in one.items()} | {f"y/{n}": v for n, v in two.items()}
    take = tr.FollowOptimizer(tr.Rename([("y/target/(.*)", r"target/\1"), ("x/.*", None), ("y/(state/step)", r"\1")]))
    result, _ = run(take, source)
    assert sorted(result) == ["state/param_states/0/mu/a", "state/step", "target/a"]
    assert np.array_equal(result["state/param_states/0/mu/a"], W + 2)
    mean = tr.FollowOptimizer(tr.Average([1, 1], pattern="target/.*"))
    result, diagnostics = run(mean, source)
    np.testing.assert_array_equal(result["state/param_states/0/mu/a"], W + 1.5)
    assert diagnostics.fidelity["state/param_states/0/mu/a"] == "approximate"


def test_scalars_and_nones_by_hand():
    nested = {"target": {"a": 1, "b": 2}, "state": {"param_states": {"0": {"mu": {"a": 3, "b": 4}}, "a": None}}}
    result = tr.FollowOptimizer(tr.Rename([("target/a", "target/c")]))(nested, {})
    assert result == {"target": {"c": 1, "b": 2}, "state": {"param_states": {"0": {"mu": {"c": 3, "b": 4}}, "c": None}}}


# -- slots and factors


def test_slots_are_found_by_their_endings():
    names = [
        "target/w",
        "target/mu/w",
        "state/param_states/0/mu/w",
        "state/param_states/0/mu/mu/w",
        "state/param_states/0/nu/w",
        "state/param_states/0/nu/mu/w",
        "state/param_states/0/count",
        "state/param_states/w/v_row",
        "state/param_states/mu/w/v_row",
        "state/param_states/w",
        "state/step",
    ]
    found = {name: (slot.kind, slot.param) for name, slot in SlotNames().slots(names).items()}
    assert found == {
        "state/param_states/0/mu/w": ("mu", "w"),
        "state/param_states/0/mu/mu/w": ("mu", "mu/w"),
        "state/param_states/0/nu/w": ("nu", "w"),
        "state/param_states/0/nu/mu/w": ("nu", "mu/w"),
        "state/param_states/w/v_row": ("v_row", "w"),
        "state/param_states/mu/w/v_row": ("v_row", "mu/w"),
        "state/param_states/w": ("", "w"),
    }
    assert all(SlotNames().slot_name(slot) == name for name, slot in SlotNames().slots(names).items())
    assert SlotNames().slots(["params/a", "opt_state/0/mu/a", "state/x/a"]).keys() == {"opt_state/0/mu/a"}


def test_the_heuristic_is_numpy_argsort():
    for shape in itertools.product([1, 2, 3], repeat=3):
        order = np.argsort(shape, kind="stable")
        dims = dims_by_size(shape)
        assert dims is not None and dims.kept(3) == (set(range(3)) - {order[-1]}, set(range(3)) - {order[-2]})
    assert possible_dims((4, 4), (4,), (4,), None) == (dims_by_size((4, 4)),)
    assert possible_dims((5,), (1,), (1,), None) == ()
    rule = (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN)
    assert possible_dims((2, 3, 4), (2, 3), (3, 4), None) == (dims_by_rule(rule),)


def test_following_costs_little():
    """Ten thousand parameters with two momenta each, in linear time (seconds would mean it is not)."""
    params = {f"m{i}/layers_{j}/w": W for i in range(100) for j in range(100)}
    source = state(params, {f"0/{kind}/{name}": value for kind in ("mu", "nu") for name, value in params.items()})
    start = time.process_time()
    diagnostics = Diagnostics()
    stack = tr.StackLayers(r"target/(m\d+)/layers_(?P<i>\d+)/(.*)", r"target/\1/\3", 0)
    result = tr.FollowOptimizer(stack).apply(source, {}, diagnostics)
    assert len(result) == 301 and not diagnostics.problems
    assert time.process_time() - start < 10
    assert dataclasses.replace(diagnostics, problems=[]).fidelity["state/param_states/0/mu/m0/w"] == "exact"
