"""Division of an operation's reads over its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax

from orbax_t5x import on_demand
from orbax_t5x.concurrency import balanced_shares
from orbax_t5x.restoring.options import AnyProcesses, check_processes

# A job of several processes loads it.
_agreement = on_demand.function("orbax_t5x.multihost.agreement", "Agreement")
# Bytes that take a store as long as a request.
_REQUEST_BYTES = 256 << 10

_Item = TypeVar("_Item")


class Division:
    """Division of a call over its processes."""

    def __init__(self, agreement: Any = None):
        """Makes a division; without an `agreement`, for this process only."""
        self._agreement = agreement
        self.size: int = 1 if agreement is None else agreement.group.size

    def results(
        self,
        items: Sequence[_Item],
        names: Sequence[str],
        nbytes: Callable[[_Item], int],
        work: Callable[[Sequence[_Item]], list[Any]],
    ) -> list[Any]:
        """Returns the results of all items, in order."""
        if self.size == 1:
            return work(items)
        self._agreement.plan(names, [])
        numbers = balanced_shares(range(len(items)), lambda at: nbytes(items[at]) + _REQUEST_BYTES, self.size)
        share = sorted(numbers[self._agreement.group.rank])
        found = dict(zip(share, work([items[at] for at in share]), strict=True))
        merged = {int(at): result for mine in self._agreement.of_all(found) for at, result in mine.items()}
        return [merged[at] for at in range(len(items))]

    def total(self, bytes_read: int, seconds: float) -> tuple[int, float]:
        """Returns the bytes and the longest time of all processes."""
        if self.size == 1:
            return bytes_read, seconds
        counts = self._agreement.of_all([bytes_read, seconds])
        return sum(nbytes for nbytes, _ in counts), max(taken for _, taken in counts)


@contextlib.contextmanager
def divided(processes: AnyProcesses | None, path: str, call: str) -> Generator[Division, None, None]:
    """Holds for a `call` that every process of a group makes.

    An error that leaves it is raised on all of them.
    """
    check_processes(processes)
    if not jax.distributed.is_initialized():
        yield Division()
        return
    agreement = _agreement(processes, path, call, sends_errors=True)
    with agreement.planning():
        yield Division(agreement)
