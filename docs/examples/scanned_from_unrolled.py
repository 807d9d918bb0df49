"""Restore layers that were saved one by one into a model that scans over them.

The scanned T5 has one leaf for all layers of a tower, and kernels with a dimension of heads.
Both models compute the same, and nothing is read twice.
"""

import dataclasses
import importlib.resources

import jax
import jax.numpy as jnp

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours, unrolled

config = config_of(bundle)
ids = jnp.array([[17, 4, 92, 1]])
logits = {}
for scan_layers in (False, True):
    model = T5(dataclasses.replace(config, scan_layers=scan_layers))
    target = {"params": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]}
    plan = ot.plan_restore(bundle, target, "auto")
    params = plan.execute()
    print(f"scan_layers={scan_layers}: {len(plan.entries)} leaves, {plan.bytes_to_read} bytes to read")
    logits[scan_layers] = jax.jit(model.apply)(params, ids, ids)

kernel = params["params"]["encoder"]["encoder"]["attention"]["query"]["kernel"]
print(f"query kernels of the encoder, (embed, layers, heads, head_dim): {kernel.shape}")
print("same logits:", bool(jnp.allclose(logits[False], logits[True], atol=1e-4)))
