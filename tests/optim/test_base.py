"""The base of optimizers: hyper-parameters, and a pytree."""

import jax
import optax
import optax.contrib
import pytest

from orbax_t5x import optimizers
from orbax_t5x.optimizers import OptaxWrapper, Optimizer
from tests.support.optax_cases import assert_close, small_params

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")


@pytest.mark.slow
def test_hyper_params():
    definition = optimizers.adam(0.1)
    assert definition.update_hyper_params(learning_rate=5.0).learning_rate == 5.0
    assert definition.update_hyper_params(hyper_params=None) == definition.hyper_params
    replaced = definition.hyper_params.replace(learning_rate=3.0)
    assert definition.update_hyper_params(hyper_params=replaced).learning_rate == 3.0
    optimizer = definition.create(small_params())
    assert_close(
        optimizer.apply_gradient(small_params(1), learning_rate=5.0).target,
        optimizer.apply_gradient(small_params(1)).target,
    )


def test_optimizer_is_a_flax_struct():
    definition = optimizers.adam(0.1)
    optimizer = Optimizer(definition, definition.init_state(small_params()), small_params())
    assert optimizer.replace(target=3).target == 3
    leaves = jax.tree.leaves_with_path(optimizer)
    assert {path[0].name for path, _ in leaves} == {"state", "target"}
    transformation = optax.adam(0.1)
    assert OptaxWrapper(transformation) == OptaxWrapper(transformation)
    assert OptaxWrapper(transformation) != OptaxWrapper(optax.adam(0.1))
    assert hash(OptaxWrapper(transformation)) == hash(OptaxWrapper(transformation))
