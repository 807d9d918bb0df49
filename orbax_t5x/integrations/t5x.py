"""Checkpoint managers for T5X's training scripts; a job changes by gin.

`CheckpointManager` has the constructor and methods of T5X's `OrbaxCheckpointManagerInterface`, `Checkpointer` those of
its native one (`use_orbax = False`). What is saved is T5X's own Orbax layout, `checkpoint_<step>/state`, which T5X and
stock Orbax read; what is restored has any format. Nothing on disk changes before the first `save`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from orbax_t5x.integrations.t5x_manager import TrainStateManager, Transformations


class CheckpointManager(TrainStateManager):
    """Checkpoint manager that T5X's training scripts make and call; see `TrainStateManager`.

    In gin: `utils.SaveCheckpointConfig.checkpoint_manager_cls = @orbax_t5x.integrations.t5x.CheckpointManager`, and
    `utils.RestoreCheckpointConfig.checkpoint_manager_cls` likewise; a resume needs `register()`, too.
    """


class Checkpointer:
    """Checkpointer for T5X's native way, `use_orbax = False`.

    A save returns when it is written, and leaves nothing open; a step that exists is skipped.

    Attributes:
      checkpoints_dir: where steps are saved.

    Args:
      train_state, partitioner, dataset_iterator, save_dtype, restore_dtype, keep: see `TrainStateManager`.
      checkpoints_dir: where steps are saved, and restored from without a path; "" in one that only restores.
      options: `force_keep_period`, `metric_name_to_monitor`, `metric_mode` and `keep_checkpoints_without_metrics`, as
        T5X's `SaveBestCheckpointer` has them; `keep_dataset_checkpoints` is taken and not used.
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
        **options: Any,
    ):
        self.checkpoints_dir = os.fspath(checkpoints_dir)
        dtypes = {"save_dtype": save_dtype, "restore_dtype": restore_dtype}
        self._manager = TrainStateManager(
            self.checkpoints_dir, train_state, partitioner, dataset_iterator, keep=keep, **dtypes, **options
        )

    def save(
        self, train_state: Any, state_transformation_fns: Transformations = (), *, concurrent_gb: int | None = None
    ) -> None:
        """Saves the train state's step; `concurrent_gb` is not used.

        Raises:
          ValueError: the checkpointer has no directory.
        """
        del concurrent_gb
        if not self.checkpoints_dir:
            raise ValueError("checkpoints_dir is empty: this Checkpointer only restores")
        try:
            self._manager.save(train_state, state_transformation_fns)
        finally:
            self._manager.close()

    def all_steps(self) -> list[int]:
        """Lists the steps in order."""
        return list(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the newest step, or None."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Releases checkpoints that lazy parameters read from."""
        self._manager.close()

    def restore(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        state_transformation_fns: Transformations = (),
        fallback_state: Any = None,
        lazy_parameters: bool = False,
    ) -> Any:
        """Restores a train state; see `TrainStateManager.restore`."""
        return self._manager.restore(step, path, fallback_state, state_transformation_fns, lazy_parameters)

    def restore_from_tf_checkpoint(
        self, path_or_dir: str | os.PathLike[str], strict: bool = True, translator: Any = None
    ) -> Any:
        """Restores a train state from a Mesh TensorFlow checkpoint, without TensorFlow."""
        return self._manager.restore_from_tf_checkpoint(path_or_dir, strict, translator)

    def convert_from_tf_checkpoint(
        self,
        path_or_dir: str | os.PathLike[str],
        *,
        state_transformation_fns: Transformations = (),
        concurrent_gb: int | None = None,
        translator: Any = None,
    ) -> None:
        """Restores a Mesh TensorFlow checkpoint, and saves it as a step."""
        state = self.restore_from_tf_checkpoint(path_or_dir, translator=translator)
        self.save(state, state_transformation_fns, concurrent_gb=concurrent_gb)


def register() -> Callable[[], None]:
    """Makes `CheckpointManager` the default of T5X's save and restore configs.

    T5X's `train` builds the restore config of a resume in Python, with the dataclass's default manager, and refuses a
    save config of another class. This call sets the default of `checkpoint_manager_cls` in
    `t5x.utils.SaveCheckpointConfig` and `t5x.utils.RestoreCheckpointConfig`: the class attribute, the dataclass field
    and the default of `__init__`. Nothing else of T5X is touched.

    Returns:
      A function that puts back what was there.

    Raises:
      ImportError: T5X is not installed.
    """
    utils = importlib.import_module("t5x.utils")
    undo = [
        _set_default(config, "checkpoint_manager_cls", CheckpointManager)
        for config in (utils.SaveCheckpointConfig, utils.RestoreCheckpointConfig)
    ]

    def unregister() -> None:
        for function in undo:
            function()

    return unregister


def _set_default(config: Any, name: str, value: Any) -> Callable[[], None]:
    """Changes the default of a dataclass's field; returns the undoing function."""
    init, field = inspect.unwrap(config.__init__), config.__dataclass_fields__[name]
    parameters = inspect.signature(init).parameters.values()
    with_default = [one.name for one in parameters if one.default is not one.empty and one.kind is not one.KEYWORD_ONLY]
    old = init.__defaults__, init.__kwdefaults__, field.default, getattr(config, name)
    if name in with_default:
        place = with_default.index(name)
        init.__defaults__ = (*init.__defaults__[:place], value, *init.__defaults__[place + 1 :])
    else:
        init.__kwdefaults__ = {**(init.__kwdefaults__ or {}), name: value}
    field.default = value
    setattr(config, name, value)

    def put_back() -> None:
        init.__defaults__, init.__kwdefaults__, field.default, shown = old
        setattr(config, name, shown)

    return put_back


# gin replaces a class that it meets in a config by a subclass, and T5X compares classes by identity; a class that gin
# decorated in place stays itself.
try:
    gin: Any = importlib.import_module("gin")
except ImportError:
    gin = None
if gin is not None:
    for _class in (CheckpointManager, Checkpointer):
        gin.configurable(_class, module=__name__)
