"""Files of a caller's path, and the opening that calls share.

Nothing else asks if a path is a URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from orbax_t5x import on_demand
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits, metadata_budget
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.paths import url_scheme

if TYPE_CHECKING:
    from orbax_t5x.files.transcript import Transcript

_Result = TypeVar("_Result")
_remote_files = on_demand.function("orbax_t5x.files.remote.remote_files", "RemoteFiles")
_recorded_files = on_demand.function("orbax_t5x.files.recorded", "RecordedFiles")


class Opening:
    """Servers and buckets of a call.

    Attributes:
      timeout: seconds that one read of a remote store may take.
      servers: by their URL.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.servers: dict[str, Any] = {}

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        for server in self.servers.values():
            server.close_idle()


_OPENING: ContextVar[Opening | None] = ContextVar("orbax_t5x_opening", default=None)
_TRANSCRIPT: ContextVar[Transcript | None] = ContextVar("orbax_t5x_transcript", default=None)


def current_opening() -> Opening:
    """Returns the opening that runs, or a new opening."""
    return _OPENING.get() or Opening(Limits().io_timeout_secs)


def current_transcript() -> Transcript | None:
    """Returns the transcript of an opening that processes share."""
    return _TRANSCRIPT.get()


def answered(request: Sequence[Any], ask: Callable[[], _Result]) -> _Result:
    """Asks a question that belongs to no files yet."""
    transcript = current_transcript()
    return ask() if transcript is None else transcript.answer(request, ask)


@contextmanager
def using(transcript: Transcript) -> Generator[None, None, None]:
    """Records or replays the answers of an opening."""
    token = _TRANSCRIPT.set(transcript)
    try:
        yield
    finally:
        _TRANSCRIPT.reset(token)
        transcript.close()


@contextmanager
def opening(limits: Limits | None = None) -> Generator[Opening, None, None]:
    """Shares servers during a call, and calls inside it."""
    if (entered := _OPENING.get()) is not None:
        yield entered
        return
    limits = limits or Limits()
    made = Opening(limits.io_timeout_secs)
    token = _OPENING.set(made)
    try:
        with metadata_budget(limits):
            yield made
    except BaseException:
        made.close_idle()
        raise
    finally:
        _OPENING.reset(token)
        for server in made.servers.values():
            server.forget()


def files_at(path: str) -> Files:
    """Makes the files of a directory or file, local or remote."""
    if url_scheme(path) is not None:
        return _remote_files(path)
    transcript = current_transcript()
    return LocalFiles(path) if transcript is None else _recorded_files(path, transcript)


def open_directory_of(path: str) -> tuple[Files, str]:
    """Makes the files of a named file's directory."""
    file = files_at(path)
    directory, name = os.path.split(file.path if file.is_link() else file.named)
    return files_at(directory), name
