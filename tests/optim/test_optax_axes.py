"""Logical axes of optimizer states, from those of the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import PartitionSpec as P

from orbax_t5x import optimizers
from orbax_t5x.optimizers import OptaxStatePartitionRules, OptaxWrapper, OptimizerDef, OptimizerState
from tests.support.optax_cases import MASK, OPTAX, small_params

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
_AXES = {"enc": {"w": P("embed", "mlp"), "b": P("mlp")}, "dec": {"w": P("mlp", "vocab")}}
_W_MLP, _MLP, _MLP_VOCAB = P("embed", "mlp"), P("mlp"), P("mlp", "vocab")


def _axes_of(definition, params=None, axes=None, *, by_rules=False):
    optimizer = definition.create(small_params() if params is None else params)
    axes = _AXES if axes is None else axes
    if by_rules:
        return OptaxStatePartitionRules.derive_optax_logical_axes(optimizer.state.param_states, axes)
    return definition.derive_logical_axes(optimizer, axes).state.param_states


@pytest.mark.slow
def test_axes_of_factored_moments():
    factored = _axes_of(OptaxWrapper(OPTAX["adafactor"]()))[0]
    # v_row lacks the largest dimension, v_col the second largest.
    assert factored.v_row == {"enc": {"w": P("embed"), "b": None}, "dec": {"w": P("vocab")}}
    assert factored.v_col == {"enc": {"w": P("mlp"), "b": None}, "dec": {"w": P("mlp")}}
    assert factored.v == {"enc": {"w": None, "b": P("mlp")}, "dec": {"w": None}}
    # A square matrix looks the same both ways; a third dimension is kept by both.
    params = {"sq": jnp.ones((4, 4)), "cube": jnp.ones((4, 2, 8)), "edge": jnp.ones((2, 4, 4))}
    axes = {"sq": P("x", "y"), "cube": P("x", "y", "z"), "edge": P("x", "y", "z")}
    factored = _axes_of(OptaxWrapper(OPTAX["adafactor"]()), params, axes)[0]
    assert factored.v_row == {"sq": P("x"), "cube": P("x", "y"), "edge": P("x", "y")}
    assert factored.v_col == {"sq": P("y"), "cube": P("y", "z"), "edge": P("x", "z")}


@pytest.mark.slow
def test_axes_of_other_shapes():
    history = _axes_of(OptaxWrapper(optax.lbfgs(0.1, memory_size=3)))[0]
    assert history.diff_params_memory["enc"] == {"w": P(None, "embed", "mlp"), "b": P(None, "mlp")}
    assert history.weights_memory is None
    per_dimension = _axes_of(OptaxWrapper(optax.sm3(0.1)))[0]
    assert per_dimension.mu["enc"]["w"] == [P("embed"), P("mlp")]
    square = _axes_of(OptaxWrapper(optax.sm3(0.1)), {"sq": jnp.ones((4, 4))}, {"sq": P("x", "y")})[0]
    assert square.mu["sq"] == [P("x"), P("y")]
    assert _axes_of(OptaxWrapper(OPTAX["flatten"]()))[0].mu is None
    injected = _axes_of(OptaxWrapper(OPTAX["inject_hyperparams"]()))
    assert set(injected.hyperparams.values()) == {None}
    assert injected.inner_state[0].mu == _AXES


def test_masked_nodes_stay_masked():
    for by_rules in (False, True):
        masked = _axes_of(OptaxWrapper(OPTAX["masked"]()), by_rules=by_rules).inner_state[0]
        assert masked.mu == {"enc": {"w": _W_MLP, "b": optax.MaskedNode()}, "dec": {"w": _MLP_VOCAB}}
        labelled = _axes_of(OptaxWrapper(OPTAX["multi_transform"]()), by_rules=by_rules).inner_states
        assert labelled["x"].inner_state[0].nu["dec"] == {"w": _MLP_VOCAB}
        trace = labelled["y"].inner_state[0].trace
        assert trace == {"enc": {"w": optax.MaskedNode(), "b": _MLP}, "dec": {"w": optax.MaskedNode()}}
    params = {"enc": {"w": jnp.ones(3), "b": optax.MaskedNode()}, "dec": optax.MaskedNode()}
    derived = OptaxStatePartitionRules.derive_params_axes(params, _AXES)
    assert derived == {"enc": {"w": None, "b": optax.MaskedNode()}, "dec": optax.MaskedNode()}
    params["enc"]["w"] = jnp.ones((3, 4))
    assert OptaxStatePartitionRules.derive_params_axes(params, _AXES)["enc"]["w"] == _W_MLP


@pytest.mark.parametrize("by_rules", [False, True])
def test_parameters_in_sequences_are_not_taken_for_chains(by_rules):
    params, axes = (jnp.ones((4, 8)), jnp.ones(8)), (_W_MLP, _MLP)
    assert _axes_of(optimizers.adam(0.1), params, axes, by_rules=by_rules) == (
        optax.ScaleByAdamState(count=None, mu=axes, nu=axes),
        optax.EmptyState(),
    )


def test_a_single_array_of_parameters():
    definition = optimizers.adam(0.1)
    optimizer = definition.create(jnp.ones((4, 8)))
    derived = definition.derive_logical_axes(optimizer, _W_MLP)
    expected = (optax.ScaleByAdamState(count=None, mu=_W_MLP, nu=_W_MLP), optax.EmptyState())
    assert derived.state.param_states == expected
    assert derived.target == _W_MLP
    state = optimizer.state.param_states
    rules = OptaxStatePartitionRules.derive_optax_logical_axes
    assert rules(state, _W_MLP, jnp.ones((4, 8))) == expected
    # With no structure and no shape there is nothing to tell a moment by.
    assert rules(state, _W_MLP)[0].mu is None


def test_parameters_without_leaves():
    definition = optimizers.adam(0.1)
    derived = definition.derive_logical_axes(definition.create({}), {})
    assert derived.state.param_states[0] == optax.ScaleByAdamState(count=None, mu={}, nu={})
    rules = OptaxStatePartitionRules.derive_optax_logical_axes
    assert rules(definition.create({}).state.param_states, {}) == derived.state.param_states


def test_axes_for_frozen_parameters_and_plain_axes():
    definition = optimizers.adam(0.1)
    optimizer = definition.create(freeze(small_params()))
    derived = definition.derive_logical_axes(optimizer, _AXES)
    assert isinstance(derived.target, FrozenDict)
    assert derived.target == freeze(_AXES)
    assert derived.state.param_states[0].mu == freeze(_AXES)
    with pytest.raises(ValueError, match=r"No logical axes for parameters: \['enc/b'\]"):
        definition.derive_logical_axes(optimizer, {"enc": {"w": _W_MLP}, "dec": _AXES["dec"]})


def test_a_definition_of_ones_own_gets_axes_too():
    class Sign(OptimizerDef):
        def init_state(self, params):
            return OptimizerState(step=jnp.int32(0), param_states=jax.tree.map(jnp.zeros_like, params))

    definition = Sign(hyper_params=None)
    derived = definition.derive_logical_axes(definition.create(small_params()), _AXES)
    assert derived.target == _AXES
    assert derived.state.param_states == _AXES
    assert not definition.needs_param_axes


class SparseState(NamedTuple):
    """A state of a user's own: rows that were touched, and moments of which only those count."""

    touched: Any
    moments: Any


def _sparse():
    def init(params):
        return SparseState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    ("make", "inside"),
    [
        (_sparse, lambda state: state),
        (lambda: optax.chain(optax.scale_by_adam(), _sparse()), lambda state: state[1]),
        (lambda: optax.masked(_sparse(), MASK), lambda state: state.inner_state),
        (lambda: optax.MultiSteps(optax.chain(_sparse()), 2), lambda state: state.inner_opt_state[0]),
    ],
)
def test_a_rule_for_a_state_of_ones_own_comes_before_the_general_one(monkeypatch, make, inside):
    definition = OptaxWrapper(make())
    optimizer = definition.create(small_params())
    state = optimizer.state.param_states
    by_general_rule = definition.derive_logical_axes(optimizer, _AXES).state.param_states
    assert inside(by_general_rule).touched["enc"]["w"] == _W_MLP
    given = []

    def rule(state, params_axes):
        given.append((state, params_axes))
        return SparseState(None, OptaxStatePartitionRules.derive_params_axes(state.moments, params_axes))

    monkeypatch.setitem(OptaxStatePartitionRules._RULES, SparseState, rule)
    for found in (
        definition.derive_logical_axes(optimizer, _AXES).state.param_states,
        OptaxStatePartitionRules.derive_optax_logical_axes(state, _AXES),
    ):
        assert inside(found).touched is None
        assert inside(found).moments == inside(by_general_rule).moments
        if isinstance(found, tuple) and isinstance(found[0], optax.ScaleByAdamState):
            assert found[0] == by_general_rule[0]
    assert len(given) == 2
    assert all(seen is inside(state) and axes == _AXES for seen, axes in given)


def test_what_looks_like_an_optax_state():
    is_state = OptaxStatePartitionRules._is_optax_state
    assert is_state(SparseState(1, 2)) and is_state(optax.EmptyState())
    assert not any(map(is_state, [(1, 2), optax.LookaheadParams(1, 2), {"State": 1}, jnp.zeros(2)]))
