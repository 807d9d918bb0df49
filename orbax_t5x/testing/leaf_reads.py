"""Reads leaves as an execution does and compares bits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy.box import Box, box_shape, full_box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats, Verify
from orbax_t5x.readers import Checkpoint


class Reading(NamedTuple):
    """Arrays that were read, their counts, and the answer of `verify_checksum`."""

    arrays: list[np.ndarray]
    stats: ReadStats
    verified: bool | None


def leaf_of(checkpoint: Checkpoint, name: str) -> Leaf:
    """Returns the stored leaf behind a name."""
    (leaf,) = checkpoint.leaves[name].leaves()
    return leaf


def read(leaf: Leaf, requests: Sequence[Request], stats: ReadStats | None = None) -> ReadStats:
    """Fills the requests in a single call and verifies them.

    Returns the read stats.
    """
    stats = stats if stats is not None else ReadStats()
    _read_and_verify(leaf, requests, stats)
    return stats


def read_boxes(leaf: Leaf, boxes: Sequence[Box] | None = None, verify: Verify = "touched") -> Reading:
    """Reads boxes in a single call, each into its own buffer.

    Without boxes, the whole leaf is read.
    """
    boxes = [full_box(leaf.shape)] if boxes is None else boxes
    requests = [Request(box, np.empty(box_shape(box), leaf.dtype)) for box in boxes]
    stats = ReadStats(verify)
    verified = _read_and_verify(leaf, requests, stats)
    return Reading([request.out for request in requests], stats, verified)


def read_whole(leaf: Leaf) -> np.ndarray:
    """Reads and verifies a leaf with checksums."""
    reading = read_boxes(leaf)
    assert reading.verified is True, f"{leaf.name}: not verified"
    return reading.arrays[0]


def _read_and_verify(leaf: Leaf, requests: Sequence[Request], stats: ReadStats) -> bool | None:
    verified: list[bool | None] = []

    async def run() -> None:  # returns None: the runner would format an array on exit
        await leaf.read_into(requests, stats)
        verified.append(await leaf.verify_checksum(stats, stats.ranges(leaf)))

    asyncio.run(run())
    return verified[0]


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Tests if shape, dtype and bits are equal, NaN included.

    Strings are compared by value.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return one.tolist() == other.tolist()
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Asserts equality in dtype, shape and every bit."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert same_bits(actual, expected)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Draws small values without NaN.

    A writer may change the bits of a NaN.
    """
    return np.asarray(rng.integers(0 if dtype.kind in "ub" else -7, 8, shape)).astype(dtype).reshape(shape)


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    """Draws a box, sometimes empty in some dimensions."""
    box: list[tuple[int, int]] = []
    for size in shape:
        start = int(rng.integers(0, size + 1))
        box.append((start, int(rng.integers(start, size + 1))))
    return tuple(box)


def random_buffer(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Draws a buffer of random strides, not zeroed.

    It is contiguous, transposed, strided, or reversed in some dimensions.
    """
    if not shape:
        return np.empty((), dtype)
    order = rng.permutation(len(shape))
    steps = [int(rng.choice([1, 1, 2, -1, -2])) for _ in shape]
    base = np.empty([shape[axis] * abs(steps[axis]) for axis in order], dtype)
    base.fill(1)
    buffer = base.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    assert buffer.shape == shape
    return buffer


def bytes_read_by_process() -> int:
    """Counts the bytes that this process has read from files.

    The count is the kernel's.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
