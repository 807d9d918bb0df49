"""Destinations on the Hugging Face hub.

Safetensors files are added to a repository by a single commit.
"""

from __future__ import annotations

from pathlib import Path

from orbax_t5x.errors import CheckpointIOError, Fix, UnsupportedCheckpointError
from orbax_t5x.extras.web.hub import Commit, commit_files, find_commit, parse_hub_path, typed_hub_errors
from orbax_t5x.operations.convert.destination import Destination, require_overwrite, staging_directory
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_output import WEIGHTS
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from orbax_t5x.readers import Checkpoint
from orbax_t5x.text.wording import listed

_SHOWN_FILES = 5


class HubDestination(Destination):
    """A directory of a repository."""

    def __init__(self, url: str):
        self._wanted = parse_hub_path(url)
        self._below = f"{self._wanted.file}/" if self._wanted.file else ""
        self.name: str = url.rstrip("/")
        self.target: Path = staging_directory(self.name)

    def options(self, writing: WriteOptions) -> WriteOptions:
        if writing.format != "safetensors":
            fix = Fix.setting("pass {}", format="safetensors")
            message = f"the hub's models are safetensors files; format={writing.format!r} is not written to it"
            raise UnsupportedCheckpointError(message, path=self.name, fix=fix)
        return writing

    def check(self, writing: WriteOptions) -> None:
        names = self._names(self._find_commit())
        if any(WEIGHTS.fullmatch(name) or name in (writing.beside or ()) for name in names):
            require_overwrite(self.name, writing)

    def check_apart(self, source: Checkpoint) -> None:
        """Permits every source: all of it was read before the commit."""

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        files = {self._below + path.name: path for path in written.iterdir()}
        parent = self._find_commit()
        old = [self._below + name for name in self._names(parent) if WEIGHTS.fullmatch(name)]
        message = f"Add {self._below}{'' if self._below else 'a model as '}safetensors files"
        with typed_hub_errors(self.name):
            commit_files(self._wanted, parent.revision, message, files, [name for name in old if name not in files])
        there = self._find_commit().sizes
        lost = [name for name, path in files.items() if there.get(name) not in (path.stat().st_size, None)]
        lost += [name for name in files if name not in there]
        if lost:
            shown = listed([repr(name) for name in lost], _SHOWN_FILES)
            raise CheckpointIOError(f"the hub did not take {shown}; is there a .gitignore?", path=self.name)

    def _find_commit(self) -> Commit:
        with typed_hub_errors(self.name):
            return find_commit(self._wanted)

    def _names(self, commit: Commit) -> list[str]:
        """Lists the names of the files in the directory itself."""
        names = (name.removeprefix(self._below) for name in commit.sizes if name.startswith(self._below))
        return [name for name in names if "/" not in name]
