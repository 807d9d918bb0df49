"""Optimizers of Optax, and what people do to them when they resume."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from orbax_t5x.adafactor import HEURISTIC_RULE, Adafactor, FactorDim, HParamMap
from tests.transforms.follow.resume_truth import Path, factored_dims, key_text


def _is_small(path: Any, leaf: Any) -> bool:
    keys = [key_text(key) for key in path]
    if hasattr(path[-1], "name"):  # NNX's value
        keys.pop()
    return keys[-1] in ("bias", "scale", "b")


def _small(parameters: Any) -> Any:
    return jax.tree_util.tree_map_with_path(_is_small, parameters)


def _matrices(parameters: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)


def _labels(parameters: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "small" if _is_small(path, leaf) else "large", parameters
    )


def _schedule(count: Any) -> Any:
    return 0.1 / (1 + count)


def _labelled(large: Any, small: Any) -> Any:
    return optax.multi_transform({"large": large, "small": small}, _labels)


def _schedule_free() -> Any:
    return optax.contrib.schedule_free_adamw(0.1)


# All are made anew for each case: their masks are functions of the parameters.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "sgd_schedule": lambda: optax.sgd(_schedule),
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "clip_momentum": lambda: optax.chain(optax.clip(1.0), optax.sgd(_schedule, 0.9, nesterov=True)),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adamw_clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adamw_schedule": lambda: optax.adamw(_schedule),
    "masked": lambda: optax.masked(optax.adam(0.1), _matrices),
    "adamw_masked": lambda: optax.chain(
        optax.scale_by_adam(), optax.masked(optax.add_decayed_weights(0.1), _matrices), optax.scale(-0.1)
    ),
    "labels_adam_sgd": lambda: _labelled(optax.adam(0.1), optax.sgd(0.1, 0.9)),
    "labels_adam_adam": lambda: _labelled(optax.adamw(0.1), optax.adam(_schedule)),
    "labels_frozen": lambda: _labelled(optax.adam(0.1), optax.set_to_zero()),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "adam_ema": lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "ema_sgd": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "hyperparams_schedule": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=_schedule, momentum=0.9),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "schedule_free": _schedule_free,
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(0.1),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adafactor_momentum": lambda: optax.adafactor(0.1, min_dim_size_to_factor=3, momentum=0.9),
    "adafactor_large": lambda: optax.adafactor(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "lars": lambda: optax.lars(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "two_traces": lambda: optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-0.1)),
    "trace_adam": lambda: optax.chain(optax.trace(0.9), optax.scale_by_adam(), optax.scale(-0.1)),
    "named_chain": lambda: optax.named_chain(("moments", optax.scale_by_adam()), ("rate", optax.scale(-0.1))),
    "adagrad": lambda: optax.adagrad(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "adadelta": lambda: optax.adadelta(0.1),
    "adan": lambda: optax.adan(0.1),
    "ademamix": lambda: optax.contrib.ademamix(0.1),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(0.1)),
    "sm3": lambda: optax.sm3(0.1),
    "lbfgs": lambda: optax.lbfgs(0.1, memory_size=3),
    "muon": lambda: optax.contrib.muon(0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1)),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.1), lambda step: step > 1),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "momo": lambda: optax.contrib.momo(),
    "prodigy": lambda: optax.contrib.prodigy(),
}

_LAYERS_FIRST = (FactorDim.BATCH, FactorDim.ROW, FactorDim.COLUMN)


def t5x_dims(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the row and the column dimension that T5X's rules name."""
    return (1, 2) if len(shape) == 3 else factored_dims(name, shape)


# T5X's own Adafactor keeps the slots of a parameter together.
T5X_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "t5x_adafactor": dict(min_dim_size_to_factor=2),
    "t5x_adafactor_momentum": dict(beta1=0.9, min_dim_size_to_factor=3),
    "t5x_adafactor_large": dict(min_dim_size_to_factor=128),
}


def make(name: str, shapes: Mapping[str, tuple[int, ...]], *, is_scheduled: bool = False) -> Any:
    """Makes the optimizer of that name for parameters of these shapes."""
    if name not in T5X_OPTIMIZERS:
        return (SCHEDULED.get(name, OPTIMIZERS[name]) if is_scheduled else OPTIMIZERS[name])()
    layers = [(f"^{re.escape(path)}$", _LAYERS_FIRST) for path, shape in shapes.items() if len(shape) == 3]
    return Adafactor(0.1, factor_map=HParamMap([*layers, (".*", HEURISTIC_RULE)]), **T5X_OPTIMIZERS[name])


SCHEDULED: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(_schedule),
    "adamw": lambda: optax.adamw(_schedule),
    "adamw_clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_schedule)),
    "momentum": lambda: optax.sgd(_schedule, 0.9),
    "sgd": lambda: optax.sgd(_schedule),
    "lion": lambda: optax.lion(_schedule),
    "lamb": lambda: optax.lamb(_schedule),
    "novograd": lambda: optax.novograd(_schedule),
}


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of an optimizer.

    Attributes:
      wrap: The new optimizer around the old one.
      at: Where the old optimizer's state is in the new one's.
    """

    wrap: Callable[[Any], Any]
    at: Path


CHANGES = {
    "clip_before": Change(lambda old: optax.chain(optax.clip_by_global_norm(1.0), old), ("1",)),
    "ema_before": Change(lambda old: optax.chain(optax.ema(0.9), old), ("1",)),
    "ema_after": Change(lambda old: optax.chain(old, optax.ema(0.9)), ("0",)),
    "trace_before": Change(lambda old: optax.chain(optax.trace(0.9), old), ("1",)),
    "decay_after": Change(lambda old: optax.chain(old, optax.add_decayed_weights(0.1)), ("0",)),
    "schedule_after": Change(lambda old: optax.chain(old, optax.scale_by_schedule(_schedule)), ("0",)),
    "multi_steps": Change(lambda old: optax.MultiSteps(old, 4).gradient_transformation(), ("inner_opt_state",)),
    "hyperparams": Change(
        lambda old: optax.inject_hyperparams(lambda rate: old)(rate=np.float32(0.1)), ("inner_state",)
    ),
    "apply_if_finite": Change(lambda old: optax.apply_if_finite(old, 5), ("inner_state",)),
}
