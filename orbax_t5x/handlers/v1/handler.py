"""Handler of Orbax v1: Orbax writes trees, our plan loads.

Orbax makes a handler anew for each use, from only its class. So the state is the class's: the options of the context
(`orbax_t5x.v1.context`), and the history of what was loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import orbax.checkpoint.experimental.v1 as v1
from etils import epath

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.restore.stock import read_metadata
from orbax_t5x.handlers.run_lineage import RestoredHistory
from orbax_t5x.handlers.save.prepare import PreparedSave, prepare_save
from orbax_t5x.handlers.v1.abstract_state import AbstractTrainState
from orbax_t5x.handlers.v1.loading import load_into
from orbax_t5x.handlers.v1.orbax_v1_names import (
    active_context,
    is_partial,
    recorded_type,
    recording,
    writes_directories,
)
from orbax_t5x.handlers.v1.saving import RunningSave, copy_tree_to_host, discard_refused, finish
from orbax_t5x.lazy import LazyArray
from orbax_t5x.provenance.records import to_metadata
from orbax_t5x.restoring.targets import require_finite
from orbax_t5x.text.wording import leaves_text
from orbax_t5x.trees.flat import EndlessTreeError
from orbax_t5x.trees.named_leaves import is_train_state, require_levels
from orbax_t5x.trees.pytree_names import leaf_name


@dataclasses.dataclass(frozen=True, eq=False)
class SaveOptions:
    """Options of all saves of a context.

    The fields are those of `orbax_t5x.args.TrainStateSave`.
    """

    checksums: bool = True
    provenance: Sequence[Mapping[str, Any]] | None = None
    on_unsupported: Literal["error", "skip"] = "error"


class V1TrainStateHandler(v1.CheckpointableHandler[Any, Any]):
    """Handler that saves plain Orbax and loads any format.

    It saves train states and other trees. It is public as `orbax_t5x.v1.TrainStateHandler`; `orbax_t5x.v1.context`
    registers it. Saving is `PyTreeHandler`'s; added are checks before anything is written, checksums, and the record of
    provenance. A T5X train state is written by its state dict. Loading into an `AbstractTrainState`, or into a T5X
    train state, is `orbax_t5x.restore`; anything else is loaded by `PyTreeHandler`.
    """

    options: ClassVar[SaveOptions] = SaveOptions()
    history: ClassVar[RestoredHistory] = RestoredHistory()
    _recorded: ClassVar[type[V1TrainStateHandler] | None] = None

    def __new__(cls) -> V1TrainStateHandler:
        """Makes an instance of a class that has the name of `PyTreeHandler`.

        Orbax records the name of the class of the handler that saved. Anyone loads what is saved here, so what is
        recorded is the name of the handler that anyone has.
        """
        if "_recorded" not in cls.__dict__:
            module, _, name = recorded_type().rpartition(".")
            cls._recorded = type(cls.__name__, (cls,), {"__module__": module, "__qualname__": name})
        return object.__new__(cls._recorded or cls)

    def __init__(self) -> None:
        self._context = active_context()
        self._orbax = v1.handlers.PyTreeHandler(context=self._context)

    # -- saving

    async def save(self, directory: v1.path.PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Checks and copies a state; returns the rest of the save.

        See `v1.CheckpointableHandler`.

        Raises:
          UnsupportedCheckpointError: leaves that Orbax cannot store, by name; nothing was written.
        """
        if is_partial(checkpointable):
            provenance = self.options.provenance
            lineage = self.history.to_save(directory.path, provenance, checkpointable, primary=self._is_primary())
            with recording(checkpointable.handler, to_metadata(lineage, is_partial=True)):
                return await checkpointable.save(directory)
        try:
            prepared = self._prepare(directory, checkpointable)
            tree, copies = prepared.tree, None
            if self.options.checksums:
                tree, copies = copy_tree_to_host(tree, self._context)
            with recording(self._orbax, prepared.custom_metadata):
                written = await self._orbax.save(directory, tree)
        except BaseException:
            if self._is_primary():
                discard_refused(directory.path)
            raise
        self.history.note_saved(directory.path, prepared.lineage, checkpointable)
        rest = partial(finish, directory, written, copies, self._context.multiprocessing)
        return RunningSave(written, rest)

    def _prepare(self, directory: v1.path.PathAwaitingCreation, tree: Any) -> PreparedSave:
        saved = tree.state_dict() if is_train_state(tree) else tree
        require_finite(saved)
        leaves = jax.tree_util.tree_leaves_with_path(saved)
        lazy = [leaf_name(path) for path, leaf in leaves if isinstance(leaf, LazyArray)]
        if lazy:
            fix = "read them with .get(), or save with orbax_t5x.TrainStateHandler, which streams them"
            count = f"{len(lazy)} of {leaves_text(len(leaves))} hold a lazy array"
            raise UnsupportedCheckpointError(f"{count}, which v1 cannot stream: {fix}", leaf=lazy[0] or None)
        lineage = self.history.to_save(directory.path, self.options.provenance, tree, primary=self._is_primary())
        args = TrainStateSave(saved, on_unsupported=self.options.on_unsupported)
        types = _StoredTypes(self._orbax, [leaf for _, leaf in leaves])
        in_directories = writes_directories(self._context)
        return prepare_save(args, lineage, types, deferred=True, in_directories=in_directories)

    def _is_primary(self) -> bool:
        return v1.multihost.is_primary_host(self._context.multiprocessing.primary_host)

    # -- loading

    async def load(self, directory: epath.Path, abstract_checkpointable: Any | None = None) -> Awaitable[Any]:
        """Loads into an abstract tree, or everything if it is None.

        See `v1.CheckpointableHandler`.

        Raises:
          CheckpointError: what `orbax_t5x.restore` raises.
        """
        if self.is_abstract_handleable(abstract_checkpointable):
            abstract = abstract_checkpointable
            if not isinstance(abstract, AbstractTrainState):
                abstract = AbstractTrainState(abstract)
            # Here and not in the background: what is raised there, `load_checkpointables` hides in an error that calls
            # the handler incompatible.
            return _LoadedValue(load_into(directory, abstract, self._context, self.history))
        return self._load_saved(directory, await self._orbax.load(directory, abstract_checkpointable))

    async def _load_saved(self, directory: epath.Path, loading: Awaitable[Any]) -> Any:
        loaded = await loading
        if self._is_primary():
            self.history.note_stock(directory, read_metadata(directory), loaded)
        return loaded

    # -- the rest

    async def metadata(self, directory: epath.Path) -> Any:
        """Returns Orbax's metadata of the checkpointable."""
        return await self._orbax.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Tests if a tree can be saved.

        True also for a tree that contains itself: the error is that of `save`.
        """
        try:
            require_levels(checkpointable)
        except EndlessTreeError:
            return True
        if is_train_state(checkpointable) or is_partial(checkpointable):
            return True
        return self._orbax.is_handleable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Tests if a plan loads the tree.

        Orbax's own handler loads into all other trees.
        """
        return isinstance(abstract_checkpointable, AbstractTrainState) or is_train_state(abstract_checkpointable)


class AnyTreeHandler(V1TrainStateHandler):
    """Handler that also claims trees no handler can save.

    `orbax_t5x.v1.context` has Orbax try it last.

    Orbax's own error for such a tree is that it has no handler. Here the error names the leaves that cannot be stored,
    or they are left out.
    """

    def is_handleable(self, checkpointable: Any) -> bool:
        """Tests for a tree with leaves of any type.

        It is not a leaf itself.
        """
        try:
            is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(checkpointable))
        except Exception:  # of a stranger's class, or of keys that cannot be sorted
            return False
        return not is_leaf or isinstance(checkpointable, LazyArray)


class _StoredTypes:
    """Table of the leaf types that Orbax's tree handler stores."""

    def __init__(self, orbax: v1.handlers.PyTreeHandler, leaves: Sequence[Any]):
        one_of = {type(leaf): leaf for leaf in leaves}
        self._stored = {cls: orbax.is_handleable(leaf) for cls, leaf in one_of.items()}

    def has(self, cls: type) -> bool:
        return self._stored[cls]


class _LoadedValue:
    """Awaitable of a loaded value.

    It does not warn if it is never awaited because something else failed.
    """

    def __init__(self, value: Any):
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._value
