# %% [markdown]
"""Begin a model of twice the depth with the layers of a trained one.

`RepeatLayers` copies each layer, next to itself or the whole stack after itself, and reads it once.
The rest of the model, embeddings and norms and relative biases, comes as it is.
"""

# %%
import dataclasses
import importlib.resources

import jax
import jax.numpy as jnp

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours

# %% [markdown]
# The deep model, as names and shapes alone.

# %%
config = config_of(bundle)
depth = 2 * config.encoder_layers
model = T5(dataclasses.replace(config, encoder_layers=depth, decoder_layers=depth))
ids = jnp.array([[17, 4, 92, 1]])
target = {"params": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]}

# %% [markdown]
# Layer i of the deep model is layer i // 2 of the checkpoint.

# %%
deepen = ot.transforms.RepeatLayers(r"params/(encoder|decoder)/layers_(?P<i>\d+)/.*", depth)
plan = ot.plan_restore(bundle, target, [ot.transforms.Translate(), deepen], strict=False)
for entry in plan.entries:
    if entry.name.startswith("params/encoder") and entry.name.endswith("wo/kernel"):
        print(entry.name, "<-", *entry.sources)

# %%
params = plan.execute()
print(f"{config.encoder_layers} -> {depth} layers; {plan.bytes_to_read} bytes are read")
print("logits:", jax.jit(model.apply)(params, ids, ids).shape)

# %% [markdown]
# `how="append"` puts the whole stack after itself; a list of layers says for each new one which it is.

# %%
append = ot.transforms.RepeatLayers(r"params/(encoder|decoder)/layers_(?P<i>\d+)/.*", depth, how="append")
other = ot.restore(bundle, target, [ot.transforms.Translate(), append], strict=False)
wo = [layers["mlp"]["wo"]["kernel"] for layers in (other["params"]["encoder"][f"layers_{i}"] for i in range(depth))]
print("append: layers 0 and 2 are equal:", bool((wo[0] == wo[2]).all()))
