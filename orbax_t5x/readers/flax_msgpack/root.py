"""Roots of `flax.training.checkpoints`, with a file per step.

A file is called `checkpoint_3`, or has another prefix. Flax numbers steps by whole numbers or by others, such as a
metric. It writes under the name `checkpoint_tmp` and renames, so that a file with a number is finished.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers.detect import PathProbe, Subdirectories, is_msgpack_map, subdirectories

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

    Files of the prefix `checkpoint_` are Flax's by their names, so that a damaged one is never passed over for an older
    one. Files of another prefix are where the newest of them begins as Flax's do.
    """
    found = _by_prefix(probe)
    if _PREFIX in found and probe.inside(found[_PREFIX][-1].name).kind != "special":
        return found[_PREFIX]
    others = [files for _, files in sorted(found.items()) if is_msgpack_map(probe.inside(files[-1].name))]
    if len(others) > 1:
        newest = ", ".join(repr(files[-1].name) for files in others)
        raise UnsupportedCheckpointError(
            f"steps of several prefixes: open one of {newest} by its path", path=probe.path
        )
    return others[0] if others else []


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


def has_step_files(probe: PathProbe, found: Subdirectories) -> bool:
    """Tests if a root of step directories has Flax's step files, too."""
    newest = (files[-1].name for files in _by_prefix(probe, found).values())
    return any(is_msgpack_map(probe.inside(name)) for name in newest)


def _by_prefix(probe: PathProbe, found: Subdirectories | None = None) -> dict[str, list[StepFile]]:
    """Groups files with numbered names by prefix, oldest first."""
    names = probe.names if found is None else probe.names.difference(found.inside, found.outside)
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    directories = set(subdirectories(probe.path).inside) if matches and found is None else set()
    files: dict[str, list[StepFile]] = {}
    for match in matches:
        if match[0] not in directories:
            files.setdefault(match["prefix"], []).append(StepFile(Decimal(match["number"]), match[0]))
    for same in files.values():
        same.sort()
    return files
