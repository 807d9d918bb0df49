"""Destinations of conversions in buckets and on the Hugging Face hub.

The checkpoint is made on a local disk and uploaded when it is whole. Into a bucket data go first, then the metadata,
and `commit_success.txt` last, so that what is half written is never taken for a checkpoint: a killed upload starts
again. On the hub it is one commit.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from orbax_t5x import on_demand
from orbax_t5x.concurrency import run_jobs
from orbax_t5x.errors import CheckpointIOError, Fix, UnsupportedCheckpointError
from orbax_t5x.files.places import files_at, opening, resolved_path, split_url
from orbax_t5x.files.remote import RemoteStore
from orbax_t5x.operations.convert.destination import (
    Destination,
    check_apart_by_name,
    check_replaceable,
    is_unfinished,
    reason_not_replaceable,
    require_overwrite,
    staging_directory,
)
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_output import INDEX_NAME, WEIGHTS
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, MANIFEST_FILE, STEP_METADATA_FILE
from orbax_t5x.text.wording import listed

# Of the hub only.
_find_commit, _hub_files, _parse_hub_path, _upload_to_hub = (
    on_demand.function("orbax_t5x.files.hub", name)
    for name in ("find_commit", "hub_files", "parse_hub_path", "upload_to_hub")
)

# The files by which a directory is a checkpoint, in the order of writing. An item of Orbax with a manifest alone would
# be opened without its metadata; with metadata alone it is an error.
_MARKS = (STEP_METADATA_FILE, METADATA_FILE, MANIFEST_FILE, COMMIT_FILE, "model.safetensors", INDEX_NAME)
_SHOWN_FILES = 5


class BucketDestination(Destination):
    """A prefix of a bucket."""

    def __init__(self, url: str):
        parsed = split_url(resolved_path(url))
        if not parsed.key:
            raise UnsupportedCheckpointError("a whole bucket is not written; name a directory in it", path=url)
        self.name: str = f"{parsed.base}/{parsed.key}"
        self.target: Path = staging_directory(self.name)
        self._key = parsed.key
        self._store = RemoteStore(parsed.base)

    def check(self, writing: WriteOptions) -> None:
        names = self._names()
        top = {name.partition("/")[0] for name in names}
        if (top and not is_unfinished(top)) or self._store.open_again(self._key, 1) is not None:
            with opening():
                reason = reason_not_replaceable(lambda: files_at(self.name), top or None, writing)
            check_replaceable(self.name, reason)
            require_overwrite(self.name, writing)

    def check_apart(self, source: Checkpoint) -> None:
        check_apart_by_name(self.name, source)

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        if writing.format == "orbax":
            (written / COMMIT_FILE).write_text(f"Checkpoint commit was successful to {self.name}")
        files = {str(path.relative_to(written)): path for path in written.rglob("*") if path.is_file()}
        replaced = self._names()
        marks = [name for name in _MARKS if name in files]
        # One file is replaced at once. Else nothing of the old one may stand beside the new one without its marks.
        if marks != [name for name in _MARKS if name in replaced] or len(marks) > 1:
            for name in reversed(_MARKS):
                self._delete([name] if name in replaced else [])
            self._delete([name for name in replaced if name not in _MARKS])
        run_jobs(lambda name=name: self._put(name, files[name]) for name in files if name not in _MARKS)
        for name in marks:
            self._put(name, files[name])

    def _names(self) -> Collection[str]:
        """Lists the objects under the prefix; a console shows an empty directory as one without a name."""
        start = len(self._key) + 1
        return {key[start:] for key in self._store.all_keys(self._key) if key[start:]}

    def _put(self, name: str, path: Path) -> None:
        self._store.put(f"{self._key}/{name}", path)

    def _delete(self, names: list[str]) -> None:
        if names:
            self._store.delete([f"{self._key}/{name}" for name in names])


class HubDestination(Destination):
    """A directory of a repository on the hub."""

    def __init__(self, url: str):
        self._wanted = _parse_hub_path(url)
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
        if any(WEIGHTS.fullmatch(name) or name in (writing.beside or ()) for name in self._names()):
            require_overwrite(self.name, writing)

    def check_apart(self, source: Checkpoint) -> None:
        """Permits every source: all of it was read before the commit."""

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        names = {path.name for path in written.iterdir()}
        replaced = [name for name in self._names() if WEIGHTS.fullmatch(name) and name not in names]
        message = f"Add {self._below}{'' if self._below else 'a model as '}safetensors files"
        _upload_to_hub(self._wanted, str(written), message, replaced)
        if lost := sorted(names - self._names()):
            shown = listed([repr(name) for name in lost], _SHOWN_FILES)
            raise CheckpointIOError(f"the hub did not take {shown}; is there a .gitignore?", path=self.name)

    def _names(self) -> set[str]:
        """Lists the names of the files in the directory itself, of the newest commit."""
        commit = _find_commit(self._wanted)
        names = _hub_files(self._wanted, commit)
        below = {name.removeprefix(self._below) for name in names if name.startswith(self._below)}
        return {name for name in below if "/" not in name}
