"""`hf://org/name[@revision][/file]`: models of the Hugging Face hub, through `huggingface_hub`.

Its API names the commit and lists the files; files that its cache holds are read there, and ranges of others by obstore
from the URL of the commit. Arrays in chunks are read from its cache, into which their files are downloaded whole. The
package is an extra, `orbax-t5x[hf]`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import urllib.parse
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from obstore.store import HTTPStore

from orbax_t5x.concurrency import run_jobs
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.remote import CLIENT, FIRST_BYTES, RETRIES, Listing, OpenedFile, RemoteStore
from orbax_t5x.text.masked import masked
from orbax_t5x.text.wording import size_text

try:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors
except ImportError as error:
    raise UnsupportedCheckpointError(
        "hf:// paths need the package huggingface_hub: pip install 'orbax-t5x[hf]'"
    ) from error

# A revision that begins with `refs/` has three parts: a pull request's, `refs/pr/3`, or a converted one's.
_REVISION = r"refs/[^/]+/[^/]+|(?!refs/)[^/]+"
_PATH = re.compile(rf"hf://(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>{_REVISION}))?(?:/(?P<file>.*))?", re.ASCII)

_logger = logging.getLogger(__name__)
# Sizes of the files of commits that were found, by hub and base URL; a commit never changes.
_COMMITS: dict[tuple[str, str], Mapping[str, int]] = {}


class HubPath(NamedTuple):
    """A parsed path on the hub.

    Attributes:
      repository: "org/name".
      revision: Branch, tag, commit, or a reference such as `refs/pr/3`; None for the main branch.
      file: File or directory in the repository, or "".
    """

    repository: str
    revision: str | None
    file: str


def parse_hub_path(path: str) -> HubPath:
    """Parses a path."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise UnsupportedCheckpointError("a path on the hub is hf://org/name, hf://org/name@revision/file", path=path)
    file = (match["file"] or "").strip("/")
    if file:
        split_name(file, path=path)
    # As in the hub's own URLs, where a slash is `%2F`.
    revision = match["revision"] and urllib.parse.unquote(match["revision"])
    return HubPath(match["repository"], revision, file)


def hub_endpoint() -> str:
    """Returns the URL of the hub; `HF_ENDPOINT` names another one than the public."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


@contextlib.contextmanager
def typed_hub_errors(path: str) -> Generator[None, None, None]:
    """Types `huggingface_hub`'s errors about a path."""
    try:
        yield
    except CheckpointError:
        raise
    except (
        hub_errors.RepositoryNotFoundError,
        hub_errors.RevisionNotFoundError,
        hub_errors.EntryNotFoundError,
    ) as error:
        raise CheckpointNotFoundError(f"not on the hub: {_first_line(error)}", path=path) from None
    except Exception as error:  # of the HTTP library that the package uses
        raise CheckpointIOError(f"the hub failed: {_first_line(error)}", path=path) from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return masked(lines[0] if lines else type(error).__name__)


def find_hub_url(path: str) -> str:
    """Returns the URL of a path with its commit; without a network, the path of the hub's cache."""
    wanted = parse_hub_path(path)
    try:
        base = f"hf://{wanted.repository}@{find_commit(wanted)}"
    except CheckpointError as error:
        # A commit never changes, whoever may no longer see it.
        if isinstance(error, CheckpointIOError) or re.fullmatch(r"[0-9a-f]{40}", wanted.revision or ""):
            return _cached_path(path, wanted, error)
        raise
    return f"{base}/{wanted.file}" if wanted.file else base


def find_commit(wanted: HubPath) -> str:
    """Asks the hub for the commit of a revision and its files."""
    path = f"hf://{wanted.repository}"
    with typed_hub_errors(path):
        info = huggingface_hub.HfApi(endpoint=hub_endpoint()).model_info(
            wanted.repository, revision=wanted.revision, files_metadata=True
        )
    if info.sha is None:
        raise CheckpointIOError("the hub's answer names no commit", path=path)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    _COMMITS[hub_endpoint(), f"{path}@{info.sha}"] = sizes
    return info.sha


def hub_files(wanted: HubPath, commit: str) -> Mapping[str, int]:
    """Returns the sizes of a commit's files, by name."""
    base = f"hf://{wanted.repository}@{commit}"
    if (hub_endpoint(), base) not in _COMMITS:
        find_commit(wanted._replace(revision=commit))
    return _COMMITS[hub_endpoint(), base]


def _cached_path(path: str, wanted: HubPath, error: CheckpointError) -> str:
    """Returns the snapshot of a revision in the hub's cache, with a warning that names its commit."""
    try:
        snapshot = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            wanted.repository, revision=wanted.revision, local_files_only=True, cache_dir=_cache()
        )
    except Exception:  # it is not there
        raise error from None
    _logger.warning("%s: %s; the commit %s of its cache is read", path, error.message, os.path.basename(snapshot))
    return os.path.join(snapshot, wanted.file) if wanted.file else snapshot


def _cache() -> str:
    """Returns the directory of the hub's cache."""
    return huggingface_hub.constants.HF_HUB_CACHE


class HubStore(RemoteStore):
    """Files of a commit; its base is `hf://org/name@commit`."""

    is_fixed = True

    def __init__(self, base: str):
        self._wanted = parse_hub_path(base)
        self._sizes = hub_files(self._wanted, self._wanted.revision or "")
        super().__init__(base)

    def _web_server(self) -> Any:
        # obstore drops the token where the hub redirects to another host.
        token = huggingface_hub.get_token()
        headers: Any = {"default_headers": {"authorization": f"Bearer {token}"}} if token else {}
        return HTTPStore.from_url(hub_endpoint(), client_options=CLIENT | headers, retry_config=RETRIES)

    def place(self, key: str) -> str:
        url = huggingface_hub.hf_hub_url(
            self._wanted.repository, key, revision=self._wanted.revision, endpoint=hub_endpoint()
        )
        return urllib.parse.unquote(url.removeprefix(f"{hub_endpoint()}/"))

    def _cached(self, key: str) -> str | None:
        """Returns the path of a file in the hub's cache, or None."""
        path = huggingface_hub.try_to_load_from_cache(
            self._wanted.repository, key, cache_dir=_cache(), revision=self._wanted.revision
        )
        return path if isinstance(path, str) else None

    def open_again(self, key: str, size: int) -> OpenedFile | None:
        if key not in self._sizes:
            return None
        if (path := self._cached(key)) is None:
            return super().open_again(key, size)
        with open(path, "rb") as file:
            data = file.read(FIRST_BYTES)
            return OpenedFile(os.fstat(file.fileno()).st_size, path, data)

    def fetch(self, key: str, ranges: Sequence[tuple[int, int]], leaf: str | None) -> list[memoryview]:
        if (path := self._cached(key)) is None:
            return super().fetch(key, ranges, leaf)
        pieces: list[memoryview] = []
        with open(path, "rb") as file:
            for start, stop in ranges:
                data = os.pread(file.fileno(), stop - start, start)
                if len(data) != stop - start:
                    raise CorruptCheckpointError(f"ends before byte {stop}", path=path, leaf=leaf)
                pieces.append(memoryview(data))
        return pieces

    def _list(self, directory: str) -> Listing:
        below = f"{directory}/" if directory else ""
        names = [name.removeprefix(below) for name in self._sizes if name.startswith(below)]
        directories = {name.partition("/")[0] for name in names if "/" in name}
        return Listing(frozenset(name for name in names if "/" not in name), frozenset(directories))

    def kvstore(self, root: str, metadata: str) -> dict[str, Any] | None:
        return None

    def download(self, directory: str, names: Sequence[str]) -> str:
        below = f"{directory}/" if directory else ""
        stored = [f"{below}{name}" for name in names if f"{below}{name}" in self._sizes]
        missing = [name for name in stored if self._cached(name) is None]
        if missing:
            size = size_text(sum(self._sizes[name] for name in missing))
            _logger.warning("%s: arrays in chunks are not read in place; %s are downloaded", self.url(directory), size)
        with typed_hub_errors(self.url(directory)):
            run_jobs(lambda name=name: self._download(name) for name in missing)
            first = self._cached(stored[0]) if stored else None
        if first is None:
            raise CheckpointNotFoundError("the files of its arrays are missing", path=self.url(directory))
        return first.removesuffix(f"/{stored[0][len(below) :]}")

    def _download(self, name: str) -> None:
        huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
            self._wanted.repository, name, revision=self._wanted.revision, endpoint=hub_endpoint(), cache_dir=_cache()
        )


def upload_to_hub(wanted: HubPath, directory: str, message: str, remove: Iterable[str]) -> None:
    """Adds the files of a local directory to a repository by one commit, which deletes `remove`."""
    with typed_hub_errors(f"hf://{wanted.repository}"):
        huggingface_hub.HfApi(endpoint=hub_endpoint()).upload_folder(
            repo_id=wanted.repository,
            folder_path=directory,
            path_in_repo=wanted.file,
            commit_message=message,
            revision=wanted.revision,
            delete_patterns=list(remove) or None,
        )
