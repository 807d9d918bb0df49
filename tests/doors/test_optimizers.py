"""OptaxWrapper against T5X's state dicts and axes, and against Optax itself, step by step."""

import inspect
import json
import sys
import types
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import traverse_util
from flax.core import FrozenDict, freeze
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_t5x import optimizers
from orbax_t5x.optim.optax_state import from_state_dict, to_state_dict
from orbax_t5x.optimizers import OptaxStatePartitionRules, OptaxWrapper, Optimizer, OptimizerDef, OptimizerState

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")

_AXES = {"enc": {"w": P("embed", "mlp"), "b": P("mlp")}, "dec": {"w": P("mlp", "vocab")}}
_MASK = {"enc": {"w": True, "b": False}, "dec": {"w": True}}
_LABELS = {"enc": {"w": "x", "b": "y"}, "dec": {"w": "x"}}
_W_MLP, _MLP, _MLP_VOCAB = P("embed", "mlp"), P("mlp"), P("mlp", "vocab")


def _params(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"enc": {"w": (4, 8), "b": (8,)}, "dec": {"w": (8, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _zero_schedule(_):
    return 0.1


def _key():
    return jax.random.key(7)


# All of Optax that keeps a state of its own kind. Values: a factory, and keyword arguments for each update.
_OPTAX = {
    "adam": lambda: optax.adam(0.1),
    "adam_schedule": lambda: optax.adam(_zero_schedule),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.1), lambda step: step > 1),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=_zero_schedule, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(0.1), _MASK),
    "masked_by_function": lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "masked_subtree": lambda: optax.masked(optax.adam(0.1), {"enc": False, "dec": True}),
    "multi_transform": lambda: optax.multi_transform({"x": optax.adam(0.1), "y": optax.sgd(0.1, 0.9)}, _LABELS),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "named_chain": lambda: optax.named_chain(("first", optax.scale_by_adam()), ("then", optax.scale(-0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=_key()),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "rprop": lambda: optax.rprop(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "contrib.acprop": lambda: optax.contrib.acprop(0.1),
    "contrib.ademamix": lambda: optax.contrib.ademamix(0.1),
    "contrib.adopt": lambda: optax.contrib.adopt(0.1),
    "contrib.cocob": lambda: optax.contrib.cocob(0.1),
    "contrib.dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "contrib.dog": lambda: optax.contrib.dog(0.1),
    "contrib.galore": lambda: optax.contrib.galore(0.1, rank=2),
    "contrib.madgrad": lambda: optax.contrib.madgrad(0.1),
    "contrib.mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
    "contrib.momo": lambda: optax.contrib.momo(),
    "contrib.muon": lambda: optax.contrib.muon(0.1),
    "contrib.plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "contrib.prodigy": lambda: optax.contrib.prodigy(),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "contrib.split_complex": lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
}
_WANT_VALUE = {"contrib.momo", "contrib.plateau"}

# What T5X's fixtures call each optimizer.
_GOLDEN = {
    "adabelief": lambda: optimizers.adabelief(0.1),
    "adam": lambda: optimizers.adam(0.1),
    "fromage": lambda: optimizers.fromage(0.1),
    "lamb": lambda: optimizers.lamb(0.1),
    "radam": lambda: optimizers.radam(0.1),
    "sgd": lambda: optimizers.sgd(0.1),
    "sgd_momentum": lambda: optimizers.sgd(0.1, momentum=0.9),
    "rmsprop_momentum": lambda: optimizers.rmsprop(0.1, momentum=0.9),
    "adam_schedule": lambda: optimizers.adam(_zero_schedule),
    "masked": lambda: OptaxWrapper(optax.masked(optax.adam(0.1), _MASK)),
    "multisteps": lambda: OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "inject_hyperparams": lambda: OptaxWrapper(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "add_noise": lambda: OptaxWrapper(optax.add_noise(0.01, 0.55, key=_key())),
    "adafactor_optax": lambda: OptaxWrapper(optax.adafactor(0.1)),
    "nadam": lambda: OptaxWrapper(optax.nadam(0.1)),
    "amsgrad": lambda: OptaxWrapper(optax.amsgrad(0.1)),
    "lookahead": lambda: OptaxWrapper(optax.lookahead(optax.sgd(0.1), 5, 0.5)),
    "conditionally_transform": lambda: OptaxWrapper(
        optax.conditionally_transform(optax.trace(0.9), lambda step: step > 1)
    ),
}


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def _golden_params(name):
    params = {"enc": {"w": jnp.ones((4, 6)), "b": jnp.zeros(6)}, "dec": {"w": jnp.ones((6, 2))}}
    if name == "lookahead":
        return optax.LookaheadParams.init_synced(params), optax.LookaheadParams(_AXES, _AXES)
    return params, _AXES


@pytest.fixture(scope="module")
def t5x_cases(goldens):
    return json.loads((goldens / "optax" / "states_and_axes.json").read_text())


def test_every_golden_case_is_tested(t5x_cases):
    assert t5x_cases.keys() == _GOLDEN.keys()


@pytest.mark.parametrize("name", _GOLDEN)
def test_state_dicts_and_axes_are_t5xs(t5x_cases, name):
    case, definition = t5x_cases[name], _GOLDEN[name]()
    params, axes = _golden_params(name)
    optimizer = definition.create(params)
    state = {key: value for key, value in _flat(optimizer.state_dict()).items() if key.startswith("state/")}
    if "error" not in case:
        expected = {key: (tuple(shape), dtype) for key, (_, shape, dtype) in case["state"].items()}
        # T5X's first step is Python's 0.
        assert expected.pop("state/step") == ((), "int64")
        assert state["state/step"].dtype == jnp.int32
        actual = {key: (value.shape, str(value.dtype)) for key, value in state.items() if key != "state/step"}
        assert actual == expected
    restored = optimizer.restore_state(optimizer.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)
    derived = _flat(definition.derive_logical_axes(optimizer, axes).state_dict())
    assert derived.keys() == _flat(optimizer.state_dict()).keys()
    if "axes" in case:
        assert derived == {key: spec if spec is None else P(*spec) for key, spec in case["axes"].items()}
        rules = OptaxStatePartitionRules.derive_optax_logical_axes(optimizer.state.param_states, axes)
        assert rules == definition.derive_logical_axes(optimizer, axes).state.param_states
    else:
        # T5X fails here. What is shaped like a parameter has its axes, whatever is not has none.
        by_path = {"enc/w": _W_MLP, "enc/b": _MLP, "dec/w": _MLP_VOCAB}
        shapes = {"enc/w": (4, 6), "enc/b": (6,), "dec/w": (6, 2)}
        for key, value in state.items():
            owner = next((path for path in by_path if key.endswith(path)), None)
            wanted = by_path[owner] if owner and value.shape == shapes[owner] else None
            assert derived[key] == wanted, key


def test_ready_made_names_are_optaxs():
    names = "adabelief adagrad adam adamw fromage lamb lars lion noisy_sgd radam rmsprop sgd yogi"
    for name in names.split():
        wrapped = getattr(optimizers, name)
        assert wrapped.__name__ == name
        assert inspect.signature(wrapped) == inspect.signature(getattr(optax, name))
        options = {"key": _key()} if name == "noisy_sgd" else {}
        definition = wrapped(0.1, **options)
        assert isinstance(definition, OptaxWrapper)
        state = jax.eval_shape(definition.create, _params()).state.param_states
        expected = jax.eval_shape(getattr(optax, name)(0.1, **options).init, _params())
        assert state == expected
    chained = jax.eval_shape(optimizers.chain([optax.clip(1.0), optax.adam(0.1)]).create, _params())
    expected = jax.eval_shape(optax.chain(optax.clip(1.0), optax.adam(0.1)).init, _params())
    assert chained.state.param_states == expected


# Optax's own dpsgd passes an argument on under its deprecated name.
@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
def test_dpsgd():
    assert inspect.signature(optimizers.dpsgd) == inspect.signature(optax.contrib.dpsgd)
    reference = optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)
    state = jax.eval_shape(optimizers.dpsgd(0.1, 1.0, 0.1, 0).create, _params()).state.param_states
    assert state == jax.eval_shape(reference.init, _params())


def test_amos_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jestimator", None)
    assert not hasattr(optimizers, "amos")
    package, module = types.ModuleType("jestimator"), types.ModuleType("jestimator.amos")
    module.amos = lambda rate: optax.sgd(rate)
    monkeypatch.setitem(sys.modules, "jestimator", package)
    monkeypatch.setitem(sys.modules, "jestimator.amos", module)
    assert isinstance(optimizers.amos(0.1), OptaxWrapper)
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        _ = optimizers.nobody


def _assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, value), wanted in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, wanted = jax.random.key_data(value), jax.random.key_data(wanted)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def _extra(name, step):
    return {"value": jnp.float32(1.0 / (step + 1))} if name in _WANT_VALUE else {}


@pytest.mark.parametrize("name", _OPTAX)
def test_steps_are_optaxs_and_survive_a_state_dict(name):
    transformation = _OPTAX[name]()
    definition = OptaxWrapper(transformation)
    traces = []

    @jax.jit
    def both(optimizer, params, state, grads, extra):
        traces.append(1)
        updates, state = optax.with_extra_args_support(transformation).update(grads, state, params, **extra)
        optimizer = optimizer.apply_gradient(grads, learning_rate=123.0, **extra)
        return optimizer, optax.apply_updates(params, updates), state

    params = _params()
    optimizer, state = definition.create(params), transformation.init(params)
    abstract = jax.eval_shape(definition.create, _params())
    for step in range(3):
        optimizer, params, state = both(optimizer, params, state, _params(step + 1), _extra(name, step))
        assert int(optimizer.state.step) == step + 1
        _assert_close(optimizer.target, params)
        _assert_close(optimizer.state.param_states, state)
        # What is saved and restored goes on as if nothing had been.
        state_dict = optimizer.state_dict()
        _assert_plain(state_dict)
        optimizer = abstract.restore_state(state_dict)
    assert len(traces) == 1


def _assert_plain(state_dict):
    """Nested dicts keyed by text, none empty, with arrays for leaves."""
    assert type(state_dict) is dict
    for key, value in state_dict.items():
        assert isinstance(key, str)
        if isinstance(value, dict):
            assert value, key
            _assert_plain(value)
        else:
            assert value is None or isinstance(value, jax.Array), key


def _shardings(definition, abstract):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    mesh_axes = {"embed": "a", "mlp": "b"}
    axes = definition.derive_logical_axes(abstract, _AXES)
    assert jax.tree.structure(axes, is_leaf=_is_spec) == jax.tree.structure(abstract)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, P(*(mesh_axes.get(axis) for axis in spec or ()))), axes, is_leaf=_is_spec
    )


@pytest.mark.parametrize("name", _OPTAX)
def test_axes_fit_their_leaves(name):
    definition = OptaxWrapper(_OPTAX[name]())
    abstract = jax.eval_shape(definition.create, _params())
    shardings = _shardings(definition, abstract)
    for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        sharding.shard_shape(leaf.shape)
    # Leaves that are as large as a parameter are sharded like it.
    sizes = {(4, 8): P("a", "b"), (8, 2): P("b", None), (8,): P("b")}
    for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        if leaf.shape in sizes and name not in ("adafactor", "sm3", "contrib.galore"):
            assert sharding.spec == sizes[leaf.shape]


@pytest.mark.parametrize(
    "name", ["adam", "adafactor", "inject_hyperparams", "multi_steps", "multi_transform", "contrib.schedule_free"]
)
def test_sharded_states_step_with_one_executable_and_without_moving(name):
    definition = OptaxWrapper(_OPTAX[name]())
    shardings = _shardings(definition, jax.eval_shape(definition.create, _params()))
    optimizer = jax.jit(definition.create, out_shardings=shardings)(_params())
    traces = []

    def step(optimizer, grads):
        traces.append(1)
        return optimizer.apply_gradient(grads)

    jitted = jax.jit(step, out_shardings=shardings)
    grads = jax.device_put(_params(1), shardings.target)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            optimizer = jitted(optimizer, grads)
    assert len(traces) == 1
    assert jitted._cache_size() == 1
    assert not optimizer.target["enc"]["w"].sharding.is_fully_replicated


def _is_spec(node):
    return node is None or isinstance(node, P)


def _axes_of(definition, params=None, axes=None, *, by_rules=False):
    optimizer = definition.create(_params() if params is None else params)
    axes = _AXES if axes is None else axes
    if by_rules:
        return OptaxStatePartitionRules.derive_optax_logical_axes(optimizer.state.param_states, axes)
    return definition.derive_logical_axes(optimizer, axes).state.param_states


def test_axes_of_factored_moments():
    factored = _axes_of(OptaxWrapper(_OPTAX["adafactor"]()))[0]
    # v_row lacks the largest dimension, v_col the second largest.
    assert factored.v_row == {"enc": {"w": P("embed"), "b": None}, "dec": {"w": P("vocab")}}
    assert factored.v_col == {"enc": {"w": P("mlp"), "b": None}, "dec": {"w": P("mlp")}}
    assert factored.v == {"enc": {"w": None, "b": P("mlp")}, "dec": {"w": None}}
    # A square matrix looks the same both ways; a third dimension is kept by both.
    params = {"sq": jnp.ones((4, 4)), "cube": jnp.ones((4, 2, 8)), "edge": jnp.ones((2, 4, 4))}
    axes = {"sq": P("x", "y"), "cube": P("x", "y", "z"), "edge": P("x", "y", "z")}
    factored = _axes_of(OptaxWrapper(_OPTAX["adafactor"]()), params, axes)[0]
    assert factored.v_row == {"sq": P("x"), "cube": P("x", "y"), "edge": P("x", "y")}
    assert factored.v_col == {"sq": P("y"), "cube": P("y", "z"), "edge": P("x", "z")}


def test_axes_of_other_shapes():
    history = _axes_of(OptaxWrapper(optax.lbfgs(0.1, memory_size=3)))[0]
    assert history.diff_params_memory["enc"] == {"w": P(None, "embed", "mlp"), "b": P(None, "mlp")}
    assert history.weights_memory is None
    per_dimension = _axes_of(OptaxWrapper(optax.sm3(0.1)))[0]
    assert per_dimension.mu["enc"]["w"] == [P("embed"), P("mlp")]
    square = _axes_of(OptaxWrapper(optax.sm3(0.1)), {"sq": jnp.ones((4, 4))}, {"sq": P("x", "y")})[0]
    assert square.mu["sq"] == [P("x"), P("y")]
    assert _axes_of(OptaxWrapper(_OPTAX["flatten"]()))[0].mu is None
    injected = _axes_of(OptaxWrapper(_OPTAX["inject_hyperparams"]()))
    assert set(injected.hyperparams.values()) == {None}
    assert injected.inner_state[0].mu == _AXES


def test_masked_nodes_stay_masked():
    for by_rules in (False, True):
        masked = _axes_of(OptaxWrapper(_OPTAX["masked"]()), by_rules=by_rules).inner_state[0]
        assert masked.mu == {"enc": {"w": _W_MLP, "b": optax.MaskedNode()}, "dec": {"w": _MLP_VOCAB}}
        labelled = _axes_of(OptaxWrapper(_OPTAX["multi_transform"]()), by_rules=by_rules).inner_states
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
    optimizer = definition.create(freeze(_params()))
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
    derived = definition.derive_logical_axes(definition.create(_params()), _AXES)
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
        (lambda: optax.masked(_sparse(), _MASK), lambda state: state.inner_state),
        (lambda: optax.MultiSteps(optax.chain(_sparse()), 2), lambda state: state.inner_opt_state[0]),
    ],
)
def test_a_rule_for_a_state_of_ones_own_comes_before_the_general_one(monkeypatch, make, inside):
    definition = OptaxWrapper(make())
    optimizer = definition.create(_params())
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


def test_lookahead_parameters():
    definition = OptaxWrapper(optax.lookahead(optax.adam(0.1), 2, 0.5))
    params = optax.LookaheadParams.init_synced(_params())
    optimizer = definition.create(params)
    derived = definition.derive_logical_axes(optimizer, optax.LookaheadParams(_AXES, _AXES))
    assert derived.target.slow == _AXES
    assert derived.state.param_states.fast_state[0].mu == _AXES
    stepped = optimizer.apply_gradient(_params(1))
    reference = optax.lookahead(optax.adam(0.1), 2, 0.5)
    updates, _ = reference.update(_params(1), reference.init(params), params)
    _assert_close(stepped.target, optax.apply_updates(params, updates))
    assert "target/slow/enc/w" in _flat(stepped.state_dict())


def test_typed_keys_stay_in_state_dicts():
    definition = optimizers.noisy_sgd(0.1, key=_key())
    optimizer = definition.create(_params())
    state_dict = _flat(optimizer.state_dict())
    keys = [name for name, value in state_dict.items() if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)]
    assert keys == ["state/param_states/0/rng_key"]
    abstract = jax.eval_shape(definition.create, _params())
    assert abstract.state_dict()["state"]["param_states"]["0"]["rng_key"].dtype == _key().dtype
    restored = abstract.restore_state(optimizer.state_dict())
    assert restored.state.param_states[0].rng_key is state_dict[keys[0]]


def test_state_dicts_are_flaxs():
    for name in ("adam", "masked", "multi_transform", "inject_hyperparams", "adafactor", "contrib.schedule_free"):
        optimizer = OptaxWrapper(_OPTAX[name]()).create(_params())
        ours, theirs = to_state_dict(optimizer.state), flax.serialization.to_state_dict(optimizer.state)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        back = from_state_dict(optimizer.state, theirs)
        assert jax.tree.structure(back) == jax.tree.structure(optimizer.state)


def test_missing_entries_are_named():
    definition = optimizers.adam(0.1)
    optimizer = definition.create(_params())
    state_dict = optimizer.state_dict()
    assert "1" not in state_dict["state"]["param_states"]
    del state_dict["state"]["param_states"]["0"]["nu"]["enc"]["w"]
    with pytest.raises(ValueError, match=r"path param_states/0/nu/enc/w is not present in the input optimizer state"):
        optimizer.restore_state(state_dict)
    del state_dict["state"]["param_states"]
    with pytest.raises(ValueError, match=r"param_states/0/count.*param_states/0/nu/enc/w.* are not present"):
        optimizer.restore_state(state_dict)
    with pytest.raises(ValueError, match="'state' is not in the state dict"):
        optimizer.restore_state({"target": state_dict["target"]})


def test_entries_too_many_or_of_the_wrong_kind_are_named():
    optimizer = optimizers.adam(0.1).create(_params())
    state_dict = optimizer.state_dict()
    state_dict["state"]["param_states"]["0"]["trace"] = jnp.ones(3)
    with pytest.raises(ValueError, match=r"param_states/0 is a ScaleByAdamState .* has no \['trace'\]"):
        optimizer.restore_state(state_dict)
    state_dict["state"]["param_states"]["0"] = jnp.ones(3)
    with pytest.raises(ValueError, match=r"param_states/0 is a ArrayImpl, not a dict of \['count', 'mu', 'nu'\]"):
        optimizer.restore_state(state_dict)


def test_optimizers_without_state_have_only_a_step():
    optimizer = optimizers.sgd(0.1).create(_params())
    assert set(optimizer.state_dict()["state"]) == {"step"}
    assert jax.tree.structure(optimizer.restore_state(optimizer.state_dict())) == jax.tree.structure(optimizer)


def test_empty_nodes_of_the_parameters_stay():
    optimizer = optimizers.adam(0.1).create({"a": {"w": jnp.ones(3)}, "b": {}})
    assert optimizer.state_dict()["target"]["b"] == {}
    assert "b" not in optimizer.state_dict()["state"]["param_states"]["0"]["mu"]
    restored = optimizer.restore_state(optimizer.state_dict())
    assert restored.target["b"] == {}
    assert restored.state.param_states[0].mu["b"] == {}


def test_keys_without_a_unique_text_are_refused():
    with pytest.raises(ValueError, match="unique string representation"):
        to_state_dict({1: jnp.ones(2), "1": jnp.ones(2)})
    labels = {1: jnp.ones(2), 2: jnp.ones(3)}
    assert from_state_dict(labels, to_state_dict(labels)).keys() == {1, 2}


def test_hyper_params():
    definition = optimizers.adam(0.1)
    assert definition.update_hyper_params(learning_rate=5.0).learning_rate == 5.0
    assert definition.update_hyper_params(hyper_params=None) == definition.hyper_params
    replaced = definition.hyper_params.replace(learning_rate=3.0)
    assert definition.update_hyper_params(hyper_params=replaced).learning_rate == 3.0
    optimizer = definition.create(_params())
    _assert_close(
        optimizer.apply_gradient(_params(1), learning_rate=5.0).target, optimizer.apply_gradient(_params(1)).target
    )


def test_optimizer_is_a_flax_struct():
    definition = optimizers.adam(0.1)
    optimizer = Optimizer(definition, definition.init_state(_params()), _params())
    assert optimizer.replace(target=3).target == 3
    leaves = jax.tree.leaves_with_path(optimizer)
    assert {path[0].name for path, _ in leaves} == {"state", "target"}
    transformation = optax.adam(0.1)
    assert OptaxWrapper(transformation) == OptaxWrapper(transformation)
    assert OptaxWrapper(transformation) != OptaxWrapper(optax.adam(0.1))
    assert hash(OptaxWrapper(transformation)) == hash(OptaxWrapper(transformation))
