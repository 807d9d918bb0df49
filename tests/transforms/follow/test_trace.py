"""What a transform does to a parameter is done to the arrays that belong to it."""

import numpy as np
import optax
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.optimizers import OptaxWrapper
from orbax_t5x.testing.transform_suite import run
from tests.support.followed_networks import after_steps, state

pytestmark = pytest.mark.slow
W = np.arange(6, dtype=np.float32).reshape(2, 3)


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


def test_casts_are_for_parameters_alone():
    source = state({"a": W}, {"0/mu/a": W + 1})
    result, _ = run(tr.FollowOptimizer(tr.Cast("target/.*", "bfloat16")), source)
    assert result["target/a"].dtype.name == "bfloat16" and result["state/param_states/0/mu/a"].dtype == np.float32


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
        slots = {
            slot: diagnostics.fidelity.get(slot, "exact") for slot in target if slot.startswith("state/param_states/")
        }
        assert {slot[len("state/param_states/") :] for slot, kind in slots.items() if kind != "exact"} == approximate
        assert diagnostics.warnings == [] and diagnostics.problems == []


def test_momentum_is_approximate_where_its_factors_are():
    """Adafactor's momentum is a mean of updates, which the factors of another shape would have scaled otherwise."""
    definition = Adafactor(0.1, min_dim_size_to_factor=2, beta1=0.9)
    source, target = (after_steps(definition, {"w": np.ones(shape, np.float32)}, []) for shape in ((3, 2), (3, 3)))
    _, diagnostics = run(tr.FollowOptimizer(tr.Pad("target/w", (None, 3))), source, target)
    kinds = {kind: diagnostics.fidelity[f"state/param_states/w/{kind}"] for kind in ("m", "v_row", "v_col")}
    assert kinds == {"m": "approximate", "v_row": "approximate", "v_col": "exact"}


@pytest.mark.parametrize("transform", [tr.Cast("target/w", "bfloat16"), tr.Affine("target/w", offset=1.0)])
def test_state_of_any_shape_stays_with_the_same_elements(transform):
    """Novograd keeps a number for each parameter, SM3 the sums of each dimension."""
    source = state({"w": W}, {"0/mu/w": W + 1, "0/nu/w": np.float32(3), "1/mu/w/0": np.ones(2), "1/mu/w/1": np.ones(3)})
    result, diagnostics = run(tr.FollowOptimizer(transform), source)
    assert diagnostics.problems == [] and result.keys() == source.keys()
    assert all(np.array_equal(result[name], source[name]) for name in source if name != "target/w")
