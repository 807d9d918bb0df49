"""Which subdirectories of a root are steps, and which subdirectories of a step are items: by names and one look inside
each.

A finished step is a directory whose name is a number, perhaps padded and perhaps after a prefix and `_`, and that holds
the metadata of at least one item; step 0 is one. A rename makes a local step visible, so a temporary suffix, or a name
that is no number for any other reason, means unfinished; an empty directory or one whose deletion was interrupted has
no item left. No file is opened here.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.readers.detect.probe import is_file, subdirectories
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.storage.paths import Root

STEP_METADATA_FILE = "_CHECKPOINT_METADATA"
MANIFEST_FILE = "manifest.ocdbt"
# T5X's own step directories and the first Orbax items keep their tree in a msgpack file of this name.
MSGPACK_FILE = "checkpoint"
_STEP_NAME = re.compile(r"(?:.+_)?(?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)
_TEMPORARY = ".orbax-checkpoint-tmp"


class Step(NamedTuple):
    """A finished step: its number, and the name of its directory in the root."""

    step: int
    name: str


def step_of_name(name: str) -> int | None:
    """The step that a directory's name tells, or None: `3`, `00000003`, `checkpoint_3`."""
    match = _STEP_NAME.fullmatch(name)
    return int(match["step"]) if match and _TEMPORARY not in name else None


def is_temporary(directory: str) -> bool:
    """Whether a directory, or the one it lies in, has the name of an unfinished save."""
    parent, name = os.path.split(directory)
    return _TEMPORARY in name or _TEMPORARY in os.path.basename(parent)


def is_item(directory: str) -> bool:
    """Whether a directory holds the metadata of one saved tree."""
    return is_file(directory, METADATA_FILE)


def item_names(directory: str) -> list[str]:
    """The subdirectories of a step that hold arrays, sorted; links that lead out of the step are none.

    Raises:
      CheckpointGoneError: the step is not there.
    """
    names = subdirectories(directory).inside
    return sorted(name for name in names if _TEMPORARY not in name and is_item(os.path.join(directory, name)))


def is_step_directory(directory: str) -> bool:
    """Whether a directory is one step, by Orbax's marker or by its items.

    Without the marker (early Orbax), items that all have names of steps make it a root of trees that were saved without
    items, unless its own name is that of a step too.
    """
    if is_file(directory, STEP_METADATA_FILE):
        return True
    items = item_names(directory)
    own = step_of_name(os.path.basename(directory))
    return bool(items) and (own is not None or any(step_of_name(name) is None for name in items))


def is_step(directory: str) -> bool:
    """Whether a directory with the name of a step is a finished one."""
    try:
        return is_item(directory) or is_file(directory, MSGPACK_FILE) or bool(item_names(directory))
    except CheckpointGoneError:
        return False  # deleted since its parent was listed, by whoever keeps only the newest steps
    except CheckpointIOError as error:
        if error.errno != errno.EACCES:
            raise
        return False


def finished_steps(root: str) -> list[Step]:
    """The finished steps of a root, oldest first.

    A link that leads out of the root and has the name of a step is one, unseen: whoever wants it is told that it leads
    out, and nobody gets an older step for it.
    """
    inside, outside = subdirectories(root)
    finished = [step for step in _steps_named(inside) if is_step(os.path.join(root, step.name))]
    return sorted([*finished, *_steps_named(outside)])


def _steps_named(names: list[str]) -> list[Step]:
    return [Step(step, name) for name in names if (step := step_of_name(name)) is not None]


def newest_directory(root: str, steps: list[Step]) -> str:
    """The directory of the last of some finished steps.

    Raises:
      UnsupportedCheckpointError: two directories have that number.
      UnsafeCheckpointError: it is a symlink that leads out of the root.
    """
    same = [step.name for step in steps if step.step == steps[-1].step]
    if len(same) > 1:
        raise UnsupportedCheckpointError(
            f"the directories {', '.join(map(repr, same))} are all step {steps[-1].step}; "
            "open one of them by its own path",
            path=root,
        )
    return Root(root).locate(steps[-1].name)
