"""MultiOptimizer: T5X's tree over Adafactor, one state per sub-optimizer over Optax, and both through a checkpoint."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util
from flax.core import FrozenDict, freeze
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_t5x import optimizers
from orbax_t5x.adafactor import Adafactor, FactorDim, HParamMap, standard_logical_factor_rules
from orbax_t5x.optimizers import MultiOptimizer, OptaxWrapper

# Flax warns when a traversal is made; T5X's users make them, and nothing else is accepted in their place.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`flax.traverse_util.Traversal` will be deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("standard_dtype_promotion"),
]

_AXES = {
    "encoder": {"kernel": P("embed", "layers", "heads"), "scale": P("embed")},
    "decoder": {"kernel": P("embed", "mlp"), "scale": P("embed")},
    "head": {"kernel": P("embed", "vocab")},
}
_RULES = HParamMap([("^encoder/kernel$", (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN))])


def _tree(seed):
    random = np.random.default_rng(seed)
    shapes = {
        "encoder": {"kernel": (8, 2, 16), "scale": (8,)},
        "decoder": {"kernel": (8, 16), "scale": (8,)},
        "head": {"kernel": (8, 4)},
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _under(part):
    return traverse_util.ModelParamTraversal(lambda path, _: path.startswith(f"/{part}/"))


def _adafactor(**options):
    return Adafactor(0.1, min_dim_size_to_factor=8, factor_map=_RULES, **options)


def _over_adafactor():
    return MultiOptimizer([(_under("encoder"), _adafactor(beta1=0.9)), (_under("decoder"), _adafactor())])


def _mixed():
    return MultiOptimizer(
        [
            (_under("encoder"), _adafactor()),
            (_under("decoder"), optimizers.adamw(0.1)),
            (_under("head"), optimizers.sgd(0.1)),
        ]
    )


def _assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), actual, expected)


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


@pytest.mark.slow
def test_over_adafactor_the_state_is_t5xs_tree():
    definition = _over_adafactor()
    assert definition.keeps_param_tree
    state = _flat(definition.create(_tree(0)).state_dict())
    assert state["state/step"].dtype == jnp.int32
    assert state["state/param_states/head/kernel"] is None
    assert state["state/param_states/encoder/kernel/m"].shape == (8, 2, 16)
    assert state["state/param_states/encoder/kernel/v_row"].shape == (8, 2)
    assert state["state/param_states/decoder/kernel/m"].shape == (1,)
    assert state.keys() == {
        *(f"target/{name}" for name in _flat(_tree(0))),
        "state/step",
        *(
            f"state/param_states/{tower}/{name}/{slot}"
            for tower in ("encoder", "decoder")
            for name in ("kernel", "scale")
            for slot in ("v_row", "v_col", "v", "m")
        ),
        "state/param_states/head/kernel",
    }


@pytest.mark.slow
def test_layout_is_that_of_a_checkpoint_which_t5x_wrote(goldens):
    leaves = json.loads((goldens / "optax" / "t5x_multi_optimizer.json").read_text())["leaves"]
    params = traverse_util.unflatten_dict(
        {
            name.removeprefix("target/"): jnp.zeros(meta["shape"])
            for name, meta in leaves.items()
            if name.startswith("target/")
        },
        sep="/",
    )
    definition = MultiOptimizer([(_under("encoder"), Adafactor(0.1))])
    state = _flat(jax.eval_shape(definition.create, params).state_dict())
    assert {name for name, value in state.items() if value is None} == {
        name for name, meta in leaves.items() if meta.get("none")
    }
    assert {name: (list(value.shape), str(value.dtype)) for name, value in state.items() if value is not None} == {
        name: (meta["shape"], meta["dtype"]) for name, meta in leaves.items() if not meta.get("none")
    }


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [dict, freeze], ids=["dict", "frozen"])
@pytest.mark.parametrize("make", [_over_adafactor, _mixed])
def test_each_part_steps_as_it_would_alone(make, wrap):
    definition = make()
    traces = []

    @jax.jit
    def step(optimizer, grads):
        traces.append(1)
        return optimizer.apply_gradient(grads, learning_rate=0.2)

    @jax.jit
    def alone(optimizers, grads):
        return {
            part: optimizer.apply_gradient(wrap({part: grads[part]}), learning_rate=0.2)
            for part, optimizer in optimizers.items()
        }

    optimizer = jax.jit(lambda params: definition.create(params))(wrap(_tree(0)))
    parts = ("encoder", "decoder", "head")[: len(definition.sub_optimizers)]
    single = {
        part: sub.create(wrap({part: _tree(0)[part]}))
        for part, sub in zip(parts, definition.sub_optimizers, strict=True)
    }
    for seed in (1, 2):
        optimizer = step(optimizer, wrap(_tree(seed)))
        single = alone(single, _tree(seed))
        assert int(optimizer.state.step) == seed
    for part in parts:
        _assert_equal(optimizer.target[part], single[part].target[part])
    if "head" not in parts:
        _assert_equal(optimizer.target["head"], wrap(_tree(0))["head"])
    states = optimizer.state.param_states
    for index, part in enumerate(parts):
        expected = single[part].state.param_states
        actual = states[str(index)] if "head" in parts else wrap({part: states[part]})
        _assert_equal(actual, expected)
    assert isinstance(optimizer.target, FrozenDict) == (wrap is freeze)
    assert len(traces) == 1


def test_over_optax_there_is_one_state_per_sub_optimizer():
    definition = _mixed()
    assert not definition.keeps_param_tree
    optimizer = definition.create(_tree(0))
    state = optimizer.state_dict()["state"]
    # Plain SGD keeps nothing, and empty dicts are not stored.
    assert set(state["param_states"]) == {"0", "1"}
    assert set(state["param_states"]["0"]) == {"encoder"}
    assert set(state["param_states"]["1"]["0"]["mu"]) == {"decoder"}
    restored = optimizer.restore_state(optimizer.state_dict())
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)


@pytest.mark.slow
def test_a_single_optax_optimizer_over_a_part_freezes_the_rest():
    definition = MultiOptimizer([(_under("head"), optimizers.adam(0.1))])
    optimizer = definition.create(_tree(0)).apply_gradient(_tree(1))
    _assert_equal(optimizer.target["encoder"], _tree(0)["encoder"])
    assert (optimizer.target["head"]["kernel"] != _tree(0)["head"]["kernel"]).all()
    # Moments are kept for the trained part alone.
    assert set(optimizer.state.param_states["0"][0].mu) == {"head"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [_over_adafactor, _mixed])
def test_saved_restored_and_continued_on_eight_devices(make, tmp_path):
    definition = make()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rules = {"embed": "a", "mlp": "b", "heads": "b"}
    abstract = jax.eval_shape(definition.create, _tree(0))
    axes = definition.derive_logical_axes(abstract, _AXES)

    def is_spec(x):
        return x is None or isinstance(x, P)

    assert _flat(axes.state_dict()).keys() == _flat(abstract.state_dict()).keys()
    shardings = jax.tree.map(
        lambda spec, leaf: None if leaf is None else NamedSharding(mesh, P(*(rules.get(axis) for axis in spec or ()))),
        axes,
        abstract,
        is_leaf=is_spec,
    )
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads), out_shardings=shardings)
    optimizer = jax.jit(definition.create, out_shardings=shardings)(_tree(0))
    grads = [jax.device_put(_tree(seed), shardings.target) for seed in (1, 2)]
    with jax.transfer_guard("disallow"):
        optimizer = step(optimizer, grads[0])
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", optimizer.state_dict())
        wanted = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
        )
        loaded = checkpointer.restore(
            tmp_path / "checkpoint",
            args=ocp.args.PyTreeRestore(
                item=wanted.state_dict(), restore_args=ocp.checkpoint_utils.construct_restore_args(wanted.state_dict())
            ),
        )
    resumed = abstract.restore_state(loaded)
    _assert_equal(resumed, optimizer)
    with jax.transfer_guard("disallow"):
        optimizer, resumed = step(optimizer, grads[1]), step(resumed, grads[1])
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, resumed, optimizer)


def test_logical_axes():
    axes = _over_adafactor()
    derived = axes.derive_logical_axes(axes.create(_tree(0)), _AXES)
    assert derived.target == _AXES
    assert derived.state.step is None
    assert derived.state.param_states["encoder"]["kernel"].m == _AXES["encoder"]["kernel"]
    assert derived.state.param_states["decoder"]["scale"].v == P("embed")
    assert derived.state.param_states["head"]["kernel"] is None
    mixed = _mixed()
    derived = mixed.derive_logical_axes(mixed.create(freeze(_tree(0))), _AXES)
    assert derived.state.param_states["1"][0].mu == freeze({"decoder": _AXES["decoder"]})
    assert derived.state.param_states["2"] == (optax.EmptyState(), optax.EmptyState())
    assert derived.state.param_states["0"]["encoder"]["scale"].v == P("embed")


def test_overlap_is_an_error():
    everything = traverse_util.ModelParamTraversal(lambda path, _: True)
    definition = MultiOptimizer([(_under("encoder"), _adafactor()), (everything, _adafactor())])
    with pytest.raises(ValueError, match="Multiple optimizers match the same leaves") as error:
        definition.create(_tree(0))
    assert str(error.value).startswith("Multiple optimizers match the same leaves : {")
    assert "encoder/scale" in str(error.value)
    assert "indices of the optimizers" in error.value.__notes__[0]
    assert "head" not in str(error.value)


@pytest.mark.slow
def test_hyper_params_are_a_list():
    definition = _mixed()
    assert type(definition.hyper_params[0]).__name__ == "AdafactorHyperParams"
    everywhere = definition.update_hyper_params(learning_rate=0.5)
    assert [entry.learning_rate for entry in everywhere] == [0.5, 0.5, 0.5]
    own = [
        entry.replace(learning_rate=rate) for entry, rate in zip(definition.hyper_params, (0.0, 1.0, 2.0), strict=True)
    ]
    assert definition.update_hyper_params(hyper_params=own) == own
    with pytest.raises(ValueError, match="3 optimizers, but 1 hyper-parameters"):
        definition.update_hyper_params(hyper_params=own[:1])
    # A rate of zero holds Adafactor's part; the rates of Optax's parts are their own.
    step = jax.jit(lambda params, grads: definition.create(params).apply_gradient(grads, hyper_params=own))
    optimizer = step(_tree(0), _tree(1))
    _assert_equal(optimizer.target["encoder"], _tree(0)["encoder"])
    assert (optimizer.target["decoder"]["kernel"] != _tree(0)["decoder"]["kernel"]).all()


def test_param_axes_reach_the_sub_optimizers_under_their_own_names():
    rules = standard_logical_factor_rules()
    definition = MultiOptimizer(
        [
            (_under("encoder"), Adafactor(0.1, min_dim_size_to_factor=8, logical_factor_rules=rules)),
            (_under("decoder"), Adafactor(0.1, min_dim_size_to_factor=8, logical_factor_rules=rules)),
            (_under("head"), optimizers.sgd(0.1)),
        ]
    )
    assert definition.needs_param_axes
    definition.set_param_axes(_AXES)
    rule = (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN)
    assert definition.hyper_params[0].factor_map["encoder/kernel"] == rule
    with pytest.raises(KeyError):
        definition.hyper_params[0].factor_map["decoder/kernel"]
    state = definition.create(_tree(0)).state.param_states
    assert state["0"]["encoder"]["kernel"].v_row.shape == (8, 2)


def test_param_axes_are_not_needed_where_no_sub_optimizer_wants_them():
    definition = MultiOptimizer([(_under("encoder"), optimizers.adam(0.1)), (_under("decoder"), optimizers.sgd(0.1))])
    assert not definition.needs_param_axes
    definition.set_param_axes(_AXES)


@pytest.mark.slow
def test_nested_multi_optimizers():
    inner = MultiOptimizer([(_under("encoder"), _adafactor()), (_under("decoder"), optimizers.adam(0.1))])
    towers = traverse_util.ModelParamTraversal(lambda path, _: not path.startswith("/head"))
    definition = MultiOptimizer([(towers, inner), (_under("head"), optimizers.sgd(0.1))])
    optimizer = jax.jit(lambda params, grads: definition.create(params).apply_gradient(grads))(_tree(0), _tree(1))
    assert "state/param_states/0/1/0/mu/decoder/kernel" in _flat(optimizer.state_dict())
    restored = optimizer.restore_state(optimizer.state_dict())
    _assert_equal(restored, optimizer)
    derived = definition.derive_logical_axes(optimizer, _AXES)
    assert derived.state.param_states["0"]["1"][0].mu == {"decoder": _AXES["decoder"]}


@pytest.mark.slow
def test_a_traversal_that_picks_nothing():
    definition = MultiOptimizer([(_under("nothing"), optimizers.adam(0.1)), (_under("head"), optimizers.adam(0.1))])
    optimizer = definition.create(_tree(0)).apply_gradient(_tree(1))
    assert set(optimizer.state_dict()["state"]["param_states"]["0"]["0"]) == {"count"}
    _assert_equal(optimizer.restore_state(optimizer.state_dict()), optimizer)


@pytest.mark.slow
def test_empty_nodes_of_the_parameters_stay():
    params = {**_tree(0), "empty": {}}
    for definition in (_over_adafactor(), _mixed()):
        optimizer = definition.create(params).apply_gradient({**_tree(1), "empty": {}})
        assert optimizer.target["empty"] == {}
        _assert_equal(optimizer.restore_state(optimizer.state_dict()), optimizer)


@pytest.mark.slow
def test_rules_by_name_see_whole_names():
    scale = HParamMap([("^decoder/", False), ("", True)])
    everything = traverse_util.ModelParamTraversal(lambda path, _: not path.startswith("/head"))
    alone = _adafactor(multiply_by_parameter_scale=scale)
    definition = MultiOptimizer([(everything, alone)])
    without_head = {key: value for key, value in _tree(0).items() if key != "head"}
    grads = {key: value for key, value in _tree(1).items() if key != "head"}
    expected = jax.jit(lambda params, grads: alone.create(params).apply_gradient(grads).target)(without_head, grads)
    actual = jax.jit(lambda params, grads: definition.create(params).apply_gradient(grads).target)(_tree(0), _tree(1))
    _assert_equal({key: actual[key] for key in without_head}, expected)


def test_an_optax_wrapper_subclass_counts_as_optax():
    class Wrapper(OptaxWrapper):
        pass

    assert not MultiOptimizer([(_under("head"), Wrapper(optax.adam(0.1)))]).keeps_param_tree
