# %% [markdown]
"""Add tokens to a T5: a larger embedding and output layer, new rows initialised, old ones restored.

`Pad` with `FALLBACK` takes the rows that the checkpoint has from there, and new ones from a function of yours.
Each process reads the rows of its own shards, once.
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
# 24 new tokens, after the old ones.

# %%
old = config_of(bundle)
new = dataclasses.replace(old, vocab=old.vocab + 24)
model = T5(new)
ids = jnp.array([[17, 4, 140, 1]])


target = {"params": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]}


def initialize():  # or your model's; only the new rows are computed
    return {"params": model.init(jax.random.key(0), ids, ids)["params"]}


# %% [markdown]
# T5.1.1 has an output layer of its own, whose columns are tokens; it grows likewise. `fallback_for=[]` permits no
# leaf that comes from `initialize` as a whole.

# %%
grow = [
    ot.transforms.Translate(),
    ot.transforms.Pad(r"params/token_embedder/embedding", (new.vocab, None), ot.transforms.FALLBACK),
    ot.transforms.Pad(r"params/decoder/logits_dense/kernel", (None, new.vocab), ot.transforms.FALLBACK),
]
plan = ot.plan_restore(bundle, target, grow, fallback=initialize, fallback_for=[], strict=False)
params = plan.execute()["params"]

# %%
before = ot.restore(bundle, None, ot.transforms.Translate())["target"]["token_embedder"]["embedding"]
after = params["token_embedder"]["embedding"]
print(f"embedding {before.shape} -> {after.shape}")
print("old rows are the checkpoint's:", bool((after[: old.vocab] == before).all()))
print(f"new rows are drawn by the function: their deviation is {after[old.vocab :].std():.2f}")
print("logits with a new token:", jax.jit(model.apply)({"params": params}, ids, ids).shape)
