"""Checkpointer of the shape of T5X's `CheckpointerConstructor`.

A T5X job changes to it by a gin line.

T5X's training loop makes it with a train state, a partitioner and a directory, and calls `save`, `restore` and
`restore_from_tf_checkpoint`. What is saved is T5X's own Orbax layout: `checkpoint_<step>/state`, which T5X's Orbax
manager and stock Orbax read. What is restored has any format.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.restoring.api import restore
from orbax_t5x.transforms import Translate
from orbax_t5x.trees.flat import unflatten

_ITEM = "state"


class Checkpointer:
    """Checkpointer with T5X's constructor and methods, over `orbax_t5x.restore` and an `ocp.CheckpointManager`.

    In gin: `utils.SaveCheckpointConfig.checkpointer_cls = @orbax_t5x.integrations.t5x.Checkpointer`, and
    `utils.RestoreCheckpointConfig.checkpointer_cls` likewise.

    Attributes:
      checkpoints_dir: where steps are saved.

    Args:
      train_state: concrete or abstract; what is restored has its structure.
      partitioner: T5X's: its `mesh`, and `get_mesh_axes(train_state)`, which gives a `PartitionSpec` per leaf.
      checkpoints_dir: where steps are saved, and restored from without a path.
      dataset_iterator: None; a dataset's state is saved by its own handler, beside the train state.
      keep: how many steps are kept; None: all.
      save_dtype: of the floating-point parameters in what is saved; None: as they are.
      restore_dtype: of the floating-point parameters in what is restored; None: as in the train state.
      keep_dataset_checkpoints: taken, as T5X passes it, and not used.

    Raises:
      ValueError: a dataset's iterator is given.
    """

    def __init__(
        self,
        train_state: Any,
        partitioner: Any,
        checkpoints_dir: str | os.PathLike[str],
        dataset_iterator: Any = None,
        *,
        keep: int | None = None,
        save_dtype: Any = None,
        restore_dtype: Any = None,
        keep_dataset_checkpoints: int | None = None,
    ):
        if dataset_iterator is not None:
            raise ValueError(
                "a dataset's iterator is not saved here: set save_dataset=False, and save it by a handler of its own"
            )
        self.checkpoints_dir = os.fspath(checkpoints_dir)
        self._train_state = train_state
        self._partitioner = partitioner
        self._keep = keep
        self._save_dtype = save_dtype
        self._restore_dtype = restore_dtype
        self._opened: list[Checkpoint] = []

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        # Not before it is needed: T5X makes checkpointers that only restore, with no directory of their own.
        options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", max_to_keep=self._keep)
        root = epath.Path(self.checkpoints_dir)
        return ocp.CheckpointManager(root, item_handlers={_ITEM: TrainStateHandler()}, options=options)

    # -- saving

    def save(
        self,
        train_state: Any,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        *,
        concurrent_gb: int | None = None,
    ) -> None:
        """Saves the train state's step and waits until it is written.

        Args:
          train_state: what to save.
          state_transformation_fns: applied to its state dict first.
          concurrent_gb: taken, as T5X passes it, and not used: Orbax bounds its own memory.
        """
        args = TrainStateSave(train_state, dtype=self._save_dtype, transforms=tuple(state_transformation_fns))
        self._manager.save(int(train_state.step), args=ocp.args.Composite(**{_ITEM: args}), force=True)
        self._manager.wait_until_finished()

    def all_steps(self) -> list[int]:
        """Returns the steps in the directory, in order."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the newest step, or None."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Waits for saves and releases the manager."""
        self._manager.close()

    # -- restoring

    def restore(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        fallback_state: Any = None,
        lazy_parameters: bool = False,
    ) -> Any:
        """Restores a train state in the partitioner's shardings.

        Args:
          step: of the directory; None: the newest.
          path: of a checkpoint of any format, instead of the directory.
          state_transformation_fns: T5X's functions, or transforms of `orbax_t5x.transforms`. Whether they are applied
            is for T5X to say, by their keyword `is_resuming`.
          fallback_state: values, by the state dict, of leaves that the checkpoint lacks.
          lazy_parameters: gives lazy arrays instead; nothing is read then, and nothing is transformed.

        Raises:
          CheckpointError: as `orbax_t5x.restore` does.
        """
        source: Any = self.checkpoints_dir if path is None else path
        if step is not None and path is None:
            source = os.path.join(self.checkpoints_dir, f"checkpoint_{step}")
        if lazy_parameters:
            self._opened.append(open_checkpoint(source))  # the arrays read from it
            return self._train_state.restore_state(unflatten(dict(self._opened[-1].leaves)))
        fns, is_resuming = _unbound(state_transformation_fns)
        return restore(
            source,
            self._target(),
            fns,
            fallback=fallback_state,
            is_resuming=is_resuming,
            strict=False,
            dtype=self._restore_dtype,
        )

    def restore_from_tf_checkpoint(
        self, path_or_dir: str | os.PathLike[str], strict: bool = True, translator: Any = None
    ) -> Any:
        """Restores a train state from Mesh TensorFlow's checkpoint, without TensorFlow."""
        return restore(
            path_or_dir,
            self._target(),
            Translate(translator),
            strict=strict,
            dtype=self._restore_dtype,
            is_resuming=False,
        )

    def convert_from_tf_checkpoint(
        self,
        path_or_dir: str | os.PathLike[str],
        *,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        concurrent_gb: int | None = None,
        translator: Any = None,
    ) -> None:
        """Restores a Mesh TensorFlow checkpoint, and saves it as a step."""
        self.save(self.restore_from_tf_checkpoint(path_or_dir, translator=translator), state_transformation_fns)

    def _target(self) -> Any:
        axes = self._partitioner.get_mesh_axes(self._train_state)

        def abstract(leaf: Any, spec: PartitionSpec | None) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self._partitioner.mesh, spec or PartitionSpec())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        leaves, treedef = jax.tree_util.tree_flatten(self._train_state)
        return treedef.unflatten(map(abstract, leaves, treedef.flatten_up_to(axes)))


def _unbound(functions: Sequence[Callable[..., Any]]) -> tuple[list[Callable[..., Any]], bool]:
    """Returns functions without T5X's bound `is_resuming`, and its value."""
    found = []
    is_resuming = False
    for function in functions:
        if isinstance(function, functools.partial) and "is_resuming" in function.keywords:
            is_resuming = is_resuming or bool(function.keywords["is_resuming"])
            rest = {name: value for name, value in function.keywords.items() if name != "is_resuming"}
            bound = function.args or rest
            function = functools.partial(function.func, *function.args, **rest) if bound else function.func
        found.append(function)
    return found, is_resuming
