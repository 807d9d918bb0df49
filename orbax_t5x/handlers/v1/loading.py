"""Loading by a plan, for Orbax v1: into an `AbstractTrainState`, and `load_and_transform`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint.experimental.v1 as v1
from etils import epath

from orbax_t5x.handlers.run_lineage import remember_restored
from orbax_t5x.handlers.v1.abstract_state import AbstractTrainState, plain_target
from orbax_t5x.handlers.v1.orbax_v1_names import active_context
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.multihost.agreement import Agreement
from orbax_t5x.readers import Limits
from orbax_t5x.restoring.api import open_plan
from orbax_t5x.restoring.chains import Transforms
from orbax_t5x.restoring.lineage import Caller
from orbax_t5x.restoring.options import PlanOptions, ReadOptions
from orbax_t5x.restoring.sources import AnySource
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.transforms.patterns.table import Pattern


def load_into(directory: epath.Path, abstract: AbstractTrainState, context: v1.Context) -> Any:
    """Loads one checkpointable, by all processes together.

    Args:
      directory: of the checkpointable.
      abstract: what to load into; its `source` is loaded from instead of the directory.
      context: of the load.

    Raises:
      CheckpointError: as `orbax_t5x.restore` does.
    """
    own = abstract.source is None
    agreement = Agreement(context.multiprocessing.primary_host or 0, os.fspath(directory))
    caller = Caller("own step" if own else "restore", agreement.records, keeps_lineage=True)
    with contextlib.ExitStack() as stack:
        with agreement.planning():
            reading = ReadOptions.of(abstract).within(context.memory.read_concurrent_bytes)
            source = directory if abstract.source is None else abstract.source
            opened = open_plan(source, abstract.target, abstract.transforms, PlanOptions.of(abstract), caller)
            plan = stack.enter_context(opened)
            agreement.plan([checkpoint.path for checkpoint in plan.checkpoints.values()], plan.provenance)
        restored = plan.run(reading)
    if own:
        remember_restored(directory, plan.provenance)
    return restored


def load_and_transform(
    path: AnySource,
    target: Any,
    transforms: Transforms = (),
    *,
    item: str | None = PlanOptions.item,
    fallback: Any = PlanOptions.fallback,
    is_resuming: bool | None = PlanOptions.is_resuming,
    strict: bool = PlanOptions.strict,
    dtype: Any = PlanOptions.dtype,
    allow_lossy_cast: bool = PlanOptions.allow_lossy_cast,
    verify: Verify = ReadOptions.verify,
    memory_limit_bytes: int | None = ReadOptions.memory_limit_bytes,
    progress: Progress | None = ReadOptions.progress,
    limits: Limits | None = PlanOptions.limits,
    broadcast: bool = ReadOptions.broadcast,
    fallback_for: Sequence[Pattern] | None = PlanOptions.fallback_for,
) -> Any:
    """Loads a checkpoint of any format into a target, transformed on the way: `orbax_t5x.restore` among v1's functions.

    It works inside any Orbax context and outside; of the active one, `memory.read_concurrent_bytes` bounds the host
    buffers.

    Args:
      path: of the checkpoint, of any format, local or remote; an opened checkpoint, an `orbax_t5x.Source`, or a mapping
        of several.
      target: as `orbax_t5x.restore` takes it, or what `ocp.metadata` returned.
      transforms: called in order on the lazy state dict; see `orbax_t5x.transforms`.
      item: which checkpointable of the path.
      fallback: as in `orbax_t5x.restore`, like all that follow.
      is_resuming: whether the transforms were applied already; None decides by the record in the checkpoint.
      strict: a leaf of the checkpoint without a place in the target is a problem.
      dtype: replaces the target's dtype for floating-point model parameters only.
      allow_lossy_cast: permits conversions that may lose values.
      verify: "touched", "full" or "off".
      memory_limit_bytes: host buffers in flight.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, or "bar".
      limits: what a file's headers may claim.
      broadcast: as in `orbax_t5x.restore`.
      fallback_for: patterns of the target leaves that the fallback may fill.

    Returns:
      The target's structure, with its types, dtypes and shardings.

    Raises:
      TypeError: the target is an `AbstractTrainState`, which is for `ocp.load`.
      CheckpointError: as `orbax_t5x.restore` does.
    """
    options = PlanOptions(item, fallback, is_resuming, strict, dtype, allow_lossy_cast, limits, fallback_for)
    reading = ReadOptions(verify, memory_limit_bytes, progress, broadcast)
    with open_plan(path, plain_target(target), transforms, options) as plan:
        return plan.run(reading.within(active_context().memory.read_concurrent_bytes))
