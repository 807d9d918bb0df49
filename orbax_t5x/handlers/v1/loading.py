"""Loading by a plan, for Orbax v1: into an `AbstractTrainState`, and `load_and_transform`."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack, overload

import orbax.checkpoint.experimental.v1 as v1
from etils import epath

from orbax_t5x.concurrency import guarded
from orbax_t5x.handlers.run_lineage import RestoredHistory
from orbax_t5x.handlers.v1.abstract_state import AbstractTrainState, plain_target
from orbax_t5x.handlers.v1.orbax_v1_names import active_context
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.readers import Limits
from orbax_t5x.restoring.api import open_plan
from orbax_t5x.restoring.lineage import Caller
from orbax_t5x.restoring.options import BroadcastMode, ExecuteKeywords, RestoreOptions, SourceKeywords
from orbax_t5x.restoring.processes import ProcessGroup
from orbax_t5x.restoring.sources import AnySource, Transforms
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.transforms import Transform
from orbax_t5x.transforms.patterns.table import Pattern


@guarded
def load_into(
    directory: epath.Path, abstract: AbstractTrainState, context: v1.Context, history: RestoredHistory
) -> Any:
    """Loads a directory's checkpointable, or the `source`.

    The `source` is the target's. All processes load together.

    Raises:
      CheckpointError: as `orbax_t5x.restore` does.
    """
    own = abstract.source is None
    processes = abstract.multiprocessing_options or context.multiprocessing
    group = ProcessGroup.of(processes)
    caller = Caller("own step" if own else "restore", keeps_lineage=True)
    with contextlib.ExitStack() as stack:
        with group.sharing_errors():
            source = directory if abstract.source is None else abstract.source
            options = RestoreOptions.among(vars(abstract)).within(context.memory.read_concurrent_bytes)
            options.multiprocessing_options = processes
            plan = open_plan(source, abstract.target, abstract.transforms, options, stack, caller)
        restored = plan.run(options)
    history.note(directory, plan.provenance, restored)
    return restored


class _NotGiven(enum.Enum):
    """Default of an argument that has another name, too."""

    TOKEN = "…"


_NOT_GIVEN = _NotGiven.TOKEN


_Target = TypeVar("_Target")


class _LoadKeywords(SourceKeywords, ExecuteKeywords, total=False):
    """Keywords of `load_and_transform` for type checkers."""

    abstract_tree: Any
    transform_fn: Transforms
    fallback: Any


@overload
def load_and_transform(
    path: AnySource, target: dict[Any, Any] = ..., transforms: Transforms = ..., **options: Unpack[_LoadKeywords]
) -> Any: ...
@overload
def load_and_transform(
    path: AnySource, target: None, transforms: Transforms = ..., **options: Unpack[_LoadKeywords]
) -> dict[str, Any]: ...
@overload
def load_and_transform(
    path: AnySource, target: _Target, transforms: Transforms = ..., **options: Unpack[_LoadKeywords]
) -> _Target: ...
@guarded
def load_and_transform(
    path: AnySource,
    target: Any = _NOT_GIVEN,
    transforms: Transforms | _NotGiven = _NOT_GIVEN,
    *,
    abstract_tree: Any = _NOT_GIVEN,
    transform_fn: Transforms | _NotGiven = _NOT_GIVEN,
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
) -> Any:
    """Loads any format into a target, transformed on the way.

    It is `orbax_t5x.restore` among v1's functions. It works inside any Orbax context and outside; of the active one,
    `memory.read_concurrent_bytes` bounds the host buffers, and `multiprocessing` says which processes load together. In
    `orbax_t5x.v1.context` it is a load of that context, which later saves record.

    Args:
      path: of the checkpoint, of any format, local or remote; an opened checkpoint, an `orbax_t5x.Source`, or a mapping
        of several.
      target: as `orbax_t5x.restore` takes it, or what `ocp.metadata` returned.
      transforms: called in order on the lazy state dict; see `orbax_t5x.transforms`. A function of one tree is a
        transform, too.
      abstract_tree, transform_fn: other names of `target` and `transforms`: those in Orbax's guide.
      item: which checkpointable of the path.
      fallback, fallback_for, is_resuming, strict, dtype, allow_lossy_cast: as in `orbax_t5x.restore`.
      verify, memory_limit_bytes, progress, limits, broadcast: as in `orbax_t5x.restore`.

    Returns:
      The target's structure, with its types, dtypes and shardings.

    Raises:
      TypeError: the target is an `AbstractTrainState`, which is for `ocp.load`; or it is missing, given twice, or given
        in the position of the transforms.
      CheckpointError: as `orbax_t5x.restore` does.

    Example:
      >>> ocp_v1.save(directory / "step", {"old": np.ones(3, np.float32)})
      >>> target = {"new": np.zeros(3, np.float32)}
      >>> rename = ot.transforms.Rename([("old", "new")])
      >>> ot.v1.load_and_transform(directory / "step", transform_fn=rename, abstract_tree=target)
      {'new': array([1., 1., 1.], dtype=float32)}
    """
    target = _one_of("target", target, "abstract_tree", abstract_tree)
    if target is _NOT_GIVEN or isinstance(target, Transform) or inspect.isroutine(target):
        raise TypeError("load_and_transform takes (path, target, transforms); by keyword in any order")
    transforms = _one_of("transforms", transforms, "transform_fn", transform_fn)
    transforms = () if isinstance(transforms, _NotGiven) else transforms
    context = active_context()
    arguments = locals()
    group = ProcessGroup.of(context.multiprocessing)
    with contextlib.ExitStack() as stack:
        histories = _histories_of(context)
        caller = Caller(keeps_lineage=bool(histories))
        with group.sharing_errors():
            options = RestoreOptions.among(arguments).within(context.memory.read_concurrent_bytes)
            options.multiprocessing_options = context.multiprocessing
            plan = open_plan(path, plain_target(target), transforms, options, stack, caller)
        loaded = plan.run(options)
        directory = plan.path if len(plan.checkpoints) == 1 else None
        for history in histories:
            history.note(directory or "", plan.provenance, loaded)
        return loaded


def _histories_of(context: v1.Context) -> list[RestoredHistory]:
    """Lists the histories of a context's handlers of train states."""
    found = (getattr(cls, "history", None) for cls, _ in context.checkpointables.registry.get_all_entries())
    return list({id(one): one for one in found if isinstance(one, RestoredHistory)}.values())


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Returns the value that is given under either name."""
    if value is not _NOT_GIVEN and other is not _NOT_GIVEN:
        raise TypeError(f"{other_name}= is another name of {name}: pass one of the two")
    return value if other is _NOT_GIVEN else other
