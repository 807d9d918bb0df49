"""A plan's views as a plain Orbax item.

Arrays are written block by block into OCDBT databases, one for each journal, as Orbax has one for each process of a
save. At the end Orbax itself writes metadata, strings and constants, and merges the databases into the item's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_t5x.concurrency import Block, LoopThread, for_each_block, reader_pool, run_in_pool
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
from orbax_t5x.handlers.type_handlers.stream import COPIES_PER_BLOCK, TensorStoreArray, own_context
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.lazy.chunks import block_bytes, chunk_of
from orbax_t5x.operations.convert.journal import JournalEntry, journals
from orbax_t5x.operations.convert.ocdbt_files import remove_lock_files, remove_other_keys, remove_unreferenced
from orbax_t5x.operations.convert.output_format import (
    BLOCKS_DIRECTORY,
    OutputFormat,
    WriteOptions,
    WriteSummary,
    nothing_to_write,
)
from orbax_t5x.operations.convert.partition import PlannedArray, PlannedBlock
from orbax_t5x.provenance.records import checked_lineage, skipped_from_metadata
from orbax_t5x.readers import Limits, open_checkpoint
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.readers.orbax.steps import PROCESS_PREFIX
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.trees.flat import unflatten, unwrapped
from orbax_t5x.trees.pytree_names import leaf_name

# Orbax walks its trees by recursion, and opening refuses deeper names.
_MOST_LEVELS = Limits.name_levels


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
        self._limit = memory_limit(writing.memory_limit_bytes)
        self._prepared = prepare_save(args, records, StreamingTypeTable(GlobalTypeHandlers()), deferred=True)
        self.arrays: Sequence[PlannedArray] = list(_arrays(self._prepared, block_bytes(self._limit, COPIES_PER_BLOCK)))

    def prepare(self, work: Path) -> None:
        databases = work / BLOCKS_DIRECTORY
        databases.mkdir(exist_ok=True)
        for other in [entry for entry in work.iterdir() if entry.is_dir() and entry != databases]:
            # A conversion was killed when its databases were in the item already.
            for name in map(_database_name, journals(work)):
                if (other / name).is_dir() and not (databases / name).exists():
                    (other / name).rename(databases / name)
            shutil.rmtree(other)

    def store(self, work: Path, number: int) -> _Database:
        return _Database(work / BLOCKS_DIRECTORY, number, own_context(self._limit))

    def check(self, work: Path, number: int, blocks: Mapping[PlannedBlock, int]) -> set[PlannedBlock]:
        directory = work / BLOCKS_DIRECTORY / _database_name(number)
        durable: set[PlannedBlock] = set()
        if blocks and directory.is_dir():
            remove_lock_files(directory)
            with LoopThread() as thread:
                thread.run(
                    self._check(_Database(work / BLOCKS_DIRECTORY, number, own_context(self._limit)), blocks, durable)
                )
        if durable:
            remove_unreferenced(directory)
        else:
            shutil.rmtree(directory, ignore_errors=True)
        return durable

    async def _check(self, database: _Database, blocks: Mapping[PlannedBlock, int], durable: set[PlannedBlock]) -> None:
        async def check(block: PlannedBlock, crc: int) -> None:
            if await database.crc(block) == crc:
                durable.add(block)

        reads = (
            Block(functools.partial(check, block, crc), COPIES_PER_BLOCK * block.nbytes, block.nbytes, block.array.name)
            for block, crc in blocks.items()
        )
        await for_each_block(reads, self._limit)
        if durable:
            await remove_other_keys(
                database.spec(next(iter(durable)).array)["kvstore"], database.context, _keys(durable)
            )

    def finish(
        self, work: Path, directory: Path, entries: Mapping[PlannedBlock, JournalEntry], numbers: Collection[int]
    ) -> WriteSummary:
        databases = [work / BLOCKS_DIRECTORY / _database_name(number) for number in numbers]
        with ocp.Checkpointer(_ItemHandler(), multiprocessing_options=_only_this()) as checkpointer:
            checkpointer.save(directory, args=_ItemSave(self._prepared, databases, entries))
        sync_directory(directory)
        with open_checkpoint(directory, format="orbax") as written:
            skipped = skipped_from_metadata(written.metadata, path=written.path)
            kept = [view for name, view in written.leaves.items() if name not in skipped]
            return WriteSummary(len(kept), sum(view.nbytes for view in kept), skipped)

    def note_finished(self) -> None:
        """Counts the save of `finish` as Orbax does."""
        # In its barriers all processes must have counted alike.
        with ocp.Checkpointer(_ItemHandler(), multiprocessing_options=_only_this()) as checkpointer:
            checkpointer.synchronize_next_awaitable_signal_operation_id()


class _Database:
    """Database of a journal; see `BlockStore`."""

    def __init__(self, directory: Path, number: int, context: ts.Context):
        self.context = context
        self._directory = epath.Path(directory)
        self._number = number

    def spec(self, array: PlannedArray) -> dict[str, Any]:
        """Returns the TensorStore spec of an array in this database."""
        info = ocp.type_handlers.ParamInfo(
            name=array.key, parent_dir=self._directory, is_ocdbt_checkpoint=True, ts_context=self.context
        )
        return write_spec(info, array.view.shape, array.chunk, array.view.dtype, self._number)

    def output(self, array: PlannedArray) -> TensorStoreArray:
        return TensorStoreArray(self.spec(array), self.context)

    def sync(self, arrays: Sequence[PlannedArray]) -> None:
        """Does nothing: a write returns when the database has it on disk."""

    async def crc(self, block: PlannedBlock) -> int | None:
        """Computes a written block's checksum, or returns None."""
        try:
            opened = await ts.open(ts.Spec(self.spec(block.array)), open=True, context=self.context)
            return await run_in_pool(reader_pool(), array_crc, await opened[box_slices(block.box)].read())
        except (ValueError, OSError):
            return None


@dataclasses.dataclass(eq=False)
class _ItemSave(ocp.args.CheckpointArgs):
    """Arguments of an item's save.

    Its prepared tree, and the databases and blocks with its arrays.
    """

    prepared: PreparedSave
    databases: Sequence[Path]
    entries: Mapping[PlannedBlock, JournalEntry]


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
        """Writes what the databases lack, and moves them into the item."""
        prepared = args.prepared
        item = ocp.args.PyTreeSave(
            item=prepared.tree, save_args=prepared.save_args, custom_metadata=prepared.custom_metadata
        )
        with self._saves.of(directory, later=False) as sums:
            self._orbax.save(directory, args=item)
            for database in args.databases:
                os.rename(database, directory / database.name)
            for block, entry in args.entries.items():
                view = block.array.view
                sums.add(block.array.key, view.shape, view.dtype.name, block.box, entry.crc)
            write_sums(directory, [sums.encode()])

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        """Raises NotImplementedError: a conversion restores nothing."""
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Merges the databases, and makes everything durable."""
        self._orbax.finalize(directory)
        check_merged(directory)
        sync_tree(directory)

    def close(self) -> None:
        """Closes Orbax's handler."""
        self._orbax.close()


ocp.args.register_with_handler(_ItemHandler, for_save=True, for_restore=True)(_ItemSave)


def _database_name(number: int) -> str:
    """Names a database's directory as Orbax does."""
    return f"{PROCESS_PREFIX}{number}"


def _keys(blocks: set[PlannedBlock]) -> set[str]:
    """Lists the keys of blocks and of their arrays' metadata."""
    keys: set[str] = set()
    for block in blocks:
        # A tree that is one array has no key.
        below = f"{block.array.key}/" if block.array.key else ""
        keys.add(f"{below}.zarray")
        indices = [start // size for (start, _), size in zip(block.box, block.array.chunk, strict=True)]
        keys.add(f"{below}{'.'.join(map(str, indices)) or '0'}")
    return keys


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
