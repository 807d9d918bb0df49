"""Slots are found by the optimizer's structure, whatever the parameters are called: beside training from scratch.

Parameters are called as the fields of optimizers are, or by digits in lists. A state is trained, restored with its
parameters renamed, and must be the state of training the renamed parameters.
"""

import jax
import numpy as np
import optax
import pytest
from flax.serialization import to_state_dict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_dtype_promotion")]

T = ot.transforms
NAMES = ["mu", "nu", "count", "trace", "v", "v_row", "v_col", "0", "1", "2", "inner_state", "w"]
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "adam and a schedule": lambda: optax.chain(
        optax.clip(1.0), optax.scale_by_adam(), optax.scale_by_schedule(lambda step: -0.1)
    ),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "two": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, lambda tree: _labels(tree)
    ),
}


def _labels(tree):
    """By the rank, so that it is the same under every name."""
    return jax.tree.map(lambda leaf: "ab"[leaf.ndim % 2], tree)


def trained(make, params):
    params = jax.tree.map(jax.numpy.asarray, params)
    tx = make()
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    return state


def flat_state(make, params):
    return flatten({"params": to_state_dict(params), "opt_state": to_state_dict(trained(make, params))})


shapes = st.sampled_from([(), (3,), (2, 3), (2, 2)])
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2).map("/".join)


@st.composite
def params_and_new_names(draw):
    paths: list[str] = []
    for path in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        if not any(f"{one}/".startswith(f"{path}/") or f"{path}/".startswith(f"{one}/") for one in paths):
            paths.append(path)
    if all(path.isdigit() for path in paths) and draw(st.booleans()):
        paths = [str(index) for index in range(len(paths))]
    params = {path: draw(shapes) for path in paths}
    return params, dict(zip(paths, draw(st.permutations(paths)), strict=True))


def arrays(shapes_by_path):
    return {
        path: np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + 1 + 10 * index
        for index, (path, shape) in enumerate(shapes_by_path.items())
    }


def check(make, params, new_names):
    old = flat_state(make, unflatten(params))
    new = {new_names[path]: value for path, value in params.items()}
    wanted = flat_state(make, unflatten(new))
    rename = T.Rename(
        [(f"params/{one}", f"params/{other}") for one, other in new_names.items() if one != other], require_match=False
    )
    for target in ({}, wanted):
        moved = flatten(T.FollowOptimizer(rename)(unflatten(old), unflatten(target)))
        assert moved.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(moved[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(drawn=params_and_new_names())
def test_renamed_parameters_have_the_state_of_training_them(optimizer, drawn):
    shapes_by_path, new_names = drawn
    check(OPTIMIZERS[optimizer], arrays(shapes_by_path), new_names)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_in_a_list_and_a_transform_of_one(optimizer):
    make = OPTIMIZERS[optimizer]
    params = [np.arange(6, dtype=np.float32).reshape(2, 3) + 1, np.ones(3, np.float32)]
    old = flat_state(make, params)
    wanted = flat_state(make, [params[0].T, params[1]])
    moved = flatten(T.FollowOptimizer(T.Transpose("params/0"))(unflatten(old), unflatten(wanted)))
    assert moved.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(moved[name], value, rtol=1e-6, err_msg=name)
    counts = [name for name in old if name.endswith("count")]
    assert all(int(old[name]) == int(moved[name]) for name in counts)
