"""`convert`: a checkpoint of any format becomes an Orbax item, leaf by leaf and chunk by chunk.

The source is planned like a restore of everything, so transforms compose views and nothing is read before all is
known to be storable. Then views are streamed into a new directory beside the destination, under a hidden name;
checksums of the source are checked on the way; at the end everything is synced and renamed. Until that rename the
destination is as it was, and after a failure or an interrupt there is nothing new beside it. Memory:
`memory_limit_bytes`, whatever the size of a leaf, as long as the source's own chunks are smaller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.handlers.failed_saves import remove_tree, sync, sync_directory
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.restoring.api import Source, open_plan
from orbax_t5x.restoring.lineage import Asking
from orbax_t5x.restoring.options import PlanOptions, Progress, ReadOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.storage.paths import url_scheme
from orbax_t5x.trees.flat import unflatten

# A directory that holds one of these was written by Orbax, and may be replaced when the caller says so.
_ORBAX_FILES = frozenset({"_METADATA", "_CHECKPOINT_METADATA"})


def convert(
    source: Source,
    destination: str | os.PathLike[str],
    transforms: Sequence[Callable[..., Any]] | Callable[..., Any] = (),
    *,
    format: str = "orbax",
    dtype: Any = None,
    overwrite: bool = False,
    memory_limit_bytes: int | None = ReadOptions.memory_limit_bytes,
    progress: Progress | None = ReadOptions.progress,
    on_unsupported: Literal["error", "skip"] = "error",
    is_resuming: bool | None = PlanOptions.is_resuming,
) -> None:
    """Writes what a checkpoint holds as a plain Orbax item that `ocp.PyTreeCheckpointer().restore(destination)` reads.

    Args:
      source: as `orbax_t5x.restore` takes it: a path, an open checkpoint, or a mapping of several.
      destination: the directory to make; its parents are made too.
      transforms: applied to the names and views, as in a restore; there is no target. A chain that was applied before
        the source was written, by its record, is not applied again, and a warning says so.
      format: "orbax" is the one that is written.
      dtype: for the floating-point model parameters (under `target/` or `params/`); everything else keeps its own.
      overwrite: replace an Orbax checkpoint (or an empty directory) that is there; nothing else is ever replaced.
      memory_limit_bytes: host memory for data on its way, 256 MiB by default.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, from one thread at a time.
      on_unsupported: "error": leaves that Orbax cannot store are an error, by name, before anything is written.
        "skip": they are left out; their names, shapes and dtypes are recorded.
      is_resuming: whether the transforms were applied already; None decides by the record in the source.

    Raises:
      CheckpointIOError: the destination exists, or cannot be written.
      UnsupportedCheckpointError: leaves that Orbax cannot store, or another `format`.
      CheckpointError: the source cannot be opened or read, or its checksums do not hold; nothing was made.
    """
    if format != "orbax":
        raise UnsupportedCheckpointError(f"format={format!r} is not written; 'orbax' is")
    if jax.process_count() > 1:
        raise UnsupportedCheckpointError("convert runs in one process; this is one of several")
    target = _local(destination)
    _check_destination(target, overwrite)
    with contextlib.ExitStack() as stack:
        plan = _plan(source, transforms, is_resuming, on_unsupported, stack)
        for checkpoint in plan.checkpoints.values():
            _check_not_around(target, checkpoint.path)
        args = TrainStateSave(
            _tree(plan),
            dtype,
            provenance=plan.provenance,
            on_unsupported=on_unsupported,
            memory_limit_bytes=memory_limit_bytes,
            progress=progress,
        )
        _write(args, target, overwrite)


# -- the source


def _plan(
    source: Source, transforms: Any, is_resuming: bool | None, on_unsupported: str, stack: contextlib.ExitStack
) -> RestorePlan:
    """Everything that the source holds, after the transforms; the stack closes what was opened here."""

    def opened(one: Any) -> Checkpoint:
        checkpoint = one if isinstance(one, Checkpoint) else stack.enter_context(open_checkpoint(one))
        return _with_placeholders(checkpoint) if on_unsupported == "skip" else checkpoint

    checkpoints = {name: opened(one) for name, one in source.items()} if isinstance(source, Mapping) else opened(source)
    options = PlanOptions(is_resuming=is_resuming)
    return stack.enter_context(open_plan(checkpoints, None, transforms, options, Asking("convert")))


class _UnreadableLeaf(Leaf):
    """Stands for a leaf whose type the reader does not know: it can be listed, renamed and left out, not read."""

    def __init__(self, name: str, error: UnsupportedCheckpointError):
        self.name = name
        self.path = error.path or ""
        self.shape: tuple[int, ...] = ()
        self.dtype = np.dtype(object)
        self._error = error

    async def read_into(self, requests: Any, stats: Any) -> None:
        raise self._error


def _with_placeholders(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with the leaves of unsupported type replaced by ones that a plan takes."""
    leaves: dict[str, Leaf] = {}
    for name, view in checkpoint.leaves.items():
        (leaf,) = view.leaves()
        error = leaf.error
        leaves[name] = _UnreadableLeaf(name, error) if isinstance(error, UnsupportedCheckpointError) else leaf
    return Checkpoint(
        path=checkpoint.path,
        format=checkpoint.format,
        step=checkpoint.step,
        leaves=leaves,
        empties=checkpoint.empties,
        metadata=checkpoint.metadata,
        index_bytes=checkpoint.index_bytes,
    )


def _tree(plan: RestorePlan) -> dict[str, Any]:
    """The planned views as nested dicts. A TF bundle may have `a` and `a/b`: the longer name then stays joined."""
    views = {entry.name: entry.view for entry in plan.entries}
    try:
        return plan.target.rebuild(views)
    except ValueError:
        return unflatten(views, join_clashes=True)


# -- the destination


def _local(destination: str | os.PathLike[str]) -> Path:
    text = os.fspath(destination)
    if url_scheme(text) is not None:
        raise UnsupportedCheckpointError("only a local directory can be written", path=text)
    return Path(os.path.abspath(text))


def _check_destination(target: Path, overwrite: bool) -> None:
    """Raises where something is in the way that was not to be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise _exists(target, "exists already; overwrite=True replaces it")
    names = set(os.listdir(target)) if target.is_dir() else None
    if names is None or (names and not names & _ORBAX_FILES):
        raise _exists(
            target, "is not an Orbax checkpoint, so it is not replaced; remove it yourself or choose another name"
        )


def _check_not_around(target: Path, source: str) -> None:
    """Replacing a directory that the source lies in would delete the source."""
    if os.path.lexists(target) and target.resolve() in Path(source).resolve().parents:
        raise _exists(target, f"holds the source {source!r}, so it is not replaced; choose another destination")


def _exists(target: Path, message: str) -> CheckpointIOError:
    return CheckpointIOError(message, path=target, errno=errno.EEXIST)


def _write(args: TrainStateSave, target: Path, overwrite: bool) -> None:
    made = _make_parents(target.parent)
    try:
        # Beside the destination: a rename across file systems would not be one step.
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".orbax-t5x-tmp", dir=target.parent))
        try:
            with ocp.Checkpointer(TrainStateHandler()) as checkpointer:
                checkpointer.save(work / target.name, args=args)
            sync_directory(work / target.name)
            _put_in_place(work, target, overwrite)
        finally:
            remove_tree(work)
    except BaseException as error:
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and not isinstance(error, CheckpointIOError):
            raise CheckpointIOError(f"could not be written: {error}", path=target, errno=error.errno) from error
        raise


def _make_parents(parent: Path) -> list[Path]:
    """Makes the directory and its missing parents; returns those it made, outermost first."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
    except OSError as error:
        raise CheckpointIOError(f"the directory could not be made: {error}", path=parent, errno=error.errno) from error
    return made


def _put_in_place(work: Path, target: Path, overwrite: bool) -> None:
    """Renames the finished item; what it replaces goes into the work directory, which is removed after."""
    _check_destination(target, overwrite)
    replaced = work / "replaced"
    if os.path.lexists(target):
        os.rename(target, replaced)
    try:
        os.rename(work / target.name, target)
    except BaseException:
        if os.path.lexists(replaced):
            os.rename(replaced, target)
        raise
    sync(target.parent)
