"""Optimizer leaves of a parameter that was made of others: moved, approximate or reset."""

import numpy as np
import optax
import pytest

from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import OptaxWrapper
from orbax_t5x.testing.transform_suite import run
from tests.support.followed_networks import (
    HEADS,
    SIZES,
    adafactor,
    after_steps,
    assert_close,
    mapped,
    minimal_adafactor,
    networks,
    state,
)

pytestmark = pytest.mark.slow


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


W = np.arange(6, dtype=np.float32).reshape(2, 3)


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
        assert diagnostics.fidelity == {"state/param_states/0/mu/k": "reset"}
        # Without a target nothing else gives it.
        assert [problem.kind for problem in diagnostics.problems] == ["optimizer"] and diagnostics.warnings == []


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
    assert (
        diagnostics.fidelity == {"state/param_states/0/mu/l": "reset"} and "not all" in diagnostics.problems[0].message
    )


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


def test_a_factor_of_one_element_is_no_placeholder():
    slots = {"a/v_row": np.ones((1, 6)), "a/v_col": np.full(1, 5.0), "a/v": np.zeros(1)}
    source = state({"a": np.ones((1, 1, 6), np.float32)}, slots)
    result, _ = run(tr.FollowOptimizer(tr.Transpose("target/a", (2, 0, 1))), source)
    np.testing.assert_array_equal(result["state/param_states/a/v"], slots["a/v"])


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
