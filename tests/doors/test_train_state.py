"""T5X's train states: construction, state dicts and back, axes, steps.

The judge of names, shapes and dtypes are T5X's own state dicts (`goldens/train_state`).
"""

from __future__ import annotations

import json
from functools import partial

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import ModelParamTraversal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x import train_state
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import MultiOptimizer, adamw
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState, TrainState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_model

# Flax deprecates the traversals that T5X's MultiOptimizer takes; T5X users have nothing else to pass.
pytestmark = pytest.mark.filterwarnings("ignore:.*flax.traverse_util.Traversal:DeprecationWarning")

LEARNING_RATE = 0.01


def adafactor(**options):
    return Adafactor(LEARNING_RATE, logical_factor_rules=standard_logical_factor_rules(), **options)


def where(test):
    return ModelParamTraversal(lambda path, _: test(path))


def on_encoder():
    return MultiOptimizer([(where(lambda path: path.startswith("/encoder/")), adafactor())])


def mixed():
    return MultiOptimizer(
        [
            (where(lambda path: path.startswith("/encoder/")), adafactor(min_dim_size_to_factor=8)),
            (where(lambda path: path.startswith("/decoder/")), adamw(LEARNING_RATE)),
        ]
    )


OPTIMIZERS = {
    "adafactor": adafactor,
    "factored": partial(adafactor, min_dim_size_to_factor=8, beta1=0.9),
    "adamw": partial(adamw, LEARNING_RATE),
    "on_encoder": on_encoder,
    "mixed": mixed,
}
MUTABLES = {
    "batch_stats": {
        "count": np.zeros((), np.int32),
        "encoder": {"mean": np.zeros(16, np.float32), "var": np.ones((16, 4), np.float32)},
    }
}


@pytest.fixture(scope="module")
def variables():
    return t5_model.init()[1]


def small_variables(**collections):
    """Two parameters with axes, and other collections."""
    return {
        "params": {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.arange(8.0)}},
        "params_axes": {"dense": {"kernel_axes": AxisMetadata(("embed", "mlp")), "bias_axes": AxisMetadata(("mlp",))}},
        **collections,
    }


def described(state):
    """Shape and dtype by name, as the goldens have them."""
    return {
        name: {"none": True, "empty": False} if leaf is None else {"dtype": leaf.dtype.name, "shape": list(leaf.shape)}
        for name, leaf in flatten(state.state_dict()).items()
    }


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


# Names and structure.


@pytest.mark.parametrize(
    ("golden", "make"),
    [
        ("d1_adafactor", lambda v: FlaxOptimTrainState.create(adafactor(), v)),
        ("d1_adamw", lambda v: FlaxOptimTrainState.create(adamw(LEARNING_RATE), v)),
        ("d1_multi", lambda v: FlaxOptimTrainState.create(on_encoder(), v)),
        ("d1_mutables", lambda v: FlaxOptimTrainState.create(adafactor(), {**v, **MUTABLES})),
        ("d1_inference_params_only", InferenceState.create),
    ],
)
@pytest.mark.parametrize("abstract", [False, True])
def test_state_dicts_are_t5xs(goldens, variables, golden, make, abstract):
    expected = json.loads((goldens / "train_state" / f"{golden}.json").read_text())["leaves"]
    state = jax.eval_shape(lambda: make(t5_model.init()[1])) if abstract else make(variables)
    assert described(state) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_come_back(variables, name):
    state = FlaxOptimTrainState.create(OPTIMIZERS[name](), variables)
    trained = jax.tree.map(lambda leaf: np.cos(leaf).astype(leaf.dtype), state)
    assert_equal(state.restore_state(trained.state_dict()), trained)
    assert_equal(state.restore_state(unflatten(flatten(trained.state_dict()))), trained)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_abstract_states_have_state_dicts_too(variables, name):
    state = FlaxOptimTrainState.create(OPTIMIZERS[name](), variables)
    abstract = jax.eval_shape(lambda: state)
    restored = abstract.restore_state(abstract.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(restored)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    assert_equal(abstract.restore_state(state.state_dict()), state)


def test_both_are_train_states(variables):
    assert isinstance(InferenceState.create(variables), TrainState)
    assert isinstance(FlaxOptimTrainState.create(adamw(0.1), variables), TrainState)
    assert not isinstance(variables, TrainState)


def test_constructors_take_t5xs_arguments_in_order():
    optimizer = adamw(0.1).create({"w": jnp.ones(2)})
    state = FlaxOptimTrainState(optimizer, "axes", {"m": 1}, "mutables_axes")
    assert (state.params_axes, state.flax_mutables, state.flax_mutables_axes) == ("axes", {"m": 1}, "mutables_axes")
    assert FlaxOptimTrainState(optimizer).params_axes is None
    assert FlaxOptimTrainState(optimizer).flax_mutables == {}
    assert FlaxOptimTrainState(optimizer).flax_mutables_axes is None
    inference = InferenceState(3, {"w": 1}, "axes", {"m": 1}, "mutables_axes")
    assert (inference.step, inference.params, inference.params_axes) == (3, {"w": 1}, "axes")
    assert (inference.flax_mutables, inference.flax_mutables_axes) == ({"m": 1}, "mutables_axes")


def in_container(state, container):
    """The state with its parameters in that container: an InferenceState that is restored freezes them, as T5X's."""
    if not isinstance(state, InferenceState):
        return state
    return state.replace_params(container(unfreeze(state.params)))


@pytest.mark.parametrize("container", [dict, freeze])
def test_containers_stay_what_they_are(container):
    given = container(small_variables())
    for state in (FlaxOptimTrainState.create(adamw(0.1), given), InferenceState.create(given)):
        assert type(state.params) is type(given)
        restored = state.restore_state(state.state_dict())
        if isinstance(state, InferenceState):
            assert type(restored.params) is FrozenDict
        assert jax.tree.structure(in_container(restored, container)) == jax.tree.structure(state)
        assert type(state.state_dict()["target"]) is dict


def test_params_and_param_states(variables):
    state = FlaxOptimTrainState.create(adamw(0.1), variables)
    assert state.params is state._optimizer.target
    assert state.param_states is state._optimizer.state.param_states
    assert state.step.dtype == jnp.int32


# Axes at creation.


def test_missing_axis_names_are_listed():
    given = small_variables()
    del given["params_axes"]["dense"]["bias_axes"]
    for create in (partial(FlaxOptimTrainState.create, adafactor()), InferenceState.create):
        with pytest.raises(ValueError, match=r"Missing axis names for parameters: \{'dense/bias'\}"):
            create(given)
    stats = {"batch_stats": {"mean": jnp.zeros(4)}, "batch_stats_axes": {}}
    with pytest.raises(ValueError, match=r"Missing axis names for parameters: \{'mean'\}"):
        InferenceState.create(small_variables(**stats))


def test_axes_without_their_variables_are_an_error():
    with pytest.raises(ValueError, match=r"'batch_stats_axes', but no 'batch_stats'"):
        InferenceState.create(small_variables(batch_stats_axes={}))
    with pytest.raises(ValueError, match="no collection 'params'"):
        InferenceState.create({"batch_stats": {}})


def test_variables_and_axes_apart():
    given = small_variables(**MUTABLES)
    variables, axes = train_state._split_variables_and_axes(given)
    assert isinstance(variables, FrozenDict) and isinstance(axes, FrozenDict)
    assert variables == freeze({name: given[name] for name in given if not name.endswith("_axes")})
    assert axes == freeze({"params": given["params_axes"]})
    train_state._validate_params_axes(axes["params"], given["params"])
    with pytest.raises(ValueError, match=r"Missing axis names for parameters: \{'more'\}"):
        train_state._validate_params_axes(axes["params"], {**given["params"], "more": jnp.ones(2)})


def test_only_optimizers_that_want_axes_demand_them(variables):
    without = {"params": variables["params"]}
    text = "The optimizer supports params_axes for model-based partitioning, but the model is not emitting them."
    for make in (adafactor, Adafactor, on_encoder, mixed):
        with pytest.raises(ValueError, match="params_axes") as caught:
            FlaxOptimTrainState.create(make(), without)
        assert str(caught.value) == text
        assert "param_with_axes" in caught.value.__notes__[0]
    for make in (partial(adamw, 0.1), lambda: MultiOptimizer([(where(lambda path: "encoder" in path), adamw(0.1))])):
        state = FlaxOptimTrainState.create(make(), without)
        assert state.params_axes is None
        assert_equal(state.restore_state(state.state_dict()), state)


def test_the_optimizer_learns_the_axes(variables):
    # With logical rules embed is ROW even where it is the larger dimension, which the size heuristic would not choose.
    given = {
        "params": {"kernel": jnp.ones((4, 16, 2, 8))},
        "params_axes": {"kernel_axes": AxisMetadata(("layers", "embed", "heads", "kv"))},
    }
    state = FlaxOptimTrainState.create(adafactor(), given)
    assert state.param_states["kernel"].v_row.shape == (4, 16)
    assert state.param_states["kernel"].v_col.shape == (4, 2, 8)


# Mutable variables.


def test_mutables_stand_in_the_state_dict_only_when_there_are_any():
    for create in (partial(FlaxOptimTrainState.create, adamw(0.1)), InferenceState.create):
        assert "flax_mutables" not in create(small_variables()).state_dict()
        assert "flax_mutables" not in create(small_variables(cache={})).state_dict()
        state = create(small_variables(**MUTABLES, cache={}))
        assert state.state_dict()["flax_mutables"]["batch_stats"]["encoder"]["var"].shape == (16, 4)
        changed = state.replace_flax_mutables(jax.tree.map(lambda x: x + 1, state.flax_mutables))
        restored = state.restore_state(unflatten(flatten(changed.state_dict())))
        assert_equal(in_container(restored, dict), changed)


def test_missing_mutables_are_an_error():
    for create in (partial(FlaxOptimTrainState.create, adamw(0.1)), InferenceState.create):
        state = create(small_variables(**MUTABLES))
        state_dict = create(small_variables()).state_dict()
        with pytest.raises(ValueError, match="batch_stats/count"):
            state.restore_state(state_dict)


def test_sown_tuples_have_names():
    state = InferenceState.create(small_variables(intermediates={"out": (jnp.ones(2), jnp.zeros(3))}))
    assert set(state.state_dict()["flax_mutables"]["intermediates"]["out"]) == {"0", "1"}
    assert_equal(in_container(state.restore_state(state.state_dict()), dict), state)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_dtype_promotion")
def test_apply_gradient_keeps_replaces_or_empties_mutables():
    state = FlaxOptimTrainState.create(adamw(0.1), small_variables(**MUTABLES))
    grads = jax.tree.map(jnp.ones_like, state.params)
    assert_equal(state.apply_gradient(grads, 0.1).flax_mutables, state.flax_mutables)
    new = jax.tree.map(lambda x: x + 1, MUTABLES)
    stepped = state.apply_gradient(grads, learning_rate=0.1, flax_mutables=new)
    assert_equal(stepped.flax_mutables, freeze(new))
    assert jax.tree.structure(stepped) == jax.tree.structure(state)
    assert state.apply_gradient(grads, 0.1, {}).flax_mutables == {}


# Replacing.


def test_replacing():
    for create in (partial(FlaxOptimTrainState.create, adafactor()), InferenceState.create):
        state = create(small_variables())
        assert state.replace_step(7).step == 7
        assert state.replace_step(jnp.int32(7)).state_dict()["state"]["step"] == 7
        doubled = jax.tree.map(lambda x: x * 2, state.params)
        assert_equal(state.replace_params(doubled).params, doubled)
        assert_equal(state.replace_params(doubled).replace_params(state.params), state)
        assert state.replace_flax_mutables({"a": 1}).flax_mutables == {"a": 1}
        assert state.step == 0


# Inference.


def test_an_inference_state_restores_from_a_training_state_dict(variables):
    training = FlaxOptimTrainState.create(adafactor(), variables)
    training = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, training)
    state = InferenceState.create(variables).restore_state(training.state_dict())
    assert state.step == 1
    assert_equal(state.params, freeze(training.params))
    assert flatten(state.state_dict()).keys() == {
        name for name in flatten(training.state_dict()) if not name.startswith("state/param_states/")
    }


def test_an_inference_state_without_parameters_takes_any():
    state = InferenceState(np.array(0), {}).restore_state(
        {"state": {"step": np.array(10), "param_states": {}}, "target": {"bias": np.zeros(4)}}
    )
    assert state.step == 10
    np.testing.assert_array_equal(state.params["bias"], np.zeros(4))
    assert isinstance(state.params, FrozenDict)
    assert isinstance(InferenceState(0, FrozenDict()).restore_state(state.state_dict()).params, FrozenDict)


def test_an_inference_state_names_what_it_lacks(variables):
    state = InferenceState.create(small_variables())
    with pytest.raises(ValueError, match="dense/bias"):
        state.restore_state({"target": {"dense": {"kernel": 1}}, "state": {"step": 1}})
    with pytest.raises(ValueError, match="'state/step'"):
        state.restore_state({"target": {}})
    with pytest.raises(ValueError, match="'target'"):
        state.restore_state({"state": {"step": 1}})


def test_an_inference_state_has_no_optimizer():
    state = InferenceState.create(small_variables())
    with pytest.raises(NotImplementedError, match=r"InferenceState has no optimizer states\."):
        _ = state.param_states
    with pytest.raises(NotImplementedError, match="does not support `apply_gradient`"):
        state.apply_gradient({}, 0.1)


# Logical axes.


def test_logical_axes():
    stats_axes = {"mean_axes": AxisMetadata(("embed",))}
    given = small_variables(batch_stats={"mean": jnp.zeros(4)}, batch_stats_axes=stats_axes, cache={"x": jnp.ones(1)})
    inference = InferenceState.create(given).as_logical_axes()
    assert inference.step is None
    assert inference.params["dense"]["kernel"] == P("embed", "mlp")
    assert inference.flax_mutables == {"batch_stats": {"mean": P("embed")}}
    training = FlaxOptimTrainState.create(adamw(0.1), given).as_logical_axes()
    assert training.params["dense"]["kernel"] == P("embed", "mlp")
    assert training.param_states[0].mu["dense"]["bias"] == P("mlp")
    assert training.param_states[0].count is None
    assert training.flax_mutables == {"batch_stats": {"mean": P("embed")}}


def test_logical_axes_of_adafactor():
    axes = FlaxOptimTrainState.create(adafactor(), small_variables()).as_logical_axes()
    kernel = axes.param_states["dense"]["kernel"]
    assert (kernel.v, kernel.v_row, kernel.v_col, kernel.m) == (P("embed", "mlp"), None, None, None)


def test_logical_axes_want_axes():
    for state in (FlaxOptimTrainState.create(adamw(0.1), {"params": {"w": jnp.ones(2)}}), InferenceState(0, {})):
        with pytest.raises(ValueError, match="has no params_axes"):
            state.as_logical_axes()

    class Plain:
        def create(self, params):
            return adamw(0.1).create(params).replace(optimizer_def=self)

    with pytest.raises(ValueError, match="Optimizer 'Plain' requires a `derive_logical_axes` method"):
        FlaxOptimTrainState.create(Plain(), small_variables()).as_logical_axes()


# A step on many devices.


def two_towers():
    """A model of two layers, small enough to compile in no time, whose parameters every optimizer above knows."""
    axes = {"kernel_axes": AxisMetadata(("embed", "mlp")), "bias_axes": AxisMetadata(("mlp",))}
    params = {"kernel": jnp.sin(jnp.arange(8 * 16.0)).reshape(8, 16), "bias": jnp.cos(jnp.arange(16.0))}
    return {
        "params": {"encoder": params, "decoder": jax.tree.map(jnp.copy, params)},
        "params_axes": {"encoder": axes, "decoder": axes},
    }


def two_towers_loss(params, x):
    hidden = jnp.tanh(x @ params["encoder"]["kernel"] + params["encoder"]["bias"][None])
    return jnp.mean(jnp.square((hidden + params["decoder"]["bias"][None]) @ params["decoder"]["kernel"].T - x))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("standard_dtype_promotion")
def test_a_sharded_step_compiles_once_and_stays_on_the_devices(name):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    alone = FlaxOptimTrainState.create(OPTIMIZERS[name](), two_towers())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, ot.with_shardings(alone, mesh))
    traces = []

    def step(state, x, rate):
        traces.append(1)
        loss, grads = jax.value_and_grad(two_towers_loss)(state.params, x)
        return state.apply_gradient(grads, learning_rate=rate), loss

    x, rate = jnp.tanh(jnp.arange(64.0)).reshape(8, 8), jnp.float32(LEARNING_RATE)
    expected, _ = jax.jit(step)(alone, x, rate)
    traces.clear()
    state = jax.device_put(alone, shardings)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    rate = jax.device_put(rate, NamedSharding(mesh, P()))
    step = jax.jit(step, out_shardings=(shardings, None))
    states, losses = [state], []
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state, loss = step(states[-1], x, rate)
            states.append(state)
            losses.append(loss)
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert float(losses[2]) < float(losses[0])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), states[1], expected)
    in_place = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), state, shardings
    )
    assert all(jax.tree.leaves(in_place))


def test_flax_train_states_are_other_things():
    state = flax.training.train_state.TrainState.create(apply_fn=nn.Dense(1).apply, params={}, tx=optax.sgd(0.1))
    assert not isinstance(state, TrainState)
