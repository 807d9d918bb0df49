"""T5 networks in two layouts, with optimizer states after steps, for states that follow their parameters."""

import functools

import jax
import numpy as np
from flax.core import freeze
from jax.sharding import PartitionSpec

from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.trees.flat import flatten, unflatten

HEADS = 4
# embed > joined, embed = joined (Base, large, xl, xxl), embed < joined
SIZES = {"E>J": (24, 4), "E=J": (16, 4), "E<J": (16, 8)}
MLP, VOCAB, BUCKETS = 40, 48, 8
# A leaf of each kind: (name in a layer, shape of one minimal layer, its axes, shape with heads split, its axes).
_E, _J, _HD = "embed", "joined_kv", ("heads", "kv")


def _layer_leaves(embed, head_dim):
    joined, split = HEADS * head_dim, (HEADS, head_dim)
    return {
        "attention/query/kernel": ((embed, joined), (_E, _J), (embed, *split), (_E, *_HD)),
        "attention/out/kernel": ((joined, embed), (_J, _E), (*split, embed), (*_HD, _E)),
        "mlp/wi_0/kernel": ((embed, MLP), (_E, "mlp"), (embed, MLP), (_E, "mlp")),
        "mlp/wo/kernel": ((MLP, embed), ("mlp", _E), (MLP, embed), ("mlp", _E)),
        "pre_mlp_layer_norm/scale": ((embed,), (_E,), (embed,), (_E,)),
    }


@functools.cache
def network(embed, head_dim, layout):
    """Parameters and logical axes of a T5 of two encoder layers and one decoder layer, as far as kinds differ."""
    leaves = _layer_leaves(embed, head_dim)
    bias, bias_axes = (HEADS, BUCKETS), ("heads", "relpos_buckets")
    towers = {"encoder": (2, leaves), "decoder": (1, {"self_attention/out/kernel": leaves["attention/out/kernel"]})}
    found = {"token_embedder/embedding": ((VOCAB, embed), ("vocab", _E))}
    for tower, (depth, in_layer) in towers.items():
        if layout == "minimal":
            found[f"{tower}/relpos_bias/rel_embedding"] = (bias, bias_axes)
            below = {name: leaf[:2] for name, leaf in in_layer.items()}
        else:
            below = {"relpos_bias/rel_embedding": (bias, bias_axes)} | {n: leaf[2:] for n, leaf in in_layer.items()}
        for name, (shape, axes) in below.items():
            if layout == "scanned":
                stacked = ((shape[0], depth, *shape[1:]), (axes[0], "layers", *axes[1:]))
                found[f"{tower}/{tower}/{name}"] = stacked
            else:
                found.update({f"{tower}/layers_{i}/{name}": (shape, axes) for i in range(depth)})
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in found.items()}
    return {
        "params": unflatten(params),
        "axes": unflatten({name: PartitionSpec(*axes) for name, (_, axes) in found.items()}),
    }


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), tree)


def mapped(pack, params):
    return jax.tree.map(as_numpy, pack({"target": params}, {})["target"])


def adafactor(variables, **options):
    definition = Adafactor(
        0.1, min_dim_size_to_factor=4, logical_factor_rules=standard_logical_factor_rules(), **options
    )
    definition.set_param_axes(freeze(variables["axes"]))
    return definition


def after_steps(definition, params, grads):
    """The state dict after steps, each compiled as one program."""
    optimizer = definition.create(params)
    # Unoptimized code: compiling is what takes time here.
    options = {"xla_backend_optimization_level": 0}
    step = jax.jit(lambda optimizer, grad: optimizer.apply_gradient(grad), compiler_options=options)
    for grad in grads:
        optimizer = step(optimizer, grad)
    return flatten(jax.tree.map(np.asarray, optimizer.state_dict()))


@functools.cache
def minimal_adafactor(embed, head_dim, beta1=None):
    """The minimal network's state after two steps with gradients from seeds 0 and 1."""
    minimal = network(embed, head_dim, "minimal")
    grads = [random_like(minimal["params"], seed) for seed in range(2)]
    return after_steps(adafactor(minimal, beta1=beta1), minimal["params"], grads)


def networks(embed, head_dim, layout="scanned"):
    return network(embed, head_dim, "minimal"), network(embed, head_dim, layout)


def assert_close(result, expected):
    assert sorted(result) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(as_numpy(result[name]), value, rtol=2e-5, atol=1e-7, err_msg=name)


def state(params, slots):
    return {
        **{f"target/{name}": value for name, value in params.items()},
        **{f"state/param_states/{name}": value for name, value in slots.items()},
        "state/step": np.int32(7),
    }
