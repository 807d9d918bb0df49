"""A plan's views as a plain Orbax item.

Arrays are written block by block into an OCDBT database, as Orbax has one for each process of a save. At the end Orbax
itself writes metadata, strings and constants, and merges the database into the item's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from orbax_t5x.concurrency import reader_pool, run_in_pool
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.durability import sync_directory
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.orbax_names import RecordedType, write_spec
from orbax_t5x.handlers.save.commit import check_merged, sync_tree
from orbax_t5x.handlers.save.item_sums import write_sums
from orbax_t5x.handlers.save.prepare import PreparedSave, prepare_save
from orbax_t5x.handlers.save.type_table import StreamingTypeTable
from orbax_t5x.handlers.type_handlers.checksums import RunningSaves
from orbax_t5x.handlers.type_handlers.lazy_array import GlobalTypeHandlers, StreamedLeaf
from orbax_t5x.handlers.type_handlers.stream import COPIES_PER_BLOCK, BlockOutput, TensorStoreArray, own_context
from orbax_t5x.lazy import Box
from orbax_t5x.lazy.chunks import block_bytes, chunk_of
from orbax_t5x.operations.convert.output_format import (
    OutputFormat,
    PlannedArray,
    WriteOptions,
    WriteSummary,
    nothing_to_write,
)
from orbax_t5x.provenance.records import checked_lineage, skipped_from_metadata
from orbax_t5x.readers import Limits, open_checkpoint
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.trees.flat import unflatten, unwrapped
from orbax_t5x.trees.pytree_names import leaf_name

# Orbax walks its trees by recursion, and opening refuses deeper names.
_MOST_LEVELS = Limits.nesting


def _only_this() -> ocp.options.MultiprocessingOptions:
    """Returns Orbax's options of an operation by this process alone."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"orbax_t5x_convert_{process}"
    )


class OrbaxFormat(OutputFormat):
    """An Orbax item."""

    # By zstd. Weights become a tenth smaller; only constants become smaller than this.
    most_compression = 20

    def __init__(self, plan: RestorePlan, writing: WriteOptions):
        tree = with_sequences(_tree(plan), plan)
        if isinstance(tree, Mapping) and not tree:
            raise nothing_to_write(plan)
        args = TrainStateSave(
            tree, writing.dtype, on_unsupported=writing.on_unsupported, memory_limit_bytes=writing.memory_limit_bytes
        )
        records = checked_lineage(plan.provenance)
        limit = memory_limit(writing.memory_limit_bytes)
        self._context = own_context(limit)
        self._sums: list[_BlockSum] = []
        self._prepared = prepare_save(args, records, StreamingTypeTable(GlobalTypeHandlers()), deferred=True)
        self.arrays: Sequence[PlannedArray] = list(_arrays(self._prepared, block_bytes(limit, COPIES_PER_BLOCK)))

    def prepare(self, blocks: Path) -> None:
        """Does nothing: the database is made with its first block."""

    def output(self, blocks: Path, array: PlannedArray) -> BlockOutput:
        info = ocp.type_handlers.ParamInfo(
            name=array.key, parent_dir=epath.Path(blocks), is_ocdbt_checkpoint=True, ts_context=self._context
        )
        spec = write_spec(info, array.view.shape, array.chunk, array.view.dtype, _database_number())
        return _SummedArray(array, TensorStoreArray(spec, self._context), self._sums)

    def finish(self, blocks: Path, directory: Path) -> WriteSummary:
        databases = list(blocks.iterdir())  # none for a tree without arrays
        with _UncountedCheckpointer(_ItemHandler(), multiprocessing_options=_only_this()) as checkpointer:
            checkpointer.save(directory, args=_ItemSave(self._prepared, databases, self._sums))
        sync_directory(directory)
        with open_checkpoint(directory, format="orbax") as written:
            skipped = skipped_from_metadata(written.metadata, path=written.path)
            kept = [view for name, view in written.leaves.items() if name not in skipped]
            return WriteSummary(len(kept), sum(view.nbytes for view in kept), skipped)


class _BlockSum(NamedTuple):
    """Checksum of a written box of an array."""

    array: PlannedArray
    box: Box
    crc: int


class _SummedArray(BlockOutput):
    """Array in a database whose boxes are summed as they are written."""

    def __init__(self, array: PlannedArray, output: TensorStoreArray, sums: list[_BlockSum]):
        self._array = array
        self._output = output
        self._sums = sums

    async def write(self, box: Box, data: np.ndarray) -> None:
        crc = await run_in_pool(reader_pool(), array_crc, data)
        await self._output.write(box, data)
        self._sums.append(_BlockSum(self._array, box, crc))


class _UncountedCheckpointer(ocp.Checkpointer):
    """Checkpointer of a single process, whose save the other processes of a job do not count."""

    def synchronize_next_awaitable_signal_operation_id(self) -> None:
        """Does nothing: barriers of later saves and loads need equal counts on all processes."""


@dataclasses.dataclass(eq=False)
class _ItemSave(ocp.args.CheckpointArgs):
    """Arguments of an item's save.

    Its prepared tree, and the database of its arrays with their checksums.
    """

    prepared: PreparedSave
    databases: Sequence[Path]
    sums: Sequence[_BlockSum]


class _ItemHandler(ocp.CheckpointHandler):
    """Orbax's handler for pytrees.

    It finds the streamed arrays written already.
    """

    typestr: Any = RecordedType()

    def __init__(self) -> None:
        self._saves = RunningSaves()
        registry: Any = StreamingTypeTable(GlobalTypeHandlers(), self._saves)
        self._orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=_only_this())

    def save(self, directory: epath.Path, args: _ItemSave) -> None:
        """Writes what the database lacks, and moves it into the item."""
        prepared = args.prepared
        item = ocp.args.PyTreeSave(
            item=prepared.tree, save_args=prepared.save_args, custom_metadata=prepared.custom_metadata
        )
        with self._saves.of(directory, later=False) as sums:
            self._orbax.save(directory, args=item)
            for database in args.databases:
                os.rename(database, directory / database.name)
            for array, box, crc in args.sums:
                sums.add(array.key, array.view.shape, array.view.dtype.name, box, crc)
            write_sums(directory, [sums.encode()])

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        """Raises NotImplementedError: a conversion restores nothing."""
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Merges the database, and makes everything durable."""
        self._orbax.finalize(directory)
        check_merged(directory)
        sync_tree(directory)

    def close(self) -> None:
        """Closes Orbax's handler."""
        self._orbax.close()


ocp.args.register_with_handler(_ItemHandler, for_save=True, for_restore=True)(_ItemSave)


def _database_number() -> int:
    """Returns a number that is not that of the database which Orbax itself writes."""
    return jax.process_index() + 1


def _arrays(prepared: PreparedSave, most: int) -> Iterator[PlannedArray]:
    """Yields a tree's streamed arrays."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(prepared.tree)[0]:
        if isinstance(leaf, StreamedLeaf):
            key = ".".join(leaf_name((key,)) for key in path)
            yield PlannedArray(leaf.name, key, leaf.view, chunk_of(leaf.view, most, leaf.chunks))


def _tree(plan: RestorePlan) -> Any:
    """Nests the planned views, or returns the unnamed view."""
    views = {entry.name: entry.view for entry in plan.entries}
    for name in views:
        if name.count("/") >= _MOST_LEVELS:
            raise UnsupportedCheckpointError(
                f"a name of {name.count('/') + 1} levels begins {name[:80]!r}; {_MOST_LEVELS} are written at most, so "
                "that they can be opened again"
            )
    try:
        tree = plan.target.rebuild(views)
    except ValueError:
        tree = unflatten(views, join_clashes=True)
    return unwrapped(tree) if plan.target.kind == "everything" else tree


def with_sequences(tree: Any, plan: RestorePlan) -> Any:
    """Turns dicts of a planned tree into lists as in the source."""
    sequences: set[str] = set()
    for prefix, checkpoint in plan.checkpoints.items():
        sequences.update("/".join(part for part in (prefix, name) if part) for name in checkpoint.sequences)
    return _ListBuilder(sequences, _origins(plan)).of("", tree) if sequences else tree


def _origins(plan: RestorePlan) -> dict[str, set[str | None]]:
    """Maps each container of the result to its source containers."""
    origins: dict[str, set[str | None]] = {}
    for entry in plan.entries:
        for source in entry.sources:
            for container, origin in _pairs(entry.name.split("/"), source.split("/")):
                origins.setdefault(container, set()).add(origin)
    return origins


def _pairs(name: list[str], source: list[str]) -> list[tuple[str, str | None]]:
    """Pairs containers above a leaf and above its source."""
    shorter = min(len(name), len(source))
    begin = next((depth for depth in range(shorter) if name[depth] != source[depth]), shorter)
    end = next((depth for depth in range(shorter) if name[-1 - depth] != source[-1 - depth]), shorter)
    pairs: list[tuple[str, str | None]] = []
    for depth in range(len(name)):
        origin = None
        if depth < begin:
            origin = "/".join(name[:depth])
        elif depth >= len(name) - end:
            origin = "/".join(source[: depth + len(source) - len(name)])
        pairs.append(("/".join(name[:depth]), origin))
    return pairs


class _ListBuilder:
    """Converter of a tree's dicts to lists."""

    def __init__(self, sequences: set[str], origins: dict[str, set[str | None]]):
        self._sequences = sequences
        self._origins = origins

    def of(self, name: str, node: Any) -> Any:
        """Converts a node of the tree with all below it."""
        if type(node) is not dict or not node:
            return node
        made = {key: self.of(f"{name}/{key}" if name else key, child) for key, child in node.items()}
        # None and empty containers keep their names, and so does what only has such children.
        if not self._origins.get(name, {name}) <= self._sequences:
            return made
        keys = [str(index) for index in range(len(made))]
        return [made[key] for key in keys] if made.keys() == set(keys) else made
