"""A fine-tuning run over a bundle, sharded over eight devices; as a program, one that is killed while it saves.

`python -m tests.support.training BUNDLE ROOT` trains every optimizer for two steps from the bundle, saves each step
into ROOT/<name> through a CheckpointManager, and kills itself without waiting for the last save.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import ModelParamTraversal
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import MultiOptimizer, adamw
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.transforms import Translate
from tests.support import t5_model

LEARNING_RATE = 0.01
STEPS_BEFORE_THE_END = 2
MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


def adafactor():
    return Adafactor(LEARNING_RATE, logical_factor_rules=standard_logical_factor_rules(), min_dim_size_to_factor=8)


def mixed():
    def on(tower):
        with warnings.catch_warnings():
            # Flax deprecates the traversals that T5X's MultiOptimizer takes; T5X users have nothing else to pass.
            warnings.simplefilter("ignore", DeprecationWarning)
            return ModelParamTraversal(lambda path, _: path.startswith(f"/{tower}/"))

    return MultiOptimizer([(on("encoder"), adafactor()), (on("decoder"), adamw(LEARNING_RATE))])


OPTIMIZERS = {"adafactor": adafactor, "adamw": partial(adamw, LEARNING_RATE), "mixed": mixed}


@cache
def fresh(name: str) -> FlaxOptimTrainState:
    """Made once: a definition is part of a state's structure, and two Optax transformations are never equal."""
    return FlaxOptimTrainState.create(OPTIMIZERS[name](), t5_model.init()[1])


def abstract(name: str) -> FlaxOptimTrainState:
    return ot.with_shardings(fresh(name), MESH)


def start(name: str, bundle: Path) -> FlaxOptimTrainState:
    """The bundle's parameters and step, and its Adafactor slots where the optimizer is Adafactor."""
    if name == "adafactor":
        return ot.restore(bundle, abstract(name), [Translate()])
    return ot.restore(bundle, abstract(name), [Translate()], fallback=fresh(name), strict=False)


@cache
def _gradients():
    return jax.jit(jax.value_and_grad(partial(t5_model.loss, t5_model.T5())))


@cache
def _update(name: str):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract(name))
    return jax.jit(lambda state, grads: state.apply_gradient(grads, LEARNING_RATE), out_shardings=shardings)


def step(name: str, state: FlaxOptimTrainState) -> tuple[FlaxOptimTrainState, float]:
    """One step on the batch of this step, and the loss before it."""
    data = jax.device_put(t5_model.batch(int(state.step)), NamedSharding(MESH, P("data")))
    loss, grads = _gradients()(state.params, *data)
    with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to the power of integer counts
        return _update(name)(state, grads), float(loss)


def manager(root: Path, name: str) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(root / name, item_handlers=ot.TrainStateHandler())


def main(bundle: Path, root: Path) -> None:
    for name in OPTIMIZERS:
        state, checkpoints = start(name, bundle), manager(root, name)
        for _ in range(STEPS_BEFORE_THE_END):
            # A save starts when the one before it is done; the last one of all is not waited for.
            state, _ = step(name, state)
            checkpoints.save(int(state.step), args=ot.args.TrainStateSave(state))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
