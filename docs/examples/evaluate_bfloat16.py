"""Evaluate a float32 checkpoint in bfloat16, without its optimizer.

The target is the parameters alone; `dtype="bfloat16"` casts them while they are read, and nothing is held in float32.
The plan says beforehand what is read and what is left where it is.
"""

import importlib.resources

import jax
import jax.numpy as jnp

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours

model = T5(config_of(bundle))
ids = jnp.array([[17, 4, 92, 1]])
target = {"params": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]}
logits = {}
print(f"the checkpoint: {ot.plan_restore(bundle, None).bytes_to_read} bytes with the optimizer's state")
for dtype in ("float32", "bfloat16"):
    plan = ot.plan_restore(bundle, target, "auto", dtype=dtype)
    params = plan.execute()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"{dtype}: {plan.bytes_to_read} bytes read, {size} held")
    logits[dtype] = jax.jit(model.apply)(params, ids, ids)

difference = jnp.abs(logits["float32"] - logits["bfloat16"]).max() / jnp.abs(logits["float32"]).max()
print(f"logits differ by less than 2 %: {bool(difference < 0.02)}")
