"""Trees and states that Orbax v1 saves and loads."""

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def placed(value, *spec):
    return jax.device_put(value, NamedSharding(mesh(), P(*spec)))


def plain_tree():
    return {
        "w": placed(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "x", "y"),
        "replicated": placed(jnp.arange(6, dtype=jnp.bfloat16)),
        "nested": [{"host": np.arange(3)}, None, (2.5, True), {}],
        "key": jax.random.key(7),
        "raw": jax.random.PRNGKey(3),
        "step": 3,
        "text": "t5",
    }


def flax_state():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    tx = optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"kernel": True, "bias": False}))
    return flax.training.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, inputs):
        return self.norm(self.first(inputs), use_running_average=True)


def nnx_state():
    return nnx.state(TwoLayers(nnx.Rngs(0)))
