"""Guard of the public calls: what leaves one is an error of this package, or meant for the caller.

Meant are what a `raise` statement of this package raised (a wrong argument, a closed checkpoint), what Python says of
arguments that a public function does not have, what code of the user raised (a transform, a callback, a signal
handler), and warnings that are errors. All else, from a library below, from Python or from a mistake here, becomes a
typed error with it as its cause: a file decides what they meet.
"""

from __future__ import annotations

import functools
import inspect
import opcode
import os
import site
import sysconfig
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from orbax_t5x.concurrency.carried import call_carried, carry
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    LimitExceededError,
    UnsupportedCheckpointError,
)

_PACKAGE = __name__.partition(".")[0]
# Code of others that is installed; what is anywhere else is the user's.
_INSTALLED = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {*site.getsitepackages(), site.getusersitepackages()}
)
_RAISE = opcode.opmap["RAISE_VARARGS"]
_CALLS_OF_USERS = {call_carried.__code__, carry.__code__}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def guarded(function: _Function) -> _Function:
    """Decorates a public call; its errors name the path that the first argument, or that after `self`, is or has.

    An argument with a method `place_of_errors` says itself which path and leaf it is about.
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
                raise failure from error

        return cast("_Function", call_async)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            failure = typed(error, *_place_of(arguments))
            if failure is error:
                raise
            raise failure from error

    return cast("_Function", call)


def typed(error: Exception, path: str | None = None, leaf: str | None = None) -> Exception:
    """Returns an error as a public call raises it: itself, or a typed one whose cause it is."""
    if isinstance(error, CheckpointError | Warning) or is_meant_for_caller(error):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        return LimitExceededError(f"there is not enough memory: {error}", path=path, leaf=leaf)
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(text, path=path, leaf=leaf)
    if isinstance(error, OSError):
        return CheckpointIOError(text, path=path, leaf=leaf, errno=error.errno)
    return UnsupportedCheckpointError(f"it led to an error that is not foreseen: {text}", path=path, leaf=leaf)


def is_meant_for_caller(error: Exception) -> bool:
    """Reports whether this package raised an error on purpose, or code of the user led to it."""
    if isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        return is_meant_for_caller(error.__cause__)  # which Python itself, or `as_carried`, made a RuntimeError
    frames = list(_frames(error.__traceback__))
    frame, instruction = frames[-1]
    if len(frames) == 1 and isinstance(error, TypeError):
        return True  # the guard's own frame: the arguments do not fit the function's signature
    is_raised = frame.f_code.co_code[instruction] == _RAISE and not isinstance(error, AssertionError)
    if _is_own_frame(frame) and is_raised:
        return True
    return any(frame.f_code in _CALLS_OF_USERS or _is_of_user(frame) for frame, _ in frames)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames from the guard's own to that which raised, and the instruction where each of them was."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _is_own_frame(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def _is_of_user(frame: FrameType) -> bool:
    """Reports whether code is neither ours nor installed: a script, a notebook, a checkout, a test."""
    if _is_own_frame(frame) or str(frame.f_globals.get("__name__")).startswith(("importlib.", "_frozen_importlib")):
        return False
    file = frame.f_globals.get("__file__")
    return not isinstance(file, str) or not os.path.realpath(file).startswith(_INSTALLED)


def _place_of(arguments: tuple[Any, ...]) -> tuple[str | None, str | None]:
    """Returns the path and the leaf that one of the first two arguments is about."""
    for argument in arguments[:2]:
        if hasattr(argument, "place_of_errors"):
            return argument.place_of_errors()
        path: Any = getattr(argument, "path", argument)
        if isinstance(path, str) or hasattr(path, "__fspath__"):
            return str(path), None
    return None, None
