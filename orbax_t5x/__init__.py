"""Checkpoints of the T5 family, restored into sharded JAX train states.

Any checkpoint of the T5 family restores straight into your sharded JAX train state through Orbax, remapped on the way.

`import orbax_t5x as ot` does no work: each public name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_t5x import on_demand

# For type checkers; the alias makes a name public.
if TYPE_CHECKING:
    from orbax_t5x import adafactor as adafactor
    from orbax_t5x import checkpoint_importer as checkpoint_importer
    from orbax_t5x import errors as errors
    from orbax_t5x import nnx as nnx
    from orbax_t5x import optimizers as optimizers
    from orbax_t5x import rules as rules
    from orbax_t5x import state_utils as state_utils
    from orbax_t5x import train_state as train_state
    from orbax_t5x import transforms as transforms
    from orbax_t5x.errors import Problem as Problem
    from orbax_t5x.errors import RestorePlanError as RestorePlanError
    from orbax_t5x.handlers import args as args
    from orbax_t5x.handlers import v1 as v1
    from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler as TrainStateHandler
    from orbax_t5x.handlers.type_handlers.registration import TypeHandlerRegistration as TypeHandlerRegistration
    from orbax_t5x.handlers.type_handlers.registration import register_type_handlers as register_type_handlers
    from orbax_t5x.lazy import LazyArray as LazyArray
    from orbax_t5x.lazy import LazyAwaitableArray as LazyAwaitableArray
    from orbax_t5x.lazy import LazyThreadPoolArray as LazyThreadPoolArray
    from orbax_t5x.lazy import broadcast_to as broadcast_to
    from orbax_t5x.lazy import repeat as repeat
    from orbax_t5x.lazy.several import concatenate as concatenate
    from orbax_t5x.lazy.several import stack as stack
    from orbax_t5x.operations.convert.convert import convert as convert
    from orbax_t5x.operations.diff.diff import diff as diff
    from orbax_t5x.operations.start.restore_or_initialize import restore_or_initialize as restore_or_initialize
    from orbax_t5x.operations.verify.verify import verify as verify
    from orbax_t5x.partitioning import STANDARD_LOGICAL_AXIS_RULES as STANDARD_LOGICAL_AXIS_RULES
    from orbax_t5x.partitioning import with_shardings as with_shardings
    from orbax_t5x.readers import Checkpoint as Checkpoint
    from orbax_t5x.readers import Format as Format
    from orbax_t5x.readers import Limits as Limits
    from orbax_t5x.readers import Mark as Mark
    from orbax_t5x.readers import open_checkpoint as open_checkpoint
    from orbax_t5x.readers import register_format as register_format
    from orbax_t5x.readers.newest import latest_step as latest_step
    from orbax_t5x.restoring.api import plan_restore as plan_restore
    from orbax_t5x.restoring.api import restore as restore
    from orbax_t5x.restoring.plan import PlanEntry as PlanEntry
    from orbax_t5x.restoring.plan import RestorePlan as RestorePlan
    from orbax_t5x.restoring.sources import Source as Source
    from orbax_t5x.transforms.migrations import Migrations as Migrations

__version__ = "0.2.0"

# The public list: name -> module that has it; an empty text where the name is a module of the package. A test holds it
# equal to the imports above.
MODULE_OF = {
    "Checkpoint": "orbax_t5x.readers",
    "Format": "orbax_t5x.readers",
    "LazyArray": "orbax_t5x.lazy",
    "LazyAwaitableArray": "orbax_t5x.lazy",
    "LazyThreadPoolArray": "orbax_t5x.lazy",
    "Limits": "orbax_t5x.readers",
    "Mark": "orbax_t5x.readers",
    "Migrations": "orbax_t5x.transforms.migrations",
    "PlanEntry": "orbax_t5x.restoring.plan",
    "Problem": "orbax_t5x.errors",
    "RestorePlan": "orbax_t5x.restoring.plan",
    "RestorePlanError": "orbax_t5x.errors",
    "STANDARD_LOGICAL_AXIS_RULES": "orbax_t5x.partitioning",
    "Source": "orbax_t5x.restoring.sources",
    "TrainStateHandler": "orbax_t5x.handlers.checkpoint_handler",
    "TypeHandlerRegistration": "orbax_t5x.handlers.type_handlers.registration",
    "adafactor": "",
    "args": "orbax_t5x.handlers",
    "broadcast_to": "orbax_t5x.lazy",
    "checkpoint_importer": "",
    "concatenate": "orbax_t5x.lazy.several",
    "convert": "orbax_t5x.operations.convert.convert",
    "diff": "orbax_t5x.operations.diff.diff",
    "errors": "",
    "latest_step": "orbax_t5x.readers.newest",
    "nnx": "",
    "open_checkpoint": "orbax_t5x.readers",
    "optimizers": "",
    "plan_restore": "orbax_t5x.restoring.api",
    "register_format": "orbax_t5x.readers",
    "register_type_handlers": "orbax_t5x.handlers.type_handlers.registration",
    "repeat": "orbax_t5x.lazy",
    "restore": "orbax_t5x.restoring.api",
    "restore_or_initialize": "orbax_t5x.operations.start.restore_or_initialize",
    "rules": "",
    "stack": "orbax_t5x.lazy.several",
    "state_utils": "",
    "train_state": "",
    "transforms": "",
    "v1": "orbax_t5x.handlers",
    "verify": "orbax_t5x.operations.verify.verify",
    "with_shardings": "orbax_t5x.partitioning",
}

if not TYPE_CHECKING:  # a misspelled name is an error to type checkers
    __all__, __getattr__, __dir__ = on_demand.public(__name__, MODULE_OF)
