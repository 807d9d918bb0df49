"""`restore` and `plan_restore`: open, plan, execute."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack, overload

import jax

from orbax_t5x import on_demand
from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.provenance.decision import Decision
from orbax_t5x.provenance.records import Records, union
from orbax_t5x.readers import Limits
from orbax_t5x.restoring.lineage import ANY_RESTORE, Caller, SourceHistory, keeps_found_rules
from orbax_t5x.restoring.options import AnyProcesses, BroadcastMode, PlanKeywords, RestoreKeywords, RestoreOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.planner import PlanInputs, build_plan, plan_inputs
from orbax_t5x.restoring.processes import ProcessGroup
from orbax_t5x.restoring.sources import AnySource, OpenSources, Transforms, chain_of, open_sources
from orbax_t5x.text.masked import masked
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.transforms.patterns.table import Pattern

_explain_own_step = on_demand.function("orbax_t5x.restoring.unfit", "explain_own_step")  # plans that fail only


_Target = TypeVar("_Target")


# A dict of abstract arrays comes back as one of arrays, so its type is not the target's.
@overload
def plan_restore(
    source: AnySource, target: dict[Any, Any], transforms: Transforms = (), **options: Unpack[PlanKeywords]
) -> RestorePlan[Any]: ...
@overload
def plan_restore(
    source: AnySource, target: None, transforms: Transforms = (), **options: Unpack[PlanKeywords]
) -> RestorePlan[dict[str, Any]]: ...
@overload
def plan_restore(
    source: AnySource, target: _Target, transforms: Transforms = (), **options: Unpack[PlanKeywords]
) -> RestorePlan[_Target]: ...
@guarded
def plan_restore(
    source: AnySource,
    target: Any,
    transforms: Transforms = (),
    *,
    item: str | None = RestoreOptions.item,
    fallback: Any = RestoreOptions.fallback,
    is_resuming: bool | None = RestoreOptions.is_resuming,
    strict: bool = RestoreOptions.strict,
    dtype: Any = RestoreOptions.dtype,
    allow_lossy_cast: bool = RestoreOptions.allow_lossy_cast,
    limits: Limits | None = RestoreOptions.limits,
    fallback_for: Sequence[Pattern] | None = RestoreOptions.fallback_for,
    multiprocessing_options: AnyProcesses | None = RestoreOptions.multiprocessing_options,
) -> RestorePlan[Any]:
    """Plans a restore, and finds all problems beforehand.

    It reads metadata only: no array byte is read before. Args: as for `orbax_t5x.restore`.

    Returns:
      A plan that prints as a table; `execute()` runs it. It keeps the checkpoints open that it opened.

    Raises:
      RestorePlanError: with every problem in `.problems`.
      CheckpointError: a source could not be opened.

    Example:
      >>> target = {"shared": {"embedding": jax.ShapeDtypeStruct((128, 16), jnp.float32)}}
      >>> plan = ot.plan_restore(bundle, target, strict=False)
      >>> [(entry.name, entry.action) for entry in plan.entries], len(plan.unused)
      ([('shared/embedding', 'read')], 142)
    """
    options = RestoreOptions.among(locals())
    with contextlib.ExitStack() as stack:
        plan = open_plan(source, target, transforms, options, stack)
        stack.pop_all()
    return plan


@overload
def restore(
    source: AnySource, target: dict[Any, Any], transforms: Transforms = (), **options: Unpack[RestoreKeywords]
) -> Any: ...
@overload
def restore(
    source: AnySource, target: None, transforms: Transforms = (), **options: Unpack[RestoreKeywords]
) -> dict[str, Any]: ...
@overload
def restore(
    source: AnySource, target: _Target, transforms: Transforms = (), **options: Unpack[RestoreKeywords]
) -> _Target: ...
@guarded
def restore(
    source: AnySource,
    target: Any,
    transforms: Transforms = (),
    *,
    item: str | None = RestoreOptions.item,
    fallback: Any = RestoreOptions.fallback,
    is_resuming: bool | None = RestoreOptions.is_resuming,
    strict: bool = RestoreOptions.strict,
    dtype: Any = RestoreOptions.dtype,
    allow_lossy_cast: bool = RestoreOptions.allow_lossy_cast,
    verify: Verify = RestoreOptions.verify,
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
    progress: Progress | None = RestoreOptions.progress,
    limits: Limits | None = RestoreOptions.limits,
    broadcast: BroadcastMode = RestoreOptions.broadcast,
    fallback_for: Sequence[Pattern] | None = RestoreOptions.fallback_for,
    multiprocessing_options: AnyProcesses | None = RestoreOptions.multiprocessing_options,
) -> Any:
    """Restores a checkpoint of any format into a target.

    Each process reads only its own shards' bytes.

    Args:
      source: a path, an open `Checkpoint`, an `orbax_t5x.Source` with transforms of its own, or a mapping from names
        to these (leaf names then start with `name/`).
      target: any pytree of `jax.ShapeDtypeStruct` or `jax.Array` (sharding, memory kind and layout are used),
        `np.ndarray`, scalars, typed PRNG keys, or `...` (stays); a T5X train state, an `nnx.State`; or None:
        everything, as NumPy.
      transforms: called in order on the lazy state dict; see `orbax_t5x.transforms`. Plain T5X functions work too.
        `"auto"`: rule packs that lead from source to target, and what `orbax_t5x.rules.align` finds where they leave
        leaves; nothing where names fit already.
      item: which item of an Orbax step.
      fallback: values for target leaves that the checkpoint lacks: a tree like the target or its state dict, or a
        function that returns one, under the same rules. What it computes with JAX is computed under `jax.jit`, and only
        what is missing; NumPy arrays and Python scalars that it returns are taken as they are.
      is_resuming: whether transforms were applied already; None decides by the record in the checkpoint.
      strict: a leaf of the checkpoint without a place in the target is a problem.
      dtype: replaces the target's dtype for floating-point model parameters alone.
      allow_lossy_cast: permit conversions that may lose values.
      verify: "touched": checksums wherever the bytes read cover what they cover; "full": the rest is read, once;
        "off".
      memory_limit_bytes: host buffers in flight, 256 MiB by default; an item larger than that goes alone.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, from one thread at a time; "bar" shows a bar on a
        terminal, and nothing without one.
      limits: what a file's headers may claim.
      broadcast: with several processes, True: each reads a part of a leaf whose sharding spans them, and their devices
        send each other the rest; False: each reads what it needs; "auto": True for leaves of remote stores that several
        processes need. Every process passes the same. With one process nothing changes.
      fallback_for: regexes; the fallback fills only target leaves whose whole name one of them matches. None: it fills
        all that are missing, with a warning where model parameters are, and a problem where nothing is restored.
      multiprocessing_options: Orbax's, of a group of processes that restores without the others: only its
        `active_processes` call, and groups that differ in `barrier_sync_key_prefix` alone do not meet.

    Returns:
      The target's structure, with its types, dtypes and shardings.

    Raises:
      RestorePlanError: the checkpoint, the transforms and the target disagree; all problems at once, nothing was read.
      CheckpointError: the checkpoint could not be opened or read, or is damaged.
      ValueError: this process is not among the `active_processes`.

    Example:
      >>> sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("model",)), jax.sharding.PartitionSpec("model"))
      >>> target = {"table": jax.ShapeDtypeStruct((128, 16), jnp.float32, sharding=sharding)}
      >>> rename = ot.transforms.Rename([("shared/embedding", "table")])
      >>> state = ot.restore(bundle, target, [rename], strict=False)
      >>> state["table"].shape, state["table"].addressable_shards[0].data.shape
      ((128, 16), (16, 16))
    """
    arguments = locals()
    group = ProcessGroup.of(multiprocessing_options)
    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        is_primary = jax.process_index() == 0
        if is_primary:
            jax.monitoring.record_event("/jax/orbax/read/start")
        with group.sharing_errors():
            options = RestoreOptions.among(arguments)
            plan = open_plan(source, target, transforms, options, stack)
        restored = plan.run(options)
        if is_primary:
            jax.monitoring.record_event("/jax/orbax/read/success")
            jax.monitoring.record_event_duration_secs("/jax/orbax/read/total_duration_secs", time.monotonic() - begun)
        return restored


def open_plan(
    source: AnySource,
    target: Any,
    transforms: Transforms,
    options: RestoreOptions,
    stack: contextlib.ExitStack,
    caller: Caller = ANY_RESTORE,
) -> RestorePlan:
    """Makes the plan of a restore."""
    chain = chain_of(transforms)
    sources = open_for(target, source, options, stack)
    if caller.kind != "own step":
        return plan_of(sources, target, chain, options, caller)
    inputs, decision, _ = decided_inputs(sources, target, chain, options, caller)
    try:
        return build_plan(inputs, decision, proposes=caller.proposes)
    except RestorePlanError as error:
        raise _explain_own_step(error, target, transforms, inputs, decision) from error.__cause__


def open_for(target: Any, source: AnySource, options: RestoreOptions, stack: contextlib.ExitStack) -> OpenSources:
    """Opens the sources of a restore into a target."""
    if isinstance(target, str | os.PathLike):
        raise TypeError(
            f"the target is a tree of shapes or arrays, or None, and not the path {masked(str(target))!r}; "
            "the checkpoint is the first argument, and the target the second"
        )
    return open_sources(source, options, stack)


def plan_of(
    sources: OpenSources,
    target: Any,
    transforms: Sequence[Callable[..., Any]],
    options: RestoreOptions,
    caller: Caller = ANY_RESTORE,
) -> RestorePlan:
    """Makes the plan of a restore from open sources."""
    if transforms or sources.chain or caller.keeps_lineage:
        inputs, decision, _ = decided_inputs(sources, target, transforms, options, caller)
        is_restore = caller.kind == "restore"
        return build_plan(inputs, decision, proposes=caller.proposes, warns_of_skipped=is_restore)
    history = SourceHistory(sources)
    recorded = union(history.recorded.values())  # a damaged record is an error also of a restore that needs none
    inputs = plan_inputs(sources, target, (), options)
    return build_plan(
        inputs,
        Decision(recorded, is_resuming=options.is_resuming is True),
        proposes=caller.proposes,
        read_provenance=lambda: history.decide(history.with_older_steps(), (), options, caller.kind).lineage,
    )


def decided_inputs(
    sources: OpenSources, target: Any, transforms: Sequence[Callable[..., Any]], options: RestoreOptions, caller: Caller
) -> tuple[PlanInputs, Decision, Records]:
    """Returns the inputs of a plan, which of its transforms were applied before, and the records that say so.

    It reads the records of the sources: nothing else is read between opening them and reading arrays. Transforms that
    were applied before would fail in ways that only hide why.
    """
    history = SourceHistory(sources)
    records = history.with_older_steps()
    finds_rules = not keeps_found_rules(records, options, caller.kind)
    inputs = plan_inputs(sources, target, transforms, options, finds_rules=finds_rules)
    return inputs, history.decide(records, inputs.steps, options, caller.kind), records
