# %% [markdown]
"""Restore a Hugging Face T5 into NNX, and give it back to Transformers.

`"auto"` finds the rules from Hugging Face's names to those of an `nnx.List`, and later the way back.
What comes back is equal to what was there, name by name and value by value.
"""

# %%
import importlib.resources
import tempfile
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.nnx import T5, decode_greedily

work = Path(tempfile.mkdtemp())

# %% [markdown]
# What you have: a directory of safetensors files. Here it is made from the bundle of the package; put your own path.

# %%
bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"
hugging_face = work / "hugging_face"  # yours, or "hf://google/t5-v1_1-small"
ot.convert(
    bundle, hugging_face, [ot.rules.mesh_tf_to_t5x(), ot.rules.t5x_to_hf_t5()], format="safetensors", strict=False
)

# %% [markdown]
# The plan shows what comes from where, before anything is read.

# %%
abstract = nnx.eval_shape(lambda: T5(config_of(hugging_face), rngs=nnx.Rngs(0)))
plan = ot.plan_restore(hugging_face, abstract, "auto")
print(*plan.explain("decoder/layers/1/mlp/wo/kernel").splitlines()[:4], sep="\n")

# %%
model = plan.execute()
ids = jnp.array([[17, 4, 92, 1]])
print("decoded:", decode_greedily(model, ids, 6).tolist())

# %% [markdown]
# Back: save the state (after training, say), find the rules that lead to the names of the model at the beginning,
# and convert.

# %%
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(work / "trained", nnx.state(model))
with ot.open_checkpoint(hugging_face) as names:
    rules = ot.plan_restore(work / "trained", names.tree(), "auto").found_rules
report = ot.convert(work / "trained", work / "back", rules, format="safetensors")
print(sorted(path.name for path in (work / "back").iterdir()), report.leaves, "leaves")
print("equal to the beginning:", ot.diff(work / "back", hugging_face).equal)
