"""Models below different prefixes of a tree."""

from functools import cache

import jax
import numpy as np
import optax
from flax import nnx
from flax.training import train_state as flax_train_state

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import adamw
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint

BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"
CONFIGS = {
    "minimal": t5_model.T5Config(),
    "unscanned": t5_model.T5Config(split_heads=True, per_layer_bias=True),
    "scanned": t5_model.T5Config(scan_layers=True),
}
TX = optax.adamw(1e-3)


@cache
def parameters(layout):
    """The model's parameters by name."""
    if layout == "scanned":
        return flatten(t5_model.scanned_from(unflatten(parameters("minimal")), CONFIGS["scanned"]))
    if layout == "unscanned":
        found = {}
        for name, value in parameters("scanned").items():
            tower, _, rest = name.partition("/")
            if rest.startswith(f"{tower}/"):
                layer = rest.removeprefix(f"{tower}/")
                found.update({f"{tower}/layers_{i}/{layer}": value[:, i] for i in range(value.shape[1])})
            else:
                found[name] = value
        return found
    with np.load(GOLDENS / "importer" / "t5_1_1_f32.npz") as values:
        return {name.removeprefix("target/"): values[name] for name in values if name.startswith("target/")}


def source(name):
    """A checkpoint of the model."""
    if name == "bundle":
        return ot.open_checkpoint(BUNDLE)
    if name in CONFIGS:
        return checkpoint({f"target/{leaf}": value for leaf, value in parameters(name).items()})
    pack = {"hugging face": rules.hf_t5_to_t5x, "hugging face flax": rules.hf_flax_t5_to_t5x}[name]().inverse()
    result, _ = run(pack, {f"target/{leaf}": value for leaf, value in parameters("minimal").items()})
    return checkpoint({leaf: as_numpy(value) for leaf, value in result.items()})


def t5x_state(layout, optimizer):
    return FlaxOptimTrainState.create(optimizer, t5_model.init(CONFIGS[layout])[1])


def adafactor(layout):
    # Scalable T5 factors by logical axes.
    by_axes = {} if layout == "minimal" else {"logical_factor_rules": standard_logical_factor_rules()}
    return Adafactor(1e-3, min_dim_size_to_factor=8, **by_axes)


def nnx_state(params):
    return nnx.State(jax.tree.map(nnx.Param, params))


# Kind of target -> (what makes it from nested parameters, the prefix of the parameters in it).
TREES = {
    "target": (lambda params: {"target": params}, "target/"),
    "params": (lambda params: {"params": params}, "params/"),
    "variables in params": (lambda params: {"params": {"params": params}}, "params/params/"),
    "bare": (lambda params: params, ""),
    "in a tree": (lambda params: {"model": params, "more": [np.zeros(2)]}, "model/"),
    "flax train state": (
        lambda params: flax_train_state.TrainState.create(apply_fn=None, params=params, tx=TX),
        "params/",
    ),
    "flax train state of variables": (
        lambda params: flax_train_state.TrainState.create(apply_fn=None, params={"params": params}, tx=TX),
        "params/params/",
    ),
    "inference state": (lambda params: InferenceState(step=np.int32(0), params=params), "target/"),
    "nnx state": (nnx_state, ""),
    "nnx state in a dict": (lambda params: {"model": nnx_state(params), "seed": 3}, "model/"),
}
T5X_OPTIMIZERS = {"adafactor": adafactor, "adamw": lambda layout: adamw(1e-3)}


def target_of(kind, layout):
    if kind in T5X_OPTIMIZERS:
        return t5x_state(layout, T5X_OPTIMIZERS[kind](layout)), "target/"
    make, prefix = TREES[kind]
    return make(jax.tree.map(np.zeros_like, unflatten(parameters(layout)))), prefix


def check_parameters(plan, prefix, layout):
    views = {entry.name: entry.view for entry in plan.entries}
    for name, value in parameters(layout).items():
        if any(part in name for part in ("token_embedder", "relpos_bias", "/query/", "/out/", "/wo/")):
            np.testing.assert_array_equal(views[prefix + name].get(), value, err_msg=name)
