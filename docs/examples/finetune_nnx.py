"""Fine-tune an NNX T5 from a TensorFlow bundle, be killed, and go on.

The state of the model and of its optimizer is split off by `nnx.split`; the bundle's names find their places in it.
A process is killed by SIGKILL after step 5. The same call in a new process resumes its newest step.
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
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.nnx import T5

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours

config = config_of(bundle)
ways = math.gcd(jax.device_count(), config.heads)  # each kernel is split over so many devices
mesh = jax.make_mesh(
    (jax.device_count() // ways, ways), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


def create():
    model = T5(config, rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)}


graph, abstract = nnx.split(nnx.eval_shape(create))
target = ot.with_shardings(abstract, mesh, [], like=ot.with_shardings(abstract["model"], mesh))


def batch(step):
    ids = np.random.default_rng(step).integers(1, 128, (8, 8), np.int32)  # follows from the step alone
    return jax.device_put(ids, jax.NamedSharding(mesh, jax.P("data")))


@jax.jit
def train_step(state, ids):
    merged = nnx.merge(graph, state)

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(ids, ids), ids).mean()

    value, grads = nnx.value_and_grad(loss)(merged["model"])
    merged["optimizer"].update(merged["model"], grads)
    return nnx.state(merged), value


def train(root, steps, die_after=None):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        save_interval_steps=2,
        enable_async_checkpointing=False,  # these steps would outrun saves in the background; yours take longer
    )
    with ocp.CheckpointManager(root, options=options, item_handlers=ot.TrainStateHandler()) as manager:
        state, step, how = ot.restore_or_initialize(
            manager,
            target,
            init_from=bundle,
            transforms="auto",
            init_fn=lambda: nnx.state(create()),
            fallback_for=["optimizer/.*"],  # it begins anew; a parameter of the model that is missing is an error
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
    return nnx.merge(graph, state)["model"], loss


if __name__ == "__main__":
    root = Path(tempfile.mkdtemp())
    child = multiprocessing.get_context("spawn").Process(target=train, args=(root, 8, 5))
    child.start()
    child.join()
    print(f"the process ended with signal {-(child.exitcode or 0)}; its steps: {ocp.utils.checkpoint_steps(root)}")
    model, loss = train(root, 8)
    print(f"loss {loss:.3f}; query kernels are {model.encoder.layers[0].attention.query.kernel.sharding.spec}")
