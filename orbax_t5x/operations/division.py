"""Division of an operation's reads over its processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from orbax_t5x.concurrency import balanced_shares
from orbax_t5x.restoring.options import AnyProcesses
from orbax_t5x.restoring.processes import ProcessGroup

# Bytes that take a store as long as a request.
_REQUEST_BYTES = 256 << 10

_Item = TypeVar("_Item")


class Division:
    """Division of a call's work over the members of a group.

    Attributes:
      size: Number of members.
    """

    def __init__(self, group: ProcessGroup, path: str, call: str):
        self._group, self._path, self._call = group, path, call
        self.size: int = group.size

    def results(
        self,
        items: Sequence[_Item],
        names: Sequence[str],
        nbytes: Callable[[_Item], int],
        work: Callable[[Sequence[_Item]], list[Any]],
    ) -> list[Any]:
        """Returns the results of all items, in order.

        `names` describe the leaves, which all members have in common.
        """
        if self.size == 1:
            return work(items)
        digest = hashlib.sha256(json.dumps([len(items), *names]).encode()).hexdigest()
        self._group.require_equal(self._group.of_all(digest, self._path), self._call, self._path)
        shares = balanced_shares(range(len(items)), lambda at: nbytes(items[at]) + _REQUEST_BYTES, self.size)
        numbers = sorted(shares[self._group.rank])
        results = dict(zip(numbers, work([items[at] for at in numbers]), strict=True))
        merged: dict[int, Any] = {}
        for share in self._group.of_all(results, self._path):
            merged.update({int(at): result for at, result in share.items()})
        return [merged[at] for at in range(len(items))]

    def total(self, bytes_read: int, seconds: float) -> tuple[int, float]:
        """Returns the bytes of all members, and the longest time."""
        counts = self._group.of_all([bytes_read, seconds], self._path)
        return sum(nbytes for nbytes, _ in counts), max(taken for _, taken in counts)


@contextlib.contextmanager
def divided(processes: AnyProcesses | None, path: str, call: str) -> Generator[Division, None, None]:
    """Divides a `call` over the members of a group; an error inside is raised on all of them."""
    group = ProcessGroup.of(processes)
    with group.sharing_errors():
        yield Division(group, path, call)
