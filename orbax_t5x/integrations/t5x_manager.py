"""Steps of a run of T5X: saved, restored and kept.

What is saved is T5X's own Orbax layout, `checkpoint_<step>/state`, which T5X and stock Orbax read; what is restored has
any format. T5X's functions, prefix, partitioner and dataset are obeyed, and errors name its settings.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from orbax_t5x.errors import Fix, RestorePlanError
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.integrations.t5x_dataset import ITEM as DATASET
from orbax_t5x.integrations.t5x_dataset import DatasetHandler, DatasetPosition, DatasetSave
from orbax_t5x.integrations.t5x_retention import Retention
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.restoring.api import restore
from orbax_t5x.text.code import calls_code
from orbax_t5x.transforms import Translate
from orbax_t5x.trees.flat import unflatten

_ITEM = "state"
_PREFIX = "checkpoint"
# Modules of T5X that have had `get_checkpoint_prefix`.
_PREFIX_MODULES = ("t5x.checkpoints", "t5x.checkpoint_utils", "t5x.checkpoints_utils")
Transformations = Sequence[Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """A leaf, as T5X's functions for saves see it.

    Attributes:
      name: '/'-joined.
      mesh_axes: its `PartitionSpec`, or None.
      shape: of the whole array.
    """

    name: str
    mesh_axes: PartitionSpec | None
    shape: tuple[int, ...]

    @property
    def axes(self) -> PartitionSpec | None:
        """`mesh_axes`, as T5X's native checkpointer names it."""
        return self.mesh_axes


class TrainStateManager:
    """Manager of the steps of a run, over `orbax_t5x.restore` and an `ocp.CheckpointManager`.

    Attributes:
      directory: of the run; the step or the bundle in evaluations.

    Args:
      directory: of the run.
      train_state: concrete or abstract; what is restored has its structure.
      partitioner: T5X's: `mesh`, `get_mesh_axes(train_state)` and `get_data_layout()`.
      dataset_iterator: saved and restored beside the state, if given.
      save_dtype: of the floating-point parameters in what is saved; None: as they are.
      restore_dtype: of the floating-point parameters in what is restored; None: as in the train state.
      keep: how many steps are kept; None: all.
      period: of saves without `force`.
      checkpoint_steps, keep_dataset_checkpoints: taken, as T5X passes them, and not used.
      force_keep_period: multiples of this step are kept for ever.
      metric_name_to_monitor: the `keep` best steps by this metric of the run's TensorBoard files are kept; `train/loss`
        is the tag `loss` in `train`.
      metric_mode: "max" or "min".
      keep_checkpoints_without_metrics: steps without the metric are kept for ever; the newest always is.

    Raises:
      ValueError: an option has no such value.
      ImportError: a metric is monitored, and tensorboard is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        train_state: Any,
        partitioner: Any,
        dataset_iterator: Any = None,
        save_dtype: Any = None,
        restore_dtype: Any = None,
        keep: int | None = None,
        period: int | None = 1,
        checkpoint_steps: Sequence[int] | None = None,
        keep_dataset_checkpoints: int | None = None,
        force_keep_period: int | None = None,
        metric_name_to_monitor: str | None = None,
        metric_mode: str = "max",
        keep_checkpoints_without_metrics: bool = True,
    ):
        del checkpoint_steps, keep_dataset_checkpoints
        self.directory = epath.Path(directory)
        self._train_state = train_state
        self._partitioner = partitioner
        self._save_dtype = _dtype(save_dtype)
        self._restore_dtype = _dtype(restore_dtype)
        self._period = period or 1
        self._prefix = checkpoint_prefix()
        self._position = _position(partitioner, dataset_iterator)
        self._retention = Retention(
            os.fspath(self.directory),
            keep=keep,
            force_keep_period=force_keep_period,
            metric=metric_name_to_monitor,
            mode=metric_mode,
            keeps_unmeasured=keep_checkpoints_without_metrics,
        )
        self._opened: list[Checkpoint] = []
        self._made: ocp.CheckpointManager | None = None

    # -- steps

    def all_steps(self) -> Sequence[int]:
        """Lists the steps in order, unfinished saves included."""
        if self._made is not None:
            return sorted(self._made.all_steps())
        if not self.directory.is_dir():
            return []
        names = ocp.path.step.standard_name_format(step_prefix=self._prefix)
        return sorted(found.step for found in names.find_all(self.directory))

    def latest_step(self) -> int | None:
        """Returns the newest step, or None."""
        return max(self.all_steps(), default=None)

    def should_save(self, step: int) -> bool:
        """Tests if a step is at the period and not saved yet."""
        return step % self._period == 0 and step not in self.all_steps()

    def wait_until_finished(self) -> None:
        """Waits for the save that is under way."""
        if self._made is not None:
            self._made.wait_until_finished()

    def close(self) -> None:
        """Waits for the save that is under way, and releases everything."""
        if self._made is not None:
            self._made.close()
            self._made = None
        while self._opened:
            self._opened.pop().close()

    # -- saving

    def _manager(self) -> ocp.CheckpointManager:
        """Makes Orbax's manager for the first save: evaluations change nothing on disk."""
        if self._made is None:
            options = ocp.CheckpointManagerOptions(
                step_prefix=self._prefix, preservation_policy=self._retention, cleanup_tmp_directories=True
            )
            handlers: dict[str, Any] = {_ITEM: TrainStateHandler()}
            if self._position is not None:
                handlers[DATASET] = DatasetHandler()
            self._made = ocp.CheckpointManager(self.directory, item_handlers=handlers, options=options)
        return self._made

    def save(self, train_state: Any, state_transformation_fns: Transformations = (), force: bool = True) -> bool:
        """Begins to save a step, the train state's.

        Args:
          train_state: what to save.
          state_transformation_fns: T5X's functions for saves, each `(state_dict, parameter_infos) -> (state_dict,
            parameter_infos)`, called in order.
          force: save also between two periods.

        Returns:
          False if the step exists, is being saved, or is not at the period.

        Raises:
          TypeError: a function returns no pair.
        """
        step = int(train_state.step)
        if step in self._manager().all_steps() or not (force or self.should_save(step)):
            return False
        item = train_state
        if state_transformation_fns:
            item = self._transformed(train_state, state_transformation_fns)
        args: dict[str, Any] = {_ITEM: TrainStateSave(item, dtype=self._save_dtype)}
        if self._position is not None:
            args[DATASET] = DatasetSave(self._position)
        return self._manager().save(step, args=ocp.args.Composite(**args), force=True)

    def _transformed(self, train_state: Any, functions: Transformations) -> Any:
        """Applies T5X's functions for saves to the state dict."""
        state_dict = train_state.state_dict()
        axes = _by_name(self._partitioner.get_mesh_axes(train_state).state_dict())
        infos = unflatten(
            {
                name: None if leaf is None else ParameterInfo(name, _spec(axes.get(name)), tuple(np.shape(leaf)))
                for name, leaf in _by_name(state_dict).items()
            }
        )
        for function in functions:
            result = function(state_dict, infos)
            if not isinstance(result, tuple) or len(result) != 2:
                name = getattr(function, "__name__", repr(function))
                raise TypeError(
                    f"{name} returned {type(result).__name__}; a function of SaveCheckpointConfig takes and returns "
                    "(state_dict, parameter_infos)"
                )
            state_dict, infos = result
        return state_dict

    # -- restoring

    def restore(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        fallback_state: Any = None,
        state_transformation_fns: Transformations = (),
        lazy_parameters: bool = False,
    ) -> Any:
        """Restores a train state in the partitioner's shardings.

        Args:
          step: of the directory; None: the newest.
          path: of a checkpoint of any format, instead of a step.
          fallback_state: values, by the state dict, of leaves that the checkpoint lacks.
          state_transformation_fns: T5X's functions, or transforms of `orbax_t5x.transforms`. Whether they are applied
            is for T5X to say, by their keyword `is_resuming`.
          lazy_parameters: gives lazy arrays instead; nothing is read then, and nothing is transformed.

        Raises:
          ValueError: both a step and a path are given.
          CheckpointError: as `orbax_t5x.restore` does, with fixes in the words of T5X's configuration; the dataset's
            position is wanted and missing.
        """
        source = self._source(step, path)
        if lazy_parameters:
            self._opened.append(open_checkpoint(source))  # the arrays read from it
            return self._train_state.restore_state(unflatten(dict(self._opened[-1].leaves)))
        functions, is_resuming = _unbound(state_transformation_fns)
        state = self._restored(source, functions, fallback=fallback_state, is_resuming=is_resuming, strict=False)
        if self._position is not None:
            self._position.restore(epath.Path(source))
        return state

    def restore_from_tf_checkpoint(
        self, path_or_dir: str | os.PathLike[str], strict: bool = True, translator: Any = None
    ) -> Any:
        """Restores a train state from a Mesh TensorFlow checkpoint, without TensorFlow."""
        return self._restored(path_or_dir, [Translate(translator)], strict=strict, is_resuming=False)

    def _source(self, step: int | None, path: str | os.PathLike[str] | None) -> str:
        if step is not None and path is not None:
            raise ValueError(f"step={step} and path={os.fspath(path)!r} name two checkpoints: give one")
        if path is not None:
            return os.fspath(path).rstrip("/") or "/"
        step = self.latest_step() if step is None else step
        return os.fspath(self.directory if step is None else self.directory / f"{self._prefix}_{step}")

    def _restored(self, source: Any, transforms: Sequence[Any], **options: Any) -> Any:
        try:
            return restore(source, self._target(), transforms, dtype=self._restore_dtype, **options)
        except RestorePlanError as error:
            problems = [
                problem if problem.fix is None else dataclasses.replace(problem, fix=_in_words_of_t5x(problem.fix))
                for problem in error.problems
            ]
            raise RestorePlanError(problems, path=error.path) from error

    def _target(self) -> Any:
        """Makes the abstract train state in the partitioner's shardings."""
        mesh = self._partitioner.mesh
        axes = _by_name(self._partitioner.get_mesh_axes(self._train_state).state_dict())

        def abstract(name: str, leaf: Any) -> Any:
            if not hasattr(leaf, "shape"):
                return leaf
            sharding = NamedSharding(mesh, _spec(axes.get(name)) or PartitionSpec())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        leaves = _by_name(self._train_state.state_dict())
        return self._train_state.restore_state(unflatten({name: abstract(name, leaf) for name, leaf in leaves.items()}))


def checkpoint_prefix() -> str:
    """Asks a loaded T5X for the prefix of its steps."""
    for name in _PREFIX_MODULES:
        found = getattr(sys.modules.get(name), "get_checkpoint_prefix", None)
        if found is not None:
            return found()
    return _PREFIX


def _position(partitioner: Any, iterator: Any) -> DatasetPosition | None:
    if iterator is None:
        return None
    layout = partitioner.get_data_layout()
    return DatasetPosition(iterator, layout.shard_id, layout.num_shards, layout.is_first_host_in_replica_set)


def _dtype(dtype: Any) -> Any:
    """Converts a dtype or its name to NumPy's."""
    return None if dtype is None else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _spec(axes: Any) -> PartitionSpec | None:
    return axes if isinstance(axes, PartitionSpec) else None


def _by_name(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings; None and `PartitionSpec` are leaves."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found.update(_by_name(value, f"{prefix}/{name}" if prefix else str(name)))
    return found


_CONFIG = "utils.RestoreCheckpointConfig"
_SETTINGS = {
    "fallback": f"set {_CONFIG}.fallback_to_scratch = True, with an assignment_map",
    "fallback_for": f"set {_CONFIG}.fallback_to_scratch = True, with an assignment_map",
    "dtype": f"set {_CONFIG}.dtype",
    "allow_lossy_cast": f"set {_CONFIG}.dtype",
    "strict": f"set {_CONFIG}.strict = False",
}


def _in_words_of_t5x(fix: Fix) -> Fix:
    """Words a fix with the settings of T5X's configuration."""
    if fix.alternatives:
        return Fix.any_of(*map(_in_words_of_t5x, fix.alternatives))
    ways = [text for name, text in _SETTINGS.items() if name in fix.arguments]
    if fix.transforms:
        ways.insert(0, f"add {calls_code(fix.transforms)} to {_CONFIG}.state_transformation_fns")
    if fix.rule is not None:
        ways.insert(0, f"write the rule of {_CONFIG}.assignment_map as {fix.rule}")
    return dataclasses.replace(fix, text=" and ".join(dict.fromkeys(ways))) if ways else fix


def _unbound(functions: Transformations) -> tuple[list[Callable[..., Any]], bool]:
    """Takes the bound `is_resuming` off functions; returns both."""
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
