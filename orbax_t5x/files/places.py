"""Files of a caller's path, and the opening that calls share.

Nothing else asks if a path is a URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from orbax_t5x import on_demand
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits, metadata_budget
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.paths import url_scheme

_Result = TypeVar("_Result")
_remote_files = on_demand.function("orbax_t5x.files.remote.remote_store", "RemoteFiles")


class Recorder(Protocol):
    """Maker of files with answers shared between processes.

    Answers are recorded for other processes, or come from another process.

    Attributes:
      transcript: the answers.
    """

    transcript: Any

    def local(self, path: str) -> Files:
        """Makes the files of a local path."""
        ...

    def transport(self, transport: Any, base: str) -> Any:
        """Wraps the requests to a server or bucket."""
        ...


class Opening:
    """Connections of a call, by server and bucket.

    Attributes:
      timeout: seconds that one read of a remote store may take.
      connections: by their URL.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.connections: dict[str, Any] = {}

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        for connection in self.connections.values():
            connection.close_idle()


_OPENING: ContextVar[Opening | None] = ContextVar("orbax_t5x_opening", default=None)
_RECORDER: ContextVar[Recorder | None] = ContextVar("orbax_t5x_recorder", default=None)


def current_opening() -> Opening:
    """Returns the opening that runs, or a new opening."""
    return _OPENING.get() or Opening(Limits().io_timeout_secs)


def current_recorder() -> Recorder | None:
    """Returns the recorder of the opening that runs."""
    return _RECORDER.get()


def answered(request: Sequence[Any], ask: Callable[[], _Result]) -> _Result:
    """Asks a question that belongs to no files yet."""
    recorder = current_recorder()
    return ask() if recorder is None else recorder.transcript.answer(request, ask)


@contextmanager
def recording(recorder: Recorder) -> Generator[None, None, None]:
    """Makes all files through a recorder."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@contextmanager
def opening(limits: Limits | None = None) -> Generator[Opening, None, None]:
    """Shares connections during a call, and calls inside it."""
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
        for connection in made.connections.values():
            connection.forget()


def files_at(path: str) -> Files:
    """Makes the files of a directory or file, local or remote."""
    if url_scheme(path) is not None:
        return _remote_files(path)
    recorder = _RECORDER.get()
    return LocalFiles(path) if recorder is None else recorder.local(path)


def open_directory_of(path: str) -> tuple[Files, str]:
    """Makes the files of a named file's directory."""
    file = files_at(path)
    directory, name = os.path.split(file.path if file.is_link() else file.named)
    return files_at(directory), name
