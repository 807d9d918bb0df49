"""A training job that goes on wherever it was ended.

`python -m tests.robustness.preempted_training SOURCE ROOT STEPS RESULT`.

A linen MLP with AdamW, its parameters from an Orbax checkpoint through a rename that must not be applied twice, the
rest from scratch; the batch of a step follows from the step. Saves each step and does not wait for it. With
`KILL_AFTER_SECS` in the environment the kernel kills the process that long after the imports.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot

KILL_AFTER = "KILL_AFTER_SECS"
_WIDTH = 64
_OPTIMIZER = optax.adamw(1e-2)
# Swaps the two layers: applied twice it would be undone.
_SWAP = ot.transforms.Rename([(r"params/a/(.*)", r"params/b/\1"), (r"params/b/(.*)", r"params/a/\1")])


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(_WIDTH, name="b")(nn.tanh(nn.Dense(_WIDTH, name="a")(x)))


def init():
    params = Model().init(jax.random.key(0), jnp.zeros((1, _WIDTH)))["params"]
    return {"params": params, "optimizer": _OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def parameters():
    """What a run begins with: other values than those of `init`."""
    return {"params": Model().init(jax.random.key(1), jnp.zeros((1, _WIDTH)))["params"]}


@jax.jit
def train_step(state, x):
    def loss(params):
        return jnp.mean(jnp.square(Model().apply({"params": params}, x) - x[:, ::-1]))

    updates, optimizer = _OPTIMIZER.update(jax.grad(loss)(state["params"]), state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer, "step": state["step"] + 1}


def batch(step):
    return np.random.default_rng(step).standard_normal((8, _WIDTH), np.float32)


def train(source: Path, root: Path, steps: int):
    everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("x",)), PartitionSpec())
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), jax.eval_shape(init)
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(root, options=options, item_handlers=ot.TrainStateHandler()) as manager:
        state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=_SWAP, init_fn=init)
        print(how, step, flush=True)
        while step < steps:
            state = train_step(state, batch(step))
            step += 1
            manager.save(step, args=ot.args.TrainStateSave(state))
    return state


def main(source: str, root: str, steps: str, result: str) -> None:
    if KILL_AFTER in os.environ:
        signal.setitimer(signal.ITIMER_REAL, float(os.environ[KILL_AFTER]))  # nobody handles its signal
    state = train(Path(source), Path(root), int(steps))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    np.savez(result, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


if __name__ == "__main__":
    main(*sys.argv[1:])
