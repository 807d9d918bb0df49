"""Reads boxes of a leaf as an execution would, and keeps what it noted."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy.box import Box, box_shape, full_box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats, Verify


class Reading(NamedTuple):
    arrays: list[np.ndarray]
    stats: ReadStats
    verified: bool | None


async def _read(
    leaf: Leaf, requests: Sequence[Request], stats: ReadStats, others: Sequence[ChecksummedRange]
) -> bool | None:
    await leaf.read_into(requests, stats)
    return await leaf.verify_checksum(stats, [*stats.ranges(leaf), *others])


def read_boxes(leaf: Leaf, boxes: Sequence[Box] | None = None, verify: Verify = "touched") -> Reading:
    """The boxes (all of the leaf), in one call."""
    boxes = [full_box(leaf.shape)] if boxes is None else boxes
    requests = [Request(box, np.empty(box_shape(box), leaf.dtype)) for box in boxes]
    stats = ReadStats(verify)
    verified = asyncio.run(_read(leaf, requests, stats, ()))
    return Reading([request.out for request in requests], stats, verified)


def read_whole(leaf: Leaf) -> np.ndarray:
    """All of a leaf, verified."""
    reading = read_boxes(leaf)
    assert reading.verified is True, f"{leaf.name}: not verified"
    return reading.arrays[0]


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal shape, dtype and bits (NaN included); strings by value."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
