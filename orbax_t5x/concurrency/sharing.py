"""Divides work between processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def balanced_shares(items: Iterable[_Item], size: Callable[[_Item], int], count: int) -> list[list[_Item]]:
    """Divides items into `count` shares of nearly the same size.

    The largest item comes first; each goes to the smallest share.

    The same items in the same order give the same work shares everywhere.
    """
    shares: list[list[_Item]] = [[] for _ in range(count)]
    heap = [(0, share) for share in range(count)]
    for item in sorted(items, key=size, reverse=True):
        held, share = heapq.heappop(heap)
        shares[share].append(item)
        heapq.heappush(heap, (held + size(item), share))
    return shares
