"""Average checkpoints ("model soup"), with weights, while they are restored.

Each source is a path of any format; here two steps of a run and the bundle it began with.
Each process averages its own shards, in float32; nothing is written in between.
"""

import importlib.resources
import tempfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"
keep = ot.transforms.Keep(["target/.*"])  # the model without its optimizer

# What you have: checkpoints of one model. Two "later" ones are made here.
root = Path(tempfile.mkdtemp())
model = ot.restore(bundle, None, [ot.transforms.Translate(), keep])
for step, change in ((1, 0.5), (2, -0.25)):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / f"{step}", jax.tree.map(lambda leaf, by=change: leaf + np.float32(by), model))

sources = {
    "first": ot.Source(bundle, [ot.transforms.Translate(), keep]),  # a source may have transforms of its own
    "one": root / "1",
    "two": root / "2",
}
weights = {"first": 2, "one": 1, "two": 1}  # divided by their sum
soup = ot.restore(sources, model, ot.transforms.Average(weights))

embedding = model["target"]["token_embedder"]["embedding"]
print(f"{len(jax.tree.leaves(soup))} leaves averaged")
shift = np.asarray(soup["target"]["token_embedder"]["embedding"]) - embedding
print(f"the embedding has moved by (2 * 0 + 0.5 - 0.25) / 4 = {shift.mean():.4f}")

report = ot.convert(sources, root / "soup", ot.transforms.Average(weights))
same = jax.tree.map(np.array_equal, ot.restore(root / "soup", None), soup)
print(f"as a checkpoint of its own: {report.leaves} leaves, equal: {all(jax.tree.leaves(same))}")
