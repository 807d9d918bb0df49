"""Carriers of users' exceptions through event loops, threads and the guard."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from orbax_t5x.errors import CheckpointError, for_caller

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class CarriedError(Exception):
    """Carrier of an exception that an event loop would not survive."""

    def __init__(self, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def as_carried(error: BaseException) -> Exception:
    """Turns an exception into a form that event loops pass on unchanged."""
    if isinstance(error, StopIteration):
        # Python itself turns a StopIteration that leaves a coroutine into a RuntimeError (PEP 479).
        failure = RuntimeError("a function raised StopIteration")
        failure.__cause__ = error
        return failure
    return error if isinstance(error, Exception) else CarriedError(error)


def first_failure(error: BaseException) -> BaseException:
    """Returns the exception to raise for a failure.

    Of a group it is the first that names a leaf, else the first.
    """
    flat = list(_leaves_of(error))
    return next((failure for failure in flat if isinstance(failure, CheckpointError)), flat[0])


def _leaves_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for member in group.exceptions:
            yield from _leaves_of(member)
    elif isinstance(error, CarriedError):
        yield from _leaves_of(error.error)
    else:
        yield error


async def carry(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits a user's coroutine; its exceptions pass through our event loops."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_carried(for_caller(error)) from None
    except BaseException as error:
        carried = for_caller(as_carried(error))
        if carried is error:
            raise
        raise carried from carried.__cause__


async def run_in_pool(
    pool: concurrent.futures.Executor | None,
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **keywords: _Arguments.kwargs,
) -> _Result:
    """Awaits a blocking call in a pool; its exception is carried.

    Without a pool, the event loop's own is used. Cancelling does not stop a call that has begun.
    """
    loop = asyncio.get_running_loop()
    result, error = await loop.run_in_executor(pool, functools.partial(_outcome, function, *arguments, **keywords))
    if error is not None:
        raise error
    return result


def call_carried(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result:
    """Calls a user's function on an event loop and carries its exceptions."""
    result, error = _outcome(function, *arguments, **keywords)
    if error is not None:
        raise for_caller(error)
    return result


def call_of_user(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result:
    """Calls a user's function and marks its exceptions for the caller."""
    try:
        return function(*arguments, **keywords)
    except BaseException as error:
        for_caller(error)
        raise


def _outcome(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments, **keywords), None
    except BaseException as error:
        return None, as_carried(error)
