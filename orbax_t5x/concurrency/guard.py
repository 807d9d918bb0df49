"""Guard of the public calls: only typed or deliberate errors leave them.

Meant are exceptions of the user's own code (callbacks, which `call_of_user` and `call_carried` mark, and signal
handlers), wrong arguments, and warnings that are errors. All else, from a library below, from Python or from a mistake
here, becomes a typed error with it as its cause: a file decides what readers and stores meet.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType
from typing import Any, TypeVar, cast

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    LimitExceededError,
    UnsupportedCheckpointError,
    is_for_caller,
)

_PACKAGE = __name__.partition(".")[0]
# Rooms in which a file decides what is met: their own refusals of arguments are marked by `for_caller`.
_READING = tuple(f"{_PACKAGE}.{room}." for room in ("readers", "files", "extras"))
# Python's words for misuse; what else our code runs into is no argument's fault.
_MISUSE = (TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError, RuntimeError)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def guarded(function: _Function) -> _Function:
    """Decorates a public call, so that its errors are typed.

    They name the path that the first argument, or the argument after `self`, is or has. An argument with a method
    `place_of_errors` says itself which path and leaf it is about.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*arguments: Any, **keywords: Any) -> Any:
            try:
                return await function(*arguments, **keywords)
            except Exception as error:
                failure = typed(error, *_place_of(arguments))
                if failure is error:
                    raise
                raise failure from _cause_of(failure, error)

        return cast("_Function", call_async)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            failure = typed(error, *_place_of(arguments))
            if failure is error:
                raise
            raise failure from _cause_of(failure, error)

    return cast("_Function", call)


def typed(error: Exception, path: str | None = None, leaf: str | None = None) -> BaseException:
    """Returns an error as a public call raises it.

    That is the error itself, a typed error with it as cause, or an interrupt.
    """
    if isinstance(error, CheckpointError | Warning) or is_for_caller(error):
        return error
    interrupt = _interrupt_behind(error)
    if interrupt is not None or is_meant_for_caller(error):
        return interrupt or error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        return LimitExceededError(f"there is not enough memory: {error}", path=path, leaf=leaf)
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(text, path=path, leaf=leaf)
    if isinstance(error, OSError):
        return CheckpointIOError(text, path=path, leaf=leaf, errno=error.errno)
    return UnsupportedCheckpointError(f"it led to an error that is not foreseen: {text}", path=path, leaf=leaf)


def _interrupt_behind(error: BaseException) -> BaseException | None:
    """Finds the interrupt behind an error.

    Locks of Python complain if an interrupt comes while they wait.
    """
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt | SystemExit):
        behind = behind.__context__
    return behind


def _cause_of(failure: BaseException, error: Exception) -> Exception | None:
    return error if isinstance(failure, Exception) else None


def is_meant_for_caller(error: Exception) -> bool:
    """Tests if an exception is a user's or names a wrong argument."""
    if is_for_caller(error):
        return True
    if isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        return is_meant_for_caller(error.__cause__)  # which Python itself, or `as_carried`, made a RuntimeError
    *before, (code, module) = _frames(error.__traceback__)
    if not _handlers().isdisjoint([code, *(code for code, _ in before)]):
        return True
    return type(error) in _MISUSE and module.startswith(f"{_PACKAGE}.") and not module.startswith(_READING)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, str]]:
    """Yields the code and module of each frame, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_code, str(traceback.tb_frame.f_globals.get("__name__"))
        traceback = traceback.tb_next


def _handlers() -> set[CodeType]:
    """Lists the code of the user's signal handlers."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers if handler is not signal.default_int_handler]
    return {code for code in codes if code is not None}


def _place_of(arguments: tuple[Any, ...]) -> tuple[str | None, str | None]:
    """Returns the path and leaf of the first two arguments."""
    for argument in arguments[:2]:
        if hasattr(argument, "place_of_errors"):
            return argument.place_of_errors()
        try:
            path: Any = getattr(argument, "path", argument)
        except Exception:  # a property of another library, such as the path of a linen module that is not bound
            continue
        if isinstance(path, str) or hasattr(path, "__fspath__"):
            return str(path), None
    return None, None
