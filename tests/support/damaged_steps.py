"""Steps of every writer, and a start from them."""

import warnings

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import orbax_t5x as ot


def state(step=0):
    return {"w": jnp.arange(8, dtype=jnp.float32) + step, "step": jnp.int32(step)}


TARGET = jax.eval_shape(state)


def save_single(root):
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        for step in (1, 2):
            manager.save(step, args=ot.args.TrainStateSave(state(step)))


def save_items(root):
    """Two states and one item without arrays."""
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            save = ocp.args.PyTreeSave(state(step))
            manager.save(step, args=ocp.args.Composite(state=save, ema=save, data=ocp.args.JsonSave({"a": step})))


def start(root, target=TARGET, **keywords):
    """The step, how it came about, the state, and what was said of skipped steps."""
    with warnings.catch_warnings(record=True) as caught, ocp.CheckpointManager(root) as manager:
        warnings.simplefilter("always")
        found = ot.restore_or_initialize(manager, target, init_fn=state, **keywords)
    return found.step, found.how, found.state, [str(one.message) for one in caught if "skipped" in str(one.message)]
