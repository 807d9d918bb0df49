"""Errors for paths that cannot be opened, with near names.

They are missing or of no known format.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    Fix,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.paths import LEADS_OUT, whole_url
from orbax_t5x.files.places import files_at
from orbax_t5x.files.schemes import FILE_SUFFIXES
from orbax_t5x.readers.detect.foreign import foreign_format
from orbax_t5x.readers.detect.probe import PathProbe, probe_path
from orbax_t5x.readers.format import Format
from orbax_t5x.readers.orbax.steps import finished_steps, step_of_name
from orbax_t5x.text.wording import listed

# A model of the Hugging Face hub: an organisation and a name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SHARD = re.compile(r".+\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)
# Names of a directory that an error shows.
_SHOWN_NAMES = 8
# Names close to one that does not exist: more than three are no help, and looser ones are other files.
_SHOWN_NEIGHBOURS = 3
_CLOSE = 0.8


def missing_error(path: str, text: str) -> CheckpointError:
    """Makes the error of a missing path, with near names."""
    message = "no such file or directory, and no TensorFlow bundle with this prefix"
    if files_at(path).is_remote:
        return _missing_remotely(path, message)
    if url := whole_url(text):
        return CheckpointNotFoundError(f"no such file or directory; of a URL, open {url!r}", path=path)
    directory = os.path.dirname(path)
    there = _existing(directory)
    if close := _close_names(there, path[len(there) :].strip(os.sep).split(os.sep)[0]):
        where = "beside it:" if there == directory else f"in {there} there is"
        message += f"; {where} {', '.join(map(repr, close))}"
    elif step_of_name(os.path.basename(path)) is not None and (steps := finished_steps(there)):
        newest = [repr(step.name) for step in reversed(steps)]
        message += f"; finished steps beside it, the newest first: {listed(newest, _SHOWN_NEIGHBOURS)}"
    elif _HUB_NAME.fullmatch(text):
        message += f"; for a model of the Hugging Face hub, open {f'hf://{text}'!r}"
    return CheckpointNotFoundError(message, path=path)


def _missing_remotely(url: str, message: str) -> CheckpointError:
    """Makes the same error for a URL."""
    if files_at(url).can_list or os.path.splitext(url)[1] in FILE_SUFFIXES:
        return CheckpointNotFoundError(message, path=url)
    return UnsupportedCheckpointError(
        "nothing of a checkpoint is here, and web servers do not list their files: of a root, open a step by its own "
        "URL; of a step, the item",
        path=url,
    )


def _existing(directory: str) -> str:
    """Returns the directory, or its nearest existing ancestor."""
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    return directory


def _close_names(directory: str, name: str) -> list[str]:
    """Finds names in a directory close to a missing name."""
    names = {entry.removesuffix(".index") for entry in probe_path(directory).names if not _SHARD.fullmatch(entry)}
    return difflib.get_close_matches(name, sorted(names), n=_SHOWN_NEIGHBOURS, cutoff=_CLOSE)


def unrecognised_error(probe: PathProbe, formats: Sequence[Format]) -> CheckpointError:
    """Makes the error of a path that no format recognises."""
    if (foreign := foreign_format(probe)) is not None:
        return UnsupportedCheckpointError(foreign.what, path=probe.path, fix=Fix(foreign.way_out))
    sought = "; ".join(row.sought or row.name for row in formats)
    if probe.kind == "directory":
        is_remote = probe.files.is_remote
        if outside := [name for name in sorted(probe.names) if not is_remote and probe.inside(name).kind == "outside"]:
            return UnsafeCheckpointError(
                f"{LEADS_OUT}, and nothing else here is a checkpoint; open what it leads to by its own path",
                path=os.path.join(probe.path, outside[0]),
            )
        shown = listed(sorted(probe.names), _SHOWN_NAMES)
        message = f"no checkpoint here: looked for {sought}; a root with finished steps; found {shown or 'nothing'}"
        return CheckpointNotFoundError(message, path=probe.path)
    return UnsupportedCheckpointError(
        f"not a checkpoint of a known format: looked for {sought}; the file"
        f"{'' if probe.size is None else f' has {probe.size} bytes and'} begins with {probe.head[:16]!r}",
        path=probe.path,
    )
