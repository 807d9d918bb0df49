"""Exceptions of callers' functions, carried through event loops as they are."""

import asyncio

import pytest

from orbax_t5x.concurrency.carried import CarriedError, as_carried, call_carried, carry, first_failure
from orbax_t5x.errors import CorruptCheckpointError


def test_exceptions_that_loops_pass_on_stay_and_others_are_wrapped():
    plain = ValueError("x")
    assert as_carried(plain) is plain
    interrupt = KeyboardInterrupt()
    carried = as_carried(interrupt)
    assert isinstance(carried, CarriedError) and carried.error is interrupt
    assert isinstance(as_carried(StopIteration(3)), RuntimeError)


def test_of_a_group_the_failure_that_names_a_leaf_comes_first():
    damage = CorruptCheckpointError("x", path="/file", leaf="w")
    plain, interrupt = ValueError(), KeyboardInterrupt()
    assert first_failure(ExceptionGroup("", [plain, ExceptionGroup("", [damage])])) is damage
    assert first_failure(ExceptionGroup("", [CarriedError(interrupt), plain])) is interrupt


def test_a_function_returns_its_result_or_raises_what_is_carried():
    def interrupted():
        raise KeyboardInterrupt

    assert call_carried(max, 2, 3) == 3
    with pytest.raises(CarriedError) as caught:
        call_carried(interrupted)
    assert type(caught.value.error) is KeyboardInterrupt


def test_a_cancellation_by_the_users_code_itself_is_carried():
    async def cancels():
        raise asyncio.CancelledError

    with pytest.raises(CarriedError) as caught:
        asyncio.run(carry(cancels()))
    assert type(caught.value.error) is asyncio.CancelledError
