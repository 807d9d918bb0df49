"""Kauldron's init_transform on a state with the fields of Kauldron's own, with no package of that name."""

import dataclasses
from typing import Any

import flax
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.integrations.kauldron import OrbaxT5X
from tests.support.saving import save


@flax.struct.dataclass
class State:
    """Fields of Kauldron's TrainState."""

    step: Any
    params: Any
    opt_state: Any
    collections: Any


MESH = Mesh(np.asarray(jax.devices()), ("model",))
SOURCE = {"body": {"kernel": np.arange(32.0, dtype=np.float32).reshape(8, 4)}}


def state_of(optimizer=None):
    sharding = NamedSharding(MESH, P("model"))
    params = {
        "body": {"kernel": jax.device_put(np.zeros((8, 4), np.float32), sharding)},
        "head": {"bias": jax.device_put(np.full(8, 7.0, np.float32), sharding)},
    }
    return State(0, params, None if optimizer is None else optimizer.init(params), {})


def test_parameters_come_from_the_checkpoint_in_the_states_shardings(tmp_path):
    source = save(tmp_path / "source", {"params": SOURCE, "step": 9})
    state = state_of()
    found = OrbaxT5X(path=source, fallback_for=["params/head/.*"]).transform(state)
    assert jax.tree.structure(found) == jax.tree.structure(state) and found.step == 0
    np.testing.assert_array_equal(found.params["body"]["kernel"], SOURCE["body"]["kernel"])
    np.testing.assert_array_equal(found.params["head"]["bias"], np.full(8, 7.0))
    assert found.params["body"]["kernel"].sharding == state.params["body"]["kernel"].sharding
    with pytest.raises(RestorePlanError):
        OrbaxT5X(path=source, fallback_for=[]).transform(state)


def test_the_optimizers_state_follows_when_it_is_wanted(tmp_path):
    tx = optax.adam(0.1)
    moments = jax.tree.map(lambda leaf: leaf + 1, tx.init(SOURCE))
    source = save(tmp_path / "source", {"params": SOURCE, "opt_state": moments})
    state = state_of(tx)
    transform = OrbaxT5X(path=source, fallback_for=[".*/head/.*"], optimizer=True)
    found = transform.transform_after_optimizer(state)
    np.testing.assert_array_equal(found.opt_state[0].mu["body"]["kernel"], np.ones((8, 4)))
    np.testing.assert_array_equal(found.params["body"]["kernel"], np.zeros((8, 4)))
    assert dataclasses.replace(transform, optimizer=False).transform_after_optimizer(state) is state
