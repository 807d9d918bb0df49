"""The handler for Orbax's `CheckpointManager` and `Checkpointer`: Orbax writes, our plan reads.

Saving, finalizing and metadata are `ocp.PyTreeCheckpointHandler`'s, so that what is written is a plain Orbax
checkpoint; added are checks before anything is written, lazy leaves that are streamed, a record of provenance,
checksums beside the arrays, and that a failed save leaves nothing. Restoring with a target is `orbax_t5x.restore`, on
any format; without one it is stock Orbax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.handlers.args import TrainStateRestore, TrainStateSave
from orbax_t5x.handlers.orbax_names import RecordedType, registry_making
from orbax_t5x.handlers.restore.stock import HandledLeaves, read_metadata, restore_whole, types_of_users, value_types
from orbax_t5x.handlers.run_lineage import RestoredHistory
from orbax_t5x.handlers.save import cleanup
from orbax_t5x.handlers.save.commit import GuardedCommit, check_merged, sync_tree
from orbax_t5x.handlers.save.item_sums import publish_sums, write_published_sums
from orbax_t5x.handlers.save.prepare import PreparedSave, prepare_save
from orbax_t5x.handlers.save.type_table import StreamingTypeTable
from orbax_t5x.handlers.type_handlers.checksums import RunningSaves, SaveSums
from orbax_t5x.handlers.type_handlers.lazy_array import GlobalTypeHandlers
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.provenance import records as provenance
from orbax_t5x.restoring.api import open_plan
from orbax_t5x.restoring.lineage import Caller
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.processes import ProcessGroup

_GB = 10**9  # Orbax's


class TrainStateHandler(ocp.AsyncCheckpointHandler):
    """Handler that saves plain Orbax and restores any format.

    It saves a train state, or any pytree. Use it as any handler: `ocp.CheckpointManager(root, item_handlers=handler)`,
    `ocp.Checkpointer(handler)`, or in a handler registry; with `orbax_t5x.args.TrainStateSave` and `TrainStateRestore`.
    A save records the transforms behind the state, which this handler restored or saved here before.

    Example:
      >>> with ocp.CheckpointManager(directory, item_handlers=ot.TrainStateHandler()) as manager:
      ...     manager.save(0, args=ot.args.TrainStateSave({"w": jnp.ones(3)}))
      ...     manager.wait_until_finished()
      ...     manager.restore(0, args=ot.args.TrainStateRestore({"w": np.zeros(3, np.float32)}))
      True
      {'w': array([1., 1., 1.], dtype=float32)}
    """

    # Any: Orbax declares a class method, and this answers differently for the class and for an instance.
    typestr: Any = RecordedType()

    def __init__(
        self,
        *,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        save_concurrent_gb: int | None = None,
        restore_concurrent_gb: int | None = None,
        save_device_host_concurrent_gb: int | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        type_handler_registry: ocp.type_handlers.TypeHandlerRegistry | None = None,
        checksums: bool = True,
        **options: Any,
    ):
        """Initializes a handler.

        The arguments are those of `ocp.PyTreeCheckpointHandler`, with its defaults.

        `restore_concurrent_gb` bounds restores with a target too: their `memory_limit_bytes` is at most that, and that
        where it is not given. The handlers of `type_handler_registry` restore leaves of types that are not arrays, and
        the leaves that they stored. `checksums` of what is saved are written beside it, and checked by restores and by
        `orbax_t5x.verify`. They are made of the copy on the host that Orbax writes from; where that is in pinned
        memory, as on GPUs, the state is copied to the host a second time.
        """
        processes = multiprocessing_options or ocp.options.MultiprocessingOptions()
        self._processes = processes
        self._primary_host = processes.primary_host
        self._active_processes = processes.active_processes
        self._given_registry = type_handler_registry
        self._saves = RunningSaves() if checksums else None
        self._registry = StreamingTypeTable(type_handler_registry or GlobalTypeHandlers(), self._saves)
        self._orbax = ocp.PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            save_concurrent_gb=save_concurrent_gb,
            restore_concurrent_gb=restore_concurrent_gb,
            save_device_host_concurrent_gb=save_device_host_concurrent_gb,
            multiprocessing_options=processes,
            type_handler_registry=self._registry,
            **options,
        )
        self._use_ocdbt = use_ocdbt
        self._restore_limit = None if restore_concurrent_gb is None else int(restore_concurrent_gb * _GB)
        self.history = RestoredHistory.of_registry(registry_making(self))

    # -- saving

    async def async_save(self, directory: epath.Path, args: TrainStateSave) -> list[Any]:
        """Checks and copies a state; a future does the rest.

        It copies what is on devices.

        Raises:
          UnsupportedCheckpointError: leaves that Orbax cannot store; nothing is left of the save.
          RestorePlanError: transforms or `dtype` do not fit the tree, or it could not be opened with its names.
        """
        self._begin(directory, in_background=True)
        try:
            with self._registry.remembering(), self._summing(directory, later=True) as sums:
                prepared = self._prepare(directory, args, sums, deferred=False)
                futures = await self._orbax.async_save(directory, args=_orbax_args(args, prepared))
        except BaseException:
            if self._is_primary():
                cleanup.remove_refused(directory)
            raise
        self.history.note_saved(directory, prepared.lineage, args.item)
        commit = GuardedCommit(futures or (), directory, self._is_primary())
        if sums is not None:
            commit.meanwhile, commit.finish = sums.sum_kept, partial(publish_sums, directory, sums)
        return [commit]

    def save(self, directory: epath.Path, args: TrainStateSave) -> None:
        """Saves, and returns when all is on disk; see `async_save`.

        An interrupt stops it and leaves nothing behind.
        """
        self._begin(directory, in_background=False)
        with self._summing(directory, later=False) as sums:
            try:
                prepared = self._prepare(directory, args, sums, deferred=True)
            except BaseException:
                self._clean_up(directory)
                raise
            self._save(directory, args, prepared, sums)
        self.history.note_saved(directory, prepared.lineage, args.item)

    def _save(self, directory: epath.Path, args: TrainStateSave, prepared: PreparedSave, sums: SaveSums | None) -> None:
        try:
            self._orbax.save(directory, args=_orbax_args(args, prepared))
            prepared.writer.run_deferred()
            if sums is not None:
                publish_sums(directory, sums)
        except BaseException as error:
            self._clean_up(directory)
            raise_as_checkpoint_error(error, directory)

    def finalize(self, directory: epath.Path) -> None:
        """Merges the processes' files and makes them durable.

        Orbax calls it on a single process.
        """
        try:
            self._orbax.finalize(directory)
            check_merged(directory)
            if self._saves is not None:
                write_published_sums(directory, self._primary_host, self._active_processes)
            sync_tree(directory)
            cleanup.note_ended(directory)
        except BaseException as error:
            self._clean_up(directory)
            raise_as_checkpoint_error(error, directory)

    def _summing(self, directory: epath.Path, *, later: bool) -> contextlib.AbstractContextManager[SaveSums | None]:
        return contextlib.nullcontext() if self._saves is None else self._saves.of(directory, later=later)

    def _prepare(
        self, directory: epath.Path, args: TrainStateSave, sums: SaveSums | None, *, deferred: bool
    ) -> PreparedSave:
        if args.custom_metadata is not None and provenance.KEY in args.custom_metadata:
            raise ValueError(f"custom_metadata: the key {provenance.KEY!r} is taken; pass provenance= instead")
        return prepare_save(
            args,
            self.history.to_save(directory, args.provenance, args.item, primary=self._is_primary()),
            self._registry,
            deferred=deferred,
            sums=sums,
            processes=self._active_processes,
            in_directories=not self._use_ocdbt,
        )

    def _begin(self, directory: epath.Path, *, in_background: bool) -> None:
        if self._is_primary():
            cleanup.note_begun(directory, in_background=in_background)

    def _clean_up(self, directory: epath.Path) -> None:
        if self._is_primary():
            cleanup.remove_failed_once_made(directory)

    def _is_primary(self) -> bool:
        return self._primary_host is None or ocp.multihost.process_index() == self._primary_host

    # -- restoring

    @property
    def provenance(self) -> tuple[Mapping[str, Any], ...]:
        """The record of the last restored state, for `provenance=`."""
        return self.history.last

    @guarded
    def restore(self, directory: epath.Path, args: TrainStateRestore | None = None) -> Any:
        """Restores into the target of `args`, or as stock Orbax.

        Raises:
          RestorePlanError: keywords without a target, or what `orbax_t5x.restore` raises.
        """
        args = TrainStateRestore() if args is None else args
        given = args.given()
        if "target" not in given:
            if given:
                raise _without_target(args, given, directory)
            return self._stock_restore(directory)
        processes = args.multiprocessing_options or self._processes
        group = ProcessGroup.of(processes)
        own = args.source is None
        registry, types = (self._registry, self._types_of_users(directory)) if own else (None, {})
        handled = HandledLeaves(args.target, registry, types)
        caller = Caller("own step" if own else "restore", keeps_lineage=True)
        with contextlib.ExitStack() as stack:
            with group.sharing_errors():
                options = RestoreOptions.among(vars(args)).within(self._restore_limit)
                options.multiprocessing_options = processes
                source = directory if own else args.source
                plan = open_plan(source, handled.target, args.transforms, options, stack, caller)
                handled.check_plan(plan, directory)
                values = handled.restore(self._orbax, directory)
            restored = handled.put_into(plan.run(options), values)
        self.history.note(directory, plan.provenance, restored)
        return restored

    def _types_of_users(self, directory: epath.Path) -> dict[str, str]:
        """Returns the recorded types of leaves of users' handlers.

        By name; the given table has these handlers.
        """
        if self._given_registry is None:
            return {}
        return types_of_users(value_types(read_metadata(directory)), self._given_registry)

    def _stock_restore(self, directory: epath.Path) -> Any:
        metadata = read_metadata(directory)
        restored = restore_whole(self._orbax, directory, metadata)
        self.history.note_stock(directory, metadata, restored)
        return restored

    # -- the rest

    @guarded
    def metadata(self, directory: epath.Path) -> Any:
        """Returns Orbax's metadata of the item."""
        return self._orbax.metadata(directory)

    def close(self) -> None:
        """Closes Orbax's handler."""
        self._orbax.close()


def _orbax_args(args: TrainStateSave, prepared: PreparedSave) -> ocp.args.PyTreeSave:
    return ocp.args.PyTreeSave(
        item=prepared.tree,
        save_args=prepared.save_args,
        ocdbt_target_data_file_size=args.ocdbt_target_data_file_size,
        custom_metadata=prepared.custom_metadata,
    )


def _without_target(args: TrainStateRestore, given: Sequence[str], directory: epath.Path) -> RestorePlanError:
    if args.item is None or isinstance(args.item, str):
        keywords = ", ".join(f"{name}=" for name in given)
        message = f"{keywords} given without a target: stock Orbax would restore"
        fix = "pass the target, or target=None for everything as NumPy"
    else:  # what stock Orbax's arguments call so
        message = "item= is a tree, and here it is the name of one of several items of a step"
        fix = "pass the tree as target="
    return RestorePlanError([Problem("target", None, message, Fix.in_program(fix))], path=directory)


ocp.args.register_with_handler(TrainStateHandler, for_save=True)(TrainStateSave)
ocp.args.register_with_handler(TrainStateHandler, for_restore=True)(TrainStateRestore)
