"""Adds checksums to a save of Orbax v1.

Orbax's handler for trees writes, and hides what it writes with. So
the leaves are held and summed here while it writes, and when it is done, the process that finalizes makes one file of
the checksums of all processes, before Orbax commits the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
from etils import epath

from orbax_t5x.concurrency import first_failure
from orbax_t5x.handlers.orbax_names import TEMPORARY_MARK
from orbax_t5x.handlers.save.cleanup import remove_failed, remove_failed_once_made
from orbax_t5x.handlers.save.commit import sync_tree
from orbax_t5x.handlers.save.item_sums import publish_sums, write_published_sums
from orbax_t5x.handlers.save.key_checks import storage_key
from orbax_t5x.handlers.type_handlers.checksums import (
    CopiedArray,
    HostCopy,
    SaveSums,
    copies_to_host,
    start_transfers,
    sum_copies,
)
from orbax_t5x.handlers.v1.orbax_v1_names import goes_through_pinned_memory, stored_dtype, transfer_limit
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error


class _Limiter(NamedTuple):
    """Limit on the bytes that Orbax moves from devices at a time."""

    max_bytes: int | None


class _StoredLeaf(NamedTuple):
    """Description of a saved leaf for `copies_to_host`."""

    name: str
    device_host_byte_limiter: _Limiter
    enable_pinned_host_transfer: bool


def copy_tree_to_host(tree: Any, context: v1.Context) -> tuple[Any, list[HostCopy]]:
    """Copies the parts that this process writes, for checksums.

    They are of a tree that Orbax saves.

    Returns:
      The tree to give to Orbax, whose NumPy arrays are copies, and the copies for the checksums.
    """
    limiter, pinned = _Limiter(transfer_limit(context)), goes_through_pinned_memory(context)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    # Orbax would copy NumPy arrays once more, were they not of this class.
    copied = context.memory.deepcopy_host_arrays
    leaves = [CopiedArray.of(leaf) if copied and isinstance(leaf, np.ndarray) else leaf for _, leaf in paths]
    infos = [_StoredLeaf(storage_key(path), limiter, pinned) for path, _ in paths]
    start_transfers(leaves, infos)
    held: list[HostCopy] = []
    for (path, leaf), value, info in zip(paths, leaves, infos, strict=True):
        held.extend(copies_to_host(value, info, ocp.SaveArgs(dtype=stored_dtype(context, path, leaf))))
    return jax.tree_util.tree_unflatten(treedef, leaves), held


class RunningSave:
    """Save that Orbax writes in the background.

    Awaiting it adds our files.

    Attributes:
      commit_futures: Orbax's, which cancels them where a save is stopped.
    """

    def __init__(self, written: Awaitable[None], finish: Callable[[], Coroutine[Any, Any, None]]):
        self.commit_futures: Sequence[Any] = getattr(written, "commit_futures", ())
        self._finish = finish

    def __await__(self) -> Generator[Any, None, None]:
        return self._finish().__await__()


async def finish(
    directory: v1.path.PathAwaitingCreation, written: Awaitable[None], held: list[HostCopy] | None, processes: Any
) -> None:
    """Waits for Orbax's files and adds ours.

    Args:
      directory: of the checkpointable.
      written: what Orbax's handler returned.
      held: what is to be summed; None for no checksums.
      processes: options of the context, by which Orbax knows the primary and the active processes.

    Raises:
      CheckpointIOError: something could not be written; nothing is left of the save.
    """
    path = await directory.await_creation()
    primary = v1.multihost.is_primary_host(processes.primary_host)
    try:
        if held is not None:
            await asyncio.to_thread(_publish_sums, path, held)
        # All processes wait for one another in there: their checksums are sent when it returns.
        await written
        if primary:
            await asyncio.to_thread(_complete, path, held is not None, processes)
    except BaseException as error:
        await asyncio.to_thread(_end, written)
        if primary:
            await asyncio.to_thread(remove_failed, path)
        raise_as_checkpoint_error(first_failure(error), path)


def _end(written: Awaitable[None]) -> None:
    """Waits until Orbax writes no more.

    If it is cancelled, it leaves writers behind for a while.
    """
    for future in getattr(written, "commit_futures", ()):
        with contextlib.suppress(Exception):
            future.result()


def discard_refused(directory: epath.Path) -> None:
    """Removes what Orbax has made for a save that is refused.

    A `Checkpointer` has its directories made meanwhile; the free functions make none before all is accepted.
    """
    if TEMPORARY_MARK in directory.name:
        remove_failed_once_made(directory)


def _publish_sums(directory: epath.Path, held: list[HostCopy]) -> None:
    sums = SaveSums(later=False)
    sum_copies(held, sums)
    publish_sums(directory, sums)


def _complete(directory: epath.Path, has_sums: bool, processes: Any) -> None:
    if has_sums:
        write_published_sums(directory, processes.primary_host, processes.active_processes)
    sync_tree(directory)
