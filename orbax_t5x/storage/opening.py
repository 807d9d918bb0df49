"""Opening of a checkpoint: shared by all its calls are connections, and the recorder if processes open it together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.store import Files

_Result = TypeVar("_Result")


class Recorder(Protocol):
    """Maker of files whose answers are recorded for other processes, or come from another process."""

    def local(self, path: str) -> Files:
        """Makes the files of a local path."""
        ...

    def transport(self, transport: Any, base: str) -> Any:
        """Wraps the requests to a server or bucket."""
        ...

    @property
    def transcript(self) -> Any:
        """The answers."""
        ...


class Opening:
    """Connections of one call, by server and bucket.

    Attributes:
      timeout: seconds that one read of a remote store may take.
      connections: by their URL.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.connections: dict[str, Any] = {}

    def close_idle(self) -> None:
        """Closes the connections that no request uses; reading opens new ones."""
        for connection in self.connections.values():
            connection.close_idle()


_OPENING: ContextVar[Opening | None] = ContextVar("orbax_t5x_opening", default=None)
_RECORDER: ContextVar[Recorder | None] = ContextVar("orbax_t5x_recorder", default=None)


def current_opening() -> Opening:
    """Returns the opening that runs, or a new one."""
    return _OPENING.get() or Opening(Limits().io_timeout_secs)


def current_recorder() -> Recorder | None:
    """Returns the recorder of the opening that runs."""
    return _RECORDER.get()


def answered(request: Sequence[Any], ask: Callable[[], _Result]) -> _Result:
    """Asks a question that belongs to no files yet, such as for the commit of a repository; see `Transcript.answer`."""
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
    """Keeps one connection per server and bucket, which caches its responses, while it is entered.

    An opening inside another is the same.
    """
    if (entered := _OPENING.get()) is not None:
        yield entered
        return
    made = Opening((limits or Limits()).io_timeout_secs)
    token = _OPENING.set(made)
    try:
        yield made
    except BaseException:
        made.close_idle()
        raise
    finally:
        _OPENING.reset(token)
        for connection in made.connections.values():
            connection.forget()
