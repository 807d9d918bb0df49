"""`OrbaxT5X` as the `init_transform` of a Kauldron trainer: its initial state has the checkpoint's values.

Kauldron is no dependency: install it (`pip install kauldron`) and run `python -m benchmarks.kauldron_init`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from kauldron import kd

from orbax_t5x.integrations.kauldron import OrbaxT5X


class Classifier(nn.Module):
    """A model with Kauldron's keys: a body that is restored, and a head that is not."""

    image: kd.kontext.Key = "batch.image"

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        body = nn.Dense(8, name="body")(image.reshape(len(image), -1))
        return nn.Dense(3, name="head")(body)


def trainer(workdir: Path, init_transform: kd.ckpts.InitTransform) -> kd.train.Trainer:
    """Makes a trainer of Kauldron's own classes."""
    examples = {"image": np.ones((8, 4, 2), np.float32)}
    return kd.train.Trainer(
        seed=0,
        train_ds=kd.data.InMemoryPipeline(batch_size=8, loader=lambda: examples),
        model=Classifier(),
        optimizer=optax.adam(1e-3),
        train_losses={},
        num_train_steps=1,
        workdir=workdir,
        init_transform=init_transform,
    )


def main(directory: Path) -> None:
    """Saves parameters with another prefix, and starts a trainer from them."""
    body = {"kernel": np.arange(64.0, dtype=np.float32).reshape(8, 8), "bias": np.ones(8, np.float32)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "pretrained", {"params": {"body": body}})
    transform = OrbaxT5X(path=directory / "pretrained", fallback_for=["params/head/.*"])
    assert isinstance(transform, kd.ckpts.InitTransform)
    state = trainer(directory / "run", transform).init_state()
    plain = trainer(directory / "plain", kd.ckpts.NoopTransform()).init_state()
    jax.tree.map(np.testing.assert_array_equal, state.params["body"], body)
    jax.tree.map(np.testing.assert_array_equal, state.params["head"], plain.params["head"])
    assert jax.tree.structure(state) == jax.tree.structure(plain)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        assert found.sharding == expected.sharding and found.dtype == expected.dtype
    print("Kauldron's state begins with the checkpoint's values")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        main(Path(root))
