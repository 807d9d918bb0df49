"""Any checkpoint of the T5 family restores straight into your sharded JAX train state through Orbax, remapped on the
way.

`import orbax_t5x as ot` does no work: each public name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbax_t5x import (
        adafactor,
        checkpoint_importer,
        errors,
        nnx,
        optimizers,
        rules,
        state_utils,
        train_state,
        transforms,
    )
    from orbax_t5x.errors import Problem, RestorePlanError
    from orbax_t5x.handlers import args
    from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
    from orbax_t5x.lazy import (
        LazyArray,
        LazyAwaitableArray,
        LazyThreadPoolArray,
        broadcast_to,
        concatenate,
        repeat,
        stack,
    )
    from orbax_t5x.operations.convert import convert
    from orbax_t5x.partitioning import STANDARD_LOGICAL_AXIS_RULES, with_shardings
    from orbax_t5x.readers import Checkpoint, Limits, latest_step, open_checkpoint
    from orbax_t5x.restoring.api import plan_restore, restore
    from orbax_t5x.restoring.plan import RestorePlan
    from orbax_t5x.restoring.plan_data import PlanEntry

__version__ = "0.1.0"

# Name -> module that has it; an empty module name means that the name is a submodule of its own.
_PUBLIC: dict[str, str] = {
    "Checkpoint": "orbax_t5x.readers",
    "LazyArray": "orbax_t5x.lazy",
    "LazyAwaitableArray": "orbax_t5x.lazy",
    "LazyThreadPoolArray": "orbax_t5x.lazy",
    "Limits": "orbax_t5x.readers",
    "PlanEntry": "orbax_t5x.restoring.plan_data",
    "Problem": "orbax_t5x.errors",
    "RestorePlan": "orbax_t5x.restoring.plan",
    "RestorePlanError": "orbax_t5x.errors",
    "STANDARD_LOGICAL_AXIS_RULES": "orbax_t5x.partitioning",
    "TrainStateHandler": "orbax_t5x.handlers.checkpoint_handler",
    "adafactor": "",
    "args": "orbax_t5x.handlers",
    "broadcast_to": "orbax_t5x.lazy",
    "checkpoint_importer": "",
    "concatenate": "orbax_t5x.lazy",
    "convert": "orbax_t5x.operations.convert",
    "errors": "",
    "latest_step": "orbax_t5x.readers",
    "nnx": "",
    "open_checkpoint": "orbax_t5x.readers",
    "optimizers": "",
    "plan_restore": "orbax_t5x.restoring.api",
    "repeat": "orbax_t5x.lazy",
    "restore": "orbax_t5x.restoring.api",
    "rules": "",
    "stack": "orbax_t5x.lazy",
    "state_utils": "",
    "train_state": "",
    "transforms": "",
    "with_shardings": "orbax_t5x.partitioning",
}

__all__ = [
    "STANDARD_LOGICAL_AXIS_RULES",
    "Checkpoint",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Limits",
    "PlanEntry",
    "Problem",
    "RestorePlan",
    "RestorePlanError",
    "TrainStateHandler",
    "adafactor",
    "args",
    "broadcast_to",
    "checkpoint_importer",
    "concatenate",
    "convert",
    "errors",
    "latest_step",
    "nnx",
    "open_checkpoint",
    "optimizers",
    "plan_restore",
    "repeat",
    "restore",
    "rules",
    "stack",
    "state_utils",
    "train_state",
    "transforms",
    "with_shardings",
]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'orbax_t5x' has no attribute {name!r}") from None
    if not module:
        return importlib.import_module(f"orbax_t5x.{name}")
    value = (
        importlib.import_module(f"{module}.args") if name == "args" else getattr(importlib.import_module(module), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
