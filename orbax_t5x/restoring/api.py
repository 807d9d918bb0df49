"""`restore` and `plan_restore`: open, plan, execute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.readers import Checkpoint, Limits, open_checkpoint
from orbax_t5x.restoring.matching import PlanOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.plan_data import Progress
from orbax_t5x.restoring.planner import build_plan

Path = str | os.PathLike[str]
Source = Path | Checkpoint | Mapping[str, Path | Checkpoint]


def plan_restore(
    source: Source,
    target: Any,
    transforms: Sequence[Callable[..., Any]] | Callable[..., Any] = (),
    *,
    item: str | None = None,
    fallback: Any = None,
    is_resuming: bool | None = None,
    strict: bool = True,
    dtype: Any = None,
    allow_lossy_cast: bool = False,
    limits: Limits | None = None,
) -> RestorePlan:
    """Plans a restore: reads metadata only, and finds everything that is wrong before an array byte is read.

    Args: as for `restore`.

    Returns:
      A plan that prints as a table; `execute()` runs it. It keeps the checkpoints open that it opened.

    Raises:
      RestorePlanError: with every problem in `.problems`.
      CheckpointError: a source could not be opened.
    """
    opened = _open(source, item, limits)
    options = PlanOptions(fallback, is_resuming, strict, dtype, allow_lossy_cast)
    chain = (transforms,) if callable(transforms) else tuple(transforms or ())
    return build_plan(opened, target, chain, options)


def restore(
    source: Source,
    target: Any,
    transforms: Sequence[Callable[..., Any]] | Callable[..., Any] = (),
    *,
    item: str | None = None,
    fallback: Any = None,
    is_resuming: bool | None = None,
    strict: bool = True,
    dtype: Any = None,
    allow_lossy_cast: bool = False,
    verify: Verify = "touched",
    memory_limit_bytes: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
    broadcast: bool = False,
) -> Any:
    """Restores a checkpoint of any format into a target, each process reading only what its own shards need.

    Args:
      source: a path, an open `Checkpoint`, or a mapping name -> path or `Checkpoint` (leaf names then start with
        `name/`).
      target: any pytree of `jax.ShapeDtypeStruct` or `jax.Array` (sharding, memory kind and layout are used),
        `np.ndarray`, scalars, typed PRNG keys, or `...` (stays); a T5X train state, an `nnx.State`; or None:
        everything, as NumPy.
      transforms: called in order on the lazy state dict; see `orbax_t5x.transforms`. Plain T5X functions work too.
      item: which item of an Orbax step.
      fallback: values for target leaves that the checkpoint lacks: a tree like the target or its state dict, or a
        function that returns one, of which only the missing leaves are computed.
      is_resuming: whether transforms were applied already; None decides by the record in the checkpoint.
      strict: a leaf of the checkpoint without a place in the target is a problem.
      dtype: replaces the target's dtype for floating-point model parameters alone.
      allow_lossy_cast: permit conversions that may lose values.
      verify: "touched": checksums wherever the bytes read cover what they cover; "full": the rest is read too; "off".
      memory_limit_bytes: host buffers in flight, 256 MiB by default; an item larger than that goes alone.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, from one thread at a time.
      limits: what a file's headers may claim.
      broadcast: with one process nothing changes; several are an error in this version.

    Returns:
      The target's structure, with its types, dtypes and shardings.

    Raises:
      RestorePlanError: the checkpoint, the transforms and the target disagree; all problems at once, nothing was read.
      CheckpointError: the checkpoint could not be opened or read, or is damaged.
    """
    with contextlib.ExitStack() as stack:
        opened = _open(source, item, limits)
        for name, checkpoint in opened.items():
            given = source if not isinstance(source, Mapping) else source[name]
            if given is not checkpoint:
                stack.callback(checkpoint.close)
        plan = plan_restore(
            opened if isinstance(source, Mapping) else opened[""],
            target,
            transforms,
            fallback=fallback,
            is_resuming=is_resuming,
            strict=strict,
            dtype=dtype,
            allow_lossy_cast=allow_lossy_cast,
        )
        return plan.execute(
            verify=verify, memory_limit_bytes=memory_limit_bytes, progress=progress, broadcast=broadcast
        )


def _open(source: Source, item: str | None, limits: Limits | None) -> dict[str, Checkpoint]:
    if not isinstance(source, Mapping):
        return {"": _open_one(source, item, limits)}
    if not source:
        raise ValueError("no source was given: the mapping is empty")
    return {name: _open_one(path, item, limits) for name, path in source.items()}


def _open_one(source: Path | Checkpoint, item: str | None, limits: Limits | None) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    return open_checkpoint(source, item=item, limits=limits if limits is not None else Limits())
