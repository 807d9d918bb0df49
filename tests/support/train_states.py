"""T5X's train states of the small T5, whole and abstract over eight devices."""

import jax
import numpy as np
from jax.sharding import Mesh

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from tests.support import t5_model

DEFAULT = t5_model.T5Config()


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


def factored():
    return Adafactor(0.1, min_dim_size_to_factor=8)


def training_state(config=DEFAULT):
    return FlaxOptimTrainState.create(factored(), t5_model.init(config)[1])


def inference_state(config=DEFAULT):
    return InferenceState.create(t5_model.init(config)[1])


def sharded(state):
    return ot.with_shardings(jax.eval_shape(lambda: state), mesh())
