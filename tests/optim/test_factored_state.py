"""T5X's Adafactor slots and optax.adafactor's state hold the same numbers under the names that are matched here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from orbax_t5x import optimizers
from orbax_t5x.adafactor import Adafactor, FactorDim, HParamMap
from orbax_t5x.optim.factored_state import convert_slots, match_slots
from orbax_t5x.optim.optax_state import from_state_dict, to_state_dict

_ROW, _COLUMN, _BATCH = FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH
# A matrix of each kind, ranks above 2 with the two largest dimensions factored in either order, and what is kept whole.
_SHAPES = {
    "tall": (30, 9),
    "wide": (9, 30),
    "square": (9, 9),
    "layers": (2, 9, 30),
    "turned": (30, 2, 9),
    "equal": (2, 9, 9),
    "one": (1,),
    "bias": (5,),
}
_RULES = {"layers": (_BATCH, _ROW, _COLUMN), "turned": (_ROW, _BATCH, _COLUMN), "equal": (_BATCH, _COLUMN, _ROW)}


def _values(seed):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in _SHAPES.items()}


def _t5x(beta1=None):
    rules = HParamMap([(f"^{name}$", rule) for name, rule in _RULES.items()])
    return Adafactor(0.1, min_dim_size_to_factor=9, factor_map=rules, beta1=beta1)


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def _shapes(flat):
    return dict(flat)


def _after_steps(optimizer, count=2):
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    for seed in range(1, count + 1):
        optimizer = step(optimizer, _values(seed))
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_moments_are_the_same_numbers(momentum):
    """The moments depend on the gradients alone, which are the same in both; momentum also on the scale, per matrix."""
    reference = optax.adafactor(lambda _: 0.1, min_dim_size_to_factor=9, momentum=momentum)
    definitions = _t5x(momentum), optimizers.OptaxWrapper(reference)
    # The numbers are compared where there are more of them.
    run = _after_steps if momentum else lambda optimizer: optimizer
    source, target = (_flat(run(definition.create(_values(0))).state_dict()) for definition in definitions)
    conversion = convert_slots(_shapes(source), _shapes(target), _RULES)
    assert conversion.problems == []
    states = {name for name in target if name.startswith("state/param_states")}
    assert conversion.renames.keys() == states
    per_matrix = {"layers", "turned", "equal"}
    for name in states:
        if "/ema/" in name and name.rpartition("/")[2] in per_matrix:
            continue
        value = source[conversion.renames[name]]
        np.testing.assert_allclose(value, target[name], rtol=2e-6, atol=1e-6, err_msg=name)
    assert conversion.renames["state/param_states/0/v_row/turned"] == "state/param_states/turned/v_col"
    assert conversion.renames["state/param_states/0/v_row/tall"] == "state/param_states/tall/v_row"
    placeholders = [] if momentum else [f"state/param_states/{name}/m" for name in _SHAPES]
    assert sorted(conversion.unused) == sorted(placeholders)

    # There and back again.
    back = convert_slots(_shapes(target), _shapes(source), _RULES)
    assert back.problems == []
    inverse = {origin: to for to, origin in back.renames.items()}
    assert {name: origin for name, origin in conversion.renames.items() if not name.endswith("/count")} == inverse
    assert sorted(back.placeholders) == sorted(placeholders)
    assert all(name.endswith("/count") for name in back.unused)


@pytest.mark.slow
def test_a_matrix_trained_in_t5x_goes_on_in_optax():
    params = {name: value for name, value in _values(0).items() if value.ndim < 3}
    grads = [{name: _values(seed)[name] for name in params} for seed in range(1, 5)]
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    optimizer = Adafactor(0.1, min_dim_size_to_factor=9, beta1=0.9).create(params)
    reference = optax.adafactor(0.1, min_dim_size_to_factor=9, momentum=0.9)
    for grad in grads[:2]:
        optimizer = step(optimizer, grad)
    # As a bare Optax state, outside of T5X's layout.
    source = _flat(optimizer.state_dict())
    template = to_state_dict(jax.eval_shape(reference.init, params), keep_empty=False)
    conversion = convert_slots(_shapes(source), _shapes(_flat(template)))
    assert conversion.problems == []
    filled = traverse_util.unflatten_dict({to: source[name] for to, name in conversion.renames.items()}, sep="/")
    state = from_state_dict(jax.eval_shape(reference.init, params), filled)
    values = optimizer.target
    update = jax.jit(reference.update)
    for grad in grads[2:]:
        optimizer = step(optimizer, grad)
        updates, state = update(grad, state, values)
        values = optax.apply_updates(values, updates)
        for name in params:
            np.testing.assert_allclose(values[name], optimizer.target[name], rtol=3e-6, atol=3e-6, err_msg=name)


_FACTORED = {"v_row": (9,), "v_col": (30,), "v": (1,)}
_WHOLE = {"v_row": (1,), "v_col": (1,), "v": (9, 30)}


@pytest.mark.parametrize(
    ("shape", "t5x", "optax_shapes", "rule", "message"),
    [
        ((9, 30), _WHOLE, _FACTORED, None, "T5X keeps the second moment whole"),
        ((9, 30), _FACTORED, _WHOLE, None, "cannot be recovered"),
        ((9, 30), _FACTORED, {"v_row": (8,), "v_col": (30,), "v": (1,)}, None, r"not those of shape \(9, 30\)"),
        (
            (2, 9, 9),
            {"v_row": (2, 9), "v_col": (2, 9), "v": (1,)},
            {"v_row": (2, 9), "v_col": (2, 9), "v": (1,)},
            None,
            "leave open",
        ),
        (
            (4, 9, 30),
            {"v_row": (4, 9), "v_col": (9, 30), "v": (1,)},
            {"v_row": (4, 9), "v_col": (4, 30), "v": (1,)},
            (_ROW, _BATCH, _COLUMN),
            "other dimensions than the two largest",
        ),
        (
            (9, 3, 10),
            {"v_row": (9,), "v_col": (3, 10), "v": (1,)},
            {"v_row": (9, 3), "v_col": (3, 10), "v": (1,)},
            (_ROW, _COLUMN, _COLUMN),
            "other dimensions than the two largest",
        ),
        (
            (9, 3, 10),
            {"v_row": (9,), "v_col": (3, 10), "v": (1,)},
            {"v_row": (9, 3), "v_col": (3, 10), "v": (1,)},
            None,
            "other dimensions than the two largest",
        ),
    ],
)
def test_what_is_not_the_same_is_an_error(shape, t5x, optax_shapes, rule, message):
    with pytest.raises(ValueError, match=message):
        match_slots(shape, t5x, optax_shapes, rule)


def test_shapes_tell_where_dimensions_differ():
    t5x = {"v_row": (30, 2), "v_col": (2, 9), "v": (1,)}
    assert match_slots((30, 2, 9), t5x, {"v_row": (2, 9), "v_col": (30, 2), "v": (1,)}) == {
        "v_row": "v_col",
        "v_col": "v_row",
        "v": "v",
    }


def test_slots_of_a_matrix_are_told_by_their_shapes():
    optax_shapes = {"v_row": (9,), "v_col": (30,), "v": (1,)}
    exchanged = {"v_row": (30,), "v_col": (9,), "v": (1,)}
    assert match_slots((9, 30), exchanged, optax_shapes)["v_row"] == "v_col"
    with pytest.raises(ValueError, match="other dimensions"):
        match_slots((9, 30), {"v_row": (8,), "v_col": (30,), "v": (1,)}, optax_shapes)


@pytest.mark.slow
def test_problems_name_the_leaf_and_what_to_do():
    source = _shapes(_flat(_t5x(0.9).create(_values(0)).state_dict()))
    target = _shapes(_flat(optimizers.OptaxWrapper(optax.adafactor(0.1)).create(_values(0)).state_dict()))
    problems = {problem.leaf: problem for problem in convert_slots(source, target, _RULES).problems}
    assert "keeps it whole" in str(problems["state/param_states/0/v_row/tall"])
    assert "Drop" in str(problems["state/param_states/0/v_row/tall"].fix)
    # A bias is kept whole by both, but its momentum has no place.
    assert "momentum" in str(problems["state/param_states/bias/m"])
    del source["state/param_states/bias/v"]
    problems = {problem.leaf: problem for problem in convert_slots(source, target, _RULES).problems}
    assert problems["state/param_states/bias/v"].kind == "missing"


def test_trees_without_a_factored_state_are_left_alone():
    source = _shapes(_flat(_t5x().create(_values(0)).state_dict()))
    adam = _shapes(_flat(optimizers.adam(0.1).create(_values(0)).state_dict()))
    for conversion in (convert_slots(source, adam), convert_slots(adam, source), convert_slots(source, source)):
        assert not (conversion.renames or conversion.placeholders or conversion.unused or conversion.problems)
