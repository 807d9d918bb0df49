"""Order of a checkpoint's files at a place without renames.

Old files are removed in it, too.

At no moment may a reader open what is neither the old checkpoint nor the new one. Files with data make no checkpoint;
those that do are written last, and where old ones are in the way they are removed before anything that they
describe. Then nothing opens for a while: between the two, only what has an old file's name is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from orbax_t5x.operations.convert.safetensors_layout import INDEX_NAME, SINGLE_NAME
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, MANIFEST_FILE, STEP_METADATA_FILE

# The files by which a directory is a checkpoint, in the order of writing. An item of Orbax with a manifest alone would
# be opened without its metadata; with metadata alone it is an error.
_NAMING = (STEP_METADATA_FILE, METADATA_FILE, MANIFEST_FILE, COMMIT_FILE, SINGLE_NAME, INDEX_NAME)


class Stage(NamedTuple):
    """Names to remove in order, then names to write together."""

    remove: Sequence[str]
    write: Sequence[str]


def is_naming(name: str) -> bool:
    """Reports whether a file makes its directory a checkpoint."""
    return name in _NAMING


def upload_order(new: Collection[str], there: Collection[str], same: Collection[str] = ()) -> list[Stage]:
    """Orders the replacement of some files by others.

    Args:
      new: names of the files to write.
      there: names of those that are there.
      same: names of files of data that are there with the right contents.

    Returns:
      Stages, each to be finished before the next.
    """
    naming = [name for name in _NAMING if name in new]
    data = [name for name in new if not is_naming(name) and name not in same]
    fresh = [name for name in data if name not in there]
    in_place = [name for name in data if name in there]
    old_naming = [name for name in reversed(_NAMING) if name in there]
    rest = [name for name in there if name not in new and not is_naming(name)]
    if not in_place and len(naming) == 1 and set(old_naming) <= set(naming):
        # One object is replaced at once.
        return [Stage([], fresh), Stage([], naming), Stage(rest, [])]
    hide = [Stage([name], []) for name in old_naming]
    return [Stage([], fresh), *hide, Stage([*rest, *in_place], in_place), *(Stage([], [name]) for name in naming)]
