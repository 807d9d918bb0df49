"""Positions of datasets' iterators, saved beside the train state.

The iterator writes and reads its own file, `train_ds-<shard>-of-<shards>` in the item `dataset`; in a job of several
processes each has a folder. A native T5X checkpoint has the file beside its arrays.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from orbax_t5x.errors import CheckpointNotFoundError

ITEM = "dataset"
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DatasetPosition:
    """An iterator, and the shard of the data that this process reads.

    Attributes:
      iterator: has `save(filename)` and `restore(filename)`, or is a `tf.data.Iterator`.
      shard, shards: of the data.
      is_first: this process saves and restores its shard.
    """

    iterator: Any
    shard: int
    shards: int
    is_first: bool

    @property
    def name(self) -> str:
        """The file's name in the item."""
        file = f"train_ds-{self.shard:03}-of-{self.shards:03}"
        count = jax.process_count()
        return file if count == 1 else f"process_{jax.process_index()}-of-{count}/{file}"

    def save(self, directory: epath.Path) -> None:
        """Writes the position; returns when it is written."""
        if not self.is_first:
            return
        file = directory / self.name
        file.parent.mkdir(parents=True, exist_ok=True)
        if hasattr(self.iterator, "save"):
            self.iterator.save(str(file))
        else:
            _tracked(self.iterator).write(str(file))

    def restore(self, step: epath.Path) -> None:
        """Reads the position from a step.

        Raises:
          CheckpointNotFoundError: the step has an item for states and no position.
        """
        if not self.is_first:
            return
        file = step / ITEM / self.name
        if not _exists(file):
            native = step / self.name
            if _exists(native):
                file = native
            elif (step / "checkpoint").exists() and not (step / "state").exists():
                _logger.warning("%s: a native T5X checkpoint without %s; the dataset begins anew", step, self.name)
                return
            else:
                raise CheckpointNotFoundError(
                    f"the dataset's position {ITEM}/{self.name} is missing; set "
                    "utils.RestoreCheckpointConfig.restore_dataset = False (in a resume: "
                    "utils.SaveCheckpointConfig.save_dataset = False) to begin the dataset anew",
                    path=str(step),
                )
        if hasattr(self.iterator, "restore"):
            self.iterator.restore(str(file))
        else:
            _tracked(self.iterator).read(str(file)).assert_consumed()


def _exists(file: epath.Path) -> bool:
    """Tests for a file, or for a TensorFlow checkpoint of this prefix."""
    return file.exists() or (file.parent.is_dir() and any(file.parent.glob(f"{file.name}*")))


def _tracked(iterator: Any) -> Any:
    """Wraps a `tf.data.Iterator` in TensorFlow's own checkpoint."""
    return importlib.import_module("tensorflow").train.Checkpoint(ds=iterator)


class DatasetHandler(ocp.CheckpointHandler):
    """A handler of the item `dataset`; the iterator saves synchronously."""

    def save(self, directory: epath.Path, args: DatasetSave) -> None:
        """Implements `ocp.CheckpointHandler.save`."""
        args.position.save(directory)

    def restore(self, directory: epath.Path, args: DatasetRestore) -> None:
        """Implements `ocp.CheckpointHandler.restore`."""
        args.position.restore(directory.parent)


@ocp.args.register_with_handler(DatasetHandler, for_save=True)
@dataclasses.dataclass
class DatasetSave(ocp.args.CheckpointArgs):
    """The argument of a save."""

    position: DatasetPosition


@ocp.args.register_with_handler(DatasetHandler, for_restore=True)
@dataclasses.dataclass
class DatasetRestore(ocp.args.CheckpointArgs):
    """The argument of a restore."""

    position: DatasetPosition
