"""Directories without marks: steps by items, and roots of runs."""

from __future__ import annotations

import errno
from typing import NamedTuple

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.readers.detect import PathProbe, two_owners
from orbax_t5x.readers.flax_msgpack.root import has_step_files, newest_file
from orbax_t5x.readers.orbax.steps import (
    MSGPACK_FILE,
    Step,
    finished_steps,
    is_finished,
    is_step_directory,
    is_t5x_step,
    newest_step,
    steps_named,
)


class NewestOfRoot(NamedTuple):
    """The checkpoint in a directory: path, step by its name, format."""

    path: str
    step: int | None = None
    format: str | None = None


def newest_of_root(probe: PathProbe) -> NewestOfRoot | None:
    """Finds a directory's step: its own or the newest of a root."""
    root = probe.files
    if not root.can_list:
        return None
    try:
        newest = None
        if is_step_directory(root):
            if not has_step_files(probe):
                return NewestOfRoot(probe.path, format="orbax")
        else:
            newest = newest_step(root, finished_steps(root))
        if newest is None:  # files of steps are no step's, but a root's
            file = newest_file(probe)
            return file and NewestOfRoot(root.locate(file.name), file.step)
        path = root.locate(newest.name)
        _require_one_format(probe, newest)
        return NewestOfRoot(path, newest.step)
    except CheckpointIOError as error:
        if error.errno == errno.EACCES and root.is_remote:  # a bucket whose files can be read, and not listed
            return None
        raise


def _require_one_format(probe: PathProbe, newest: Step) -> None:
    """Raises if the steps of a root are of several formats; in a bucket, the newest step decides."""
    root = probe.files
    is_t5x = is_t5x_step(root, newest.name)
    owner, rival = ("t5x", "orbax") if is_t5x else ("orbax", "t5x")
    if has_step_files(probe):
        raise two_owners({owner: repr(newest.name), "flax_msgpack": "files of steps"}, probe.path)
    if root.is_remote or (not is_t5x and root.exists(f"{newest.name}/{MSGPACK_FILE}")):
        return  # the file is early Orbax's, or damaged
    for step in sorted(steps_named(probe.subdirectories.inside), reverse=True):
        # Of most steps, one file is looked for.
        if root.exists(f"{step.name}/{MSGPACK_FILE}") is is_t5x or is_t5x_step(root, step.name) is is_t5x:
            continue
        if is_finished(root, step.name):
            raise two_owners({owner: repr(newest.name), rival: repr(step.name)}, probe.path)
