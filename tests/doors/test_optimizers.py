"""OptaxWrapper against T5X's state dicts and axes, and against Optax itself, step by step."""

import inspect
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_t5x import optimizers
from orbax_t5x.optimizers import OptaxStatePartitionRules, OptaxWrapper
from tests.support.optax_cases import MASK, OPTAX, assert_close, new_key, small_params, zero_schedule

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")

_AXES = {"enc": {"w": P("embed", "mlp"), "b": P("mlp")}, "dec": {"w": P("mlp", "vocab")}}
_W_MLP, _MLP, _MLP_VOCAB = P("embed", "mlp"), P("mlp"), P("mlp", "vocab")


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
    "adam_schedule": lambda: optimizers.adam(zero_schedule),
    "masked": lambda: OptaxWrapper(optax.masked(optax.adam(0.1), MASK)),
    "multisteps": lambda: OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "inject_hyperparams": lambda: OptaxWrapper(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "add_noise": lambda: OptaxWrapper(optax.add_noise(0.01, 0.55, key=new_key())),
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


@pytest.mark.slow
def test_ready_made_names_are_optaxs():
    names = "adabelief adagrad adam adamw fromage lamb lars lion noisy_sgd radam rmsprop sgd yogi"
    for name in names.split():
        wrapped = getattr(optimizers, name)
        assert wrapped.__name__ == name
        assert inspect.signature(wrapped) == inspect.signature(getattr(optax, name))
        options = {"key": new_key()} if name == "noisy_sgd" else {}
        definition = wrapped(0.1, **options)
        assert isinstance(definition, OptaxWrapper)
        state = jax.eval_shape(definition.create, small_params()).state.param_states
        expected = jax.eval_shape(getattr(optax, name)(0.1, **options).init, small_params())
        assert state == expected
    chained = jax.eval_shape(optimizers.chain([optax.clip(1.0), optax.adam(0.1)]).create, small_params())
    expected = jax.eval_shape(optax.chain(optax.clip(1.0), optax.adam(0.1)).init, small_params())
    assert chained.state.param_states == expected


# Optax's own dpsgd passes an argument on under its deprecated name.
@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
def test_dpsgd():
    assert inspect.signature(optimizers.dpsgd) == inspect.signature(optax.contrib.dpsgd)
    reference = optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)
    state = jax.eval_shape(optimizers.dpsgd(0.1, 1.0, 0.1, 0).create, small_params()).state.param_states
    assert state == jax.eval_shape(reference.init, small_params())


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


def _extra(name, step):
    return {"value": jnp.float32(1.0 / (step + 1))} if name in _WANT_VALUE else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTAX)
def test_steps_are_optaxs_and_survive_a_state_dict(name):
    transformation = OPTAX[name]()
    definition = OptaxWrapper(transformation)
    traces = []

    @jax.jit
    def both(optimizer, params, state, grads, extra):
        traces.append(1)
        updates, state = optax.with_extra_args_support(transformation).update(grads, state, params, **extra)
        optimizer = optimizer.apply_gradient(grads, learning_rate=123.0, **extra)
        return optimizer, optax.apply_updates(params, updates), state

    params = small_params()
    optimizer, state = definition.create(params), transformation.init(params)
    abstract = jax.eval_shape(definition.create, small_params())
    for step in range(3):
        optimizer, params, state = both(optimizer, params, state, small_params(step + 1), _extra(name, step))
        assert int(optimizer.state.step) == step + 1
        assert_close(optimizer.target, params)
        assert_close(optimizer.state.param_states, state)
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


@pytest.mark.parametrize("name", OPTAX)
def test_axes_fit_their_leaves(name):
    definition = OptaxWrapper(OPTAX[name]())
    abstract = jax.eval_shape(definition.create, small_params())
    shardings = _shardings(definition, abstract)
    for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        sharding.shard_shape(leaf.shape)
    # Leaves that are as large as a parameter are sharded like it.
    sizes = {(4, 8): P("a", "b"), (8, 2): P("b", None), (8,): P("b")}
    for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        if leaf.shape in sizes and name not in ("adafactor", "sm3", "contrib.galore"):
            assert sharding.spec == sizes[leaf.shape]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adam", "adafactor", "inject_hyperparams", "multi_steps", "multi_transform", "contrib.schedule_free"]
)
def test_sharded_states_step_with_one_executable_and_without_moving(name):
    definition = OptaxWrapper(OPTAX[name]())
    shardings = _shardings(definition, jax.eval_shape(definition.create, small_params()))
    optimizer = jax.jit(definition.create, out_shardings=shardings)(small_params())
    traces = []

    def step(optimizer, grads):
        traces.append(1)
        return optimizer.apply_gradient(grads)

    jitted = jax.jit(step, out_shardings=shardings)
    grads = jax.device_put(small_params(1), shardings.target)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            optimizer = jitted(optimizer, grads)
    assert len(traces) == 1
    assert jitted._cache_size() == 1
    assert not optimizer.target["enc"]["w"].sharding.is_fully_replicated


def _is_spec(node):
    return node is None or isinstance(node, P)


@pytest.mark.slow
def test_lookahead_parameters():
    definition = OptaxWrapper(optax.lookahead(optax.adam(0.1), 2, 0.5))
    params = optax.LookaheadParams.init_synced(small_params())
    optimizer = definition.create(params)
    derived = definition.derive_logical_axes(optimizer, optax.LookaheadParams(_AXES, _AXES))
    assert derived.target.slow == _AXES
    assert derived.state.param_states.fast_state[0].mu == _AXES
    stepped = optimizer.apply_gradient(small_params(1))
    reference = optax.lookahead(optax.adam(0.1), 2, 0.5)
    updates, _ = reference.update(small_params(1), reference.init(params), params)
    assert_close(stepped.target, optax.apply_updates(params, updates))
    assert "target/slow/enc/w" in _flat(stepped.state_dict())
