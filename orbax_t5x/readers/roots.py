"""Directories without marks: steps by items, and roots of runs."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.readers.detect import (
    PathProbe,
    Subdirectories,
    owner_of_directory,
    probe_path,
    subdirectories,
    two_owners,
)
from orbax_t5x.readers.flax_msgpack.root import has_step_files, newest_file
from orbax_t5x.readers.format_table import all_formats
from orbax_t5x.readers.orbax.steps import (
    MSGPACK_FILE,
    is_step,
    is_step_directory,
    is_t5x_step,
    newest_directory,
    newest_first,
    step_of_name,
    steps_named,
)


class NewestOfRoot(NamedTuple):
    """The checkpoint in a directory: path, step by its name, format."""

    path: str
    step: int | None = None
    format: str | None = None


def newest_of_root(probe: PathProbe) -> NewestOfRoot | None:
    """Finds a directory's step: its own or the newest of a root."""
    files = probe.files
    if not files.can_list:
        return _newest_file(probe)
    try:
        found = subdirectories(probe.path)
        if is_step_directory(probe.path, found):  # by its subfolders: files of steps go before
            return _newest_file(probe) if has_step_files(probe, found) else NewestOfRoot(probe.path, format="orbax")
        newest = newest_directory(probe.path, newest_first(probe.path, found), found)
    except CheckpointIOError as error:
        if error.errno != errno.EACCES or not files.is_remote:
            raise
        return _newest_file(probe)
    if newest is None:
        return _newest_file(probe)
    _require_one_format(probe, found, newest)
    return NewestOfRoot(newest, step_of_name(os.path.basename(newest)))


def _newest_file(probe: PathProbe) -> NewestOfRoot | None:
    """Finds the newest file of a root of Flax."""
    newest = newest_file(probe)
    return newest and NewestOfRoot(probe.files.locate(newest.name), newest.step)


def _require_one_format(probe: PathProbe, found: Subdirectories, newest: str) -> None:
    """Proves that the steps of a root are of one format."""
    if has_step_files(probe, found):
        of_orbax = {_owner_of_step(newest): repr(os.path.basename(newest))}
        raise two_owners(of_orbax | {"flax_msgpack": "files of steps"}, probe.path)
    is_t5x, files = is_t5x_step(newest), probe.files
    for _, name in sorted(steps_named(found.inside), reverse=True):
        if files.exists(f"{name}/{MSGPACK_FILE}") is is_t5x:
            continue
        directory = os.path.join(probe.path, name)
        if is_t5x_step(directory) is not is_t5x and is_step(directory):
            owner, other = _owner_of_step(newest), _owner_of_step(directory)
            if other != owner:
                raise two_owners({owner: repr(os.path.basename(newest)), other: repr(name)}, probe.path)


def _owner_of_step(directory: str) -> str:
    """Names the format of a finished step, Orbax's by default."""
    owner = owner_of_directory(probe_path(directory), all_formats())
    return "orbax" if owner is None else owner.name
