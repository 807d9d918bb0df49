"""Lowers boxes of views to reads of leaves: each distinct box of a leaf once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy import Box, Leaf, Request, View


class Shard(NamedTuple):
    """Shard: one box of one view, and the buffer that it is read into."""

    view: View
    box: Box
    out: np.ndarray


def lower_shards(shards: Iterable[Shard]) -> tuple[list[tuple[Leaf, list[Request]]], list[Callable[[], None]]]:
    """Returns the reads by leaf, each distinct box once, and what to do after them, in order."""
    reads: dict[Leaf, dict[Box, Request]] = {}
    copies: list[Callable[[], None]] = []
    finish: list[Callable[[], None]] = []
    for view, box, out in shards:
        lowered = view.lower(box, out)
        finish.extend(lowered.finish)
        for leaf, request in lowered.reads:
            first = reads.setdefault(leaf, {}).setdefault(request.box, request)
            if first is not request:
                copies.append(_Copy(first.out, request.out))
    return [(leaf, list(requests.values())) for leaf, requests in reads.items()], [*copies, *finish]


@dataclasses.dataclass(frozen=True)
class _Copy:
    source: np.ndarray
    out: np.ndarray

    def __call__(self) -> None:
        self.out[...] = self.source
