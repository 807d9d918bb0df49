"""Take the encoder of one checkpoint and the decoder of another.

Each source has transforms of its own, which keep what is wanted of it; `Overlay` puts them together.
Their formats may differ: here a TensorFlow bundle and what T5X wrote.
"""

import importlib.resources
import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

one = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"
work = Path(tempfile.mkdtemp())
tarfile.open(Path(__file__).parents[2] / "tests/goldens/t5x_native/d1_adafactor.tar.gz").extractall(work, filter="data")
other = next(work.rglob("checkpoint_*"))

model = T5(config_of(one))
ids = jnp.array([[17, 4, 92, 1]])
target = {"params": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]}
T = ot.transforms

sources = {
    "first": ot.Source(one, [T.Translate(), T.Keep([r"params/(encoder|token_embedder)/.*"])]),
    "second": ot.Source(other, [T.Rename([(r"target/(.*)", r"params/\1")]), T.Keep([r"params/decoder/.*"])]),
}
plan = ot.plan_restore(sources, target, T.Overlay(["first", "second"]))
params = plan.execute()
for name in ("encoder/encoder_norm/scale", "decoder/decoder_norm/scale"):
    print(name, "<-", *next(entry.sources for entry in plan.entries if entry.name == f"params/{name}"))
print("logits:", jax.jit(model.apply)(params, ids, ids).shape)
