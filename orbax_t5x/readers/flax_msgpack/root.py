"""Roots of `flax.training.checkpoints`, with a file per step.

A file is called `checkpoint_3`, or has another prefix. Flax numbers steps by whole numbers or by others, such as a
metric. It writes under the name `checkpoint_tmp` and renames, so that a file with a number is finished.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers.detect import PathProbe
from orbax_t5x.readers.format_table import MSGPACK_MAP

_PREFIX = "checkpoint_"
# As Python writes numbers; a sign that follows a letter or a digit belongs to the prefix.
_NAME = re.compile(
    r"(?P<prefix>.*?)(?P<number>(?:(?<![A-Za-z0-9])-)?[0-9]{1,18}(?:\.[0-9]{1,18})?(?:e[-+]?[0-9]{1,3})?)",
    re.ASCII | re.DOTALL,
)


class StepFile(NamedTuple):
    """File of a step: the number in its name, and the name."""

    number: Decimal
    name: str

    @property
    def step(self) -> int | None:
        """The step, or None."""
        return int(self.number) if self.number >= 0 and self.number == self.number.to_integral_value() else None


def step_files(probe: PathProbe) -> list[StepFile]:
    """Lists a directory's files of steps, oldest first.

    Files of the prefix `checkpoint_` are Flax's by their names, so that a damaged file is never passed over for an
    older file. Files of another prefix are steps if the newest of them begins as Flax's files do.
    """
    by_prefix = _files_by_prefix(probe)
    own = by_prefix.get(_PREFIX)
    if own and probe.look(own[-1].name).kind != "special":
        return own
    roots = [files for files in by_prefix.values() if probe.has_bytes(MSGPACK_MAP, files[-1].name)]
    if len(roots) > 1:
        newest = ", ".join(sorted(repr(files[-1].name) for files in roots))
        raise UnsupportedCheckpointError(
            f"steps of several prefixes: open one of {newest} by its path", path=probe.path
        )
    return roots[0] if roots else []


def newest_file(probe: PathProbe) -> StepFile | None:
    """Returns the file of the newest step, or None."""
    files = step_files(probe)
    same = [file.name for file in files if file.number == files[-1].number]
    if len(same) > 1:
        raise UnsupportedCheckpointError(
            f"the files {', '.join(map(repr, same))} are all step {files[-1].number}; open one of them by its own path",
            path=probe.path,
        )
    return files[-1] if files else None


def has_step_files(probe: PathProbe) -> bool:
    """Returns True if a directory has files of steps that begin as Flax's files do."""
    return any(probe.has_bytes(MSGPACK_MAP, files[-1].name) for files in _files_by_prefix(probe).values())


def _files_by_prefix(probe: PathProbe) -> dict[str, list[StepFile]]:
    """Groups files with numbered names by prefix, oldest first."""
    files: dict[str, list[StepFile]] = {}
    matches = [match for match in map(_NAME.fullmatch, probe.names) if match is not None]
    if not matches or not probe.files.can_list:
        return files
    directories = set(probe.subdirectories.inside)
    for match in matches:
        if match[0] not in directories:
            files.setdefault(match["prefix"], []).append(StepFile(Decimal(match["number"]), match[0]))
    for same_prefix in files.values():
        same_prefix.sort()
    return files
