"""Fine-tune a linen T5 from a TensorFlow bundle, be killed, and go on.

A first start restores the parameters into a sharded Optax train state. A process is killed by SIGKILL after step 5.
The same call in a new process resumes its newest step and goes on.
"""

import importlib.resources
import math
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # without an accelerator, the CPU plays four devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours

model, optimizer = T5(config_of(bundle)), optax.adamw(1e-3)
ways = math.gcd(jax.device_count(), model.config.heads)  # each kernel is split over so many devices
mesh = jax.make_mesh(
    (jax.device_count() // ways, ways), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


def initialize():
    ids = jnp.ones((1, 8), jnp.int32)
    params = model.init(jax.random.key(0), ids, ids)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def abstract_state():
    ids = jnp.ones((1, 8), jnp.int32)
    params = ot.with_shardings(jax.eval_shape(model.init, jax.random.key(0), ids, ids), mesh)["params"]
    return ot.with_shardings(jax.eval_shape(initialize), mesh, [], like=params)  # the optimizer as its parameters


def batch(step):
    ids = np.random.default_rng(step).integers(1, 128, (8, 8), np.int32)  # follows from the step alone
    return jax.device_put(ids, jax.NamedSharding(mesh, jax.P("data")))


@jax.jit
def train_step(state, ids):
    def loss(params):
        logits = state.apply_fn({"params": params}, ids, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def train(root, steps, die_after=None):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        save_interval_steps=2,
        enable_async_checkpointing=False,  # these steps would outrun saves in the background; yours take longer
    )
    with ocp.CheckpointManager(root, options=options, item_handlers=ot.TrainStateHandler()) as manager:
        state, step, how = ot.restore_or_initialize(
            manager,
            abstract_state(),
            init_from=bundle,
            transforms="auto",
            init_fn=initialize,
            fallback_for=["opt_state/.*", "step"],  # these begin anew; a parameter that is missing is an error
            strict=False,  # the slots of the optimizer that wrote the bundle are left over
        )
        print(f"{how} at step {step}", flush=True)
        loss = np.nan
        while step < steps:
            state, loss = train_step(state, batch(step))
            step += 1
            manager.save(step, args=ot.args.TrainStateSave(state))
            if step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return state, loss


if __name__ == "__main__":
    root = Path(tempfile.mkdtemp())
    child = multiprocessing.get_context("spawn").Process(target=train, args=(root, 8, 5))
    child.start()
    child.join()
    print(f"the process ended with signal {-(child.exitcode or 0)}; its steps: {ocp.utils.checkpoint_steps(root)}")
    state, loss = train(root, 8)
    kernel = state.params["encoder"]["layers_0"]["attention"]["query"]["kernel"]
    print(f"loss {loss:.3f}; query kernels are {kernel.sharding.spec}")
