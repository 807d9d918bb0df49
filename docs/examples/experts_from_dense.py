"""Begin a mixture of experts with the feed-forward layers of a dense model ("upcycling").

`Repeat` gives each expert the dense layer, which is read once; `Rename` puts it below `expert`; routers begin anew.
Before any training the mixture computes what the dense layer computed, whatever the router chooses.
"""

import importlib.resources

import jax
import jax.numpy as jnp

import orbax_t5x as ot
from orbax_t5x.models import config_of

bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"  # yours
experts = 4
config = config_of(bundle)


def experts_of(embed, mlp):
    shapes = {"wi_0": (experts, embed, mlp), "wi_1": (experts, embed, mlp), "wo": (experts, mlp, embed)}
    kernels = {name: {"kernel": jax.ShapeDtypeStruct(shape, "float32")} for name, shape in shapes.items()}
    return {"expert": kernels, "router": {"kernel": jax.ShapeDtypeStruct((embed, experts), "float32")}}


# Your model's abstract parameters; here the mixtures alone, one in every layer of the encoder.
layers = {f"layers_{i}": {"mlp": experts_of(config.embed, config.mlp)} for i in range(config.encoder_layers)}
target = {"params": {"encoder": layers}}


def initialize():
    return jax.tree.map(lambda leaf: 0.02 * jax.random.normal(jax.random.key(0), leaf.shape), target)


upcycle = [
    ot.transforms.Translate(),
    ot.transforms.Repeat(r"params/encoder/layers_\d+/mlp/(wi_0|wi_1|wo)/kernel", experts, axis=0),
    ot.transforms.Rename([(r"(params/encoder/layers_\d+)/mlp/(wi_0|wi_1|wo)/kernel", r"\1/mlp/expert/\2/kernel")]),
]
plan = ot.plan_restore(bundle, target, upcycle, fallback=initialize, fallback_for=[".*/router/kernel"], strict=False)
params = plan.execute()["params"]["encoder"]
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(f"{len(plan.entries)} leaves of {size} bytes, for which {plan.bytes_to_read} are read")


@jax.jit
def feed_forward(kernels, x):
    return (jax.nn.gelu(x @ kernels["wi_0"]["kernel"]) * (x @ kernels["wi_1"]["kernel"])) @ kernels["wo"]["kernel"]


@jax.jit
def mixture(mlp, x):  # each token goes to one expert
    chosen = jnp.argmax(x @ mlp["router"]["kernel"], axis=-1)
    every = jax.vmap(feed_forward, in_axes=(0, None))(mlp["expert"], x)
    return chosen, every[chosen, jnp.arange(len(x))]


dense = ot.restore(bundle, None, ot.transforms.Translate())["target"]["encoder"]["layers_0"]["mlp"]
x = jax.random.normal(jax.random.key(1), (8, config.embed))
chosen, mixed = mixture(params["layers_0"]["mlp"], x)
print(f"{len(set(chosen.tolist()))} experts are chosen")
print("the mixture computes what the dense layer did:", bool(jnp.allclose(mixed, feed_forward(dense, x), atol=1e-5)))
