"""Verification of a whole checkpoint by its checksums.

Every byte of every leaf is read once. Leaves are read one after the other, in blocks that follow the stored chunks, so
that memory is bounded by one row of chunks. TensorFlow bundles have a checksum of each tensor, Orbax items the file of
checksums that this package's saves write, zarr arrays perhaps one of each chunk, by their codec. A leaf without one is
read all the same: a chunk that is missing or cannot be decoded is damage, too.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from orbax_t5x.concurrency import call_of_user, guarded, run_on_read_thread
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.files.memory import empty_array
from orbax_t5x.lazy import Box, Leaf, ReadStats, Request, full_box
from orbax_t5x.lazy.box import box_shape
from orbax_t5x.operations.division import divided
from orbax_t5x.operations.verify.report import HOLDS, NOTHING, LeafVerification, Status, VerifyReport
from orbax_t5x.readers import Limits
from orbax_t5x.readers.box_sums import row_boxes
from orbax_t5x.readers.formats import open_checkpoint
from orbax_t5x.restoring.options import AnyProcesses
from orbax_t5x.text.progress_bar import OnProgress, Progress, check_progress, shown_progress

# Bytes read at a time of a leaf without a checksum, unless a row of chunks is larger.
_BLOCK_BYTES = 32 << 20


@guarded
def verify(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    item: str | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    multiprocessing_options: AnyProcesses | None = None,
) -> VerifyReport:
    """Reads a checkpoint and compares it with its own checksums.

    It is of any format and in any store. In a job every process calls this, and reads its share: whole leaves, or rows
    of a large leaf without checksums of its own.

    Args:
      path: as `orbax_t5x.open_checkpoint` takes it.
      format: as `orbax_t5x.open_checkpoint` takes it.
      item: which item of an Orbax step.
      limits: what a file's headers may claim.
      progress: called as `progress(done_bytes, total_bytes, leaf)` of this process's share; "bar" shows a bar on a
        terminal.
      multiprocessing_options: the processes that call it together, as in `orbax_t5x.restore`.

    Returns:
      What was found for each leaf, the same on every process; damage is no exception.

    Raises:
      CheckpointError: the checkpoint cannot be opened.

    Example:
      >>> report = ot.verify(bundle)
      >>> {leaf.status for leaf in report.leaves}
      {'ok'}
    """
    started = time.monotonic()
    check_progress(progress)
    stats = ReadStats("full")
    with (
        divided(multiprocessing_options, os.fspath(path), "verify") as division,
        open_checkpoint(path, format=format, item=item, limits=limits) as checkpoint,
        shown_progress(progress, "verifying") as on_progress,
    ):
        leaves = [leaf for view in checkpoint.leaves.values() for leaf in view.leaves()]
        parts = [_parts_of(leaf, division.size) for leaf in leaves]
        found = iter(
            division.results(
                list(itertools.chain(*parts)),
                [f"{leaf.name} {leaf.dtype} {leaf.shape}" for leaf in leaves],
                _bytes_of,
                lambda share: _verify_all(share, stats, on_progress),
            )
        )
        verified = [
            LeafVerification(
                leaf.name, tuple(leaf.shape), leaf.dtype.name, *_joined(list(itertools.islice(found, count)))
            )
            for leaf, count in zip(leaves, map(len, parts), strict=True)
        ]
        stats.check_watched()
        nbytes, seconds = division.total(stats.bytes_read, time.monotonic() - started)
        return VerifyReport(checkpoint.path, checkpoint.format, tuple(verified), nbytes, seconds)


class _Part(NamedTuple):
    """A leaf, or boxes of it that one process reads."""

    leaf: Leaf
    boxes: tuple[Box, ...]


def _parts_of(leaf: Leaf, count: int) -> list[_Part]:
    """Cuts a leaf without checksums of its own."""
    if leaf.error is not None or leaf.checksums is not None or 0 in leaf.shape:
        return [_Part(leaf, (full_box(leaf.shape),))]
    rows = leaf.chunks[0] if leaf.chunks else 1
    boxes = tuple(row_boxes(full_box(leaf.shape), leaf.dtype.itemsize, _BLOCK_BYTES, rows))
    most = -(-len(boxes) // count)
    return [_Part(leaf, boxes[at : at + most]) for at in range(0, len(boxes), most)]


def _joined(found: Sequence[tuple[Status, str]]) -> tuple[Status, str]:
    """Joins the results of a leaf's parts."""
    return next((one for one in found if one[0] in ("damaged", "unreadable")), found[0])


def _verify_all(parts: Sequence[_Part], stats: ReadStats, on_progress: OnProgress | None) -> list[tuple[Status, str]]:
    total = sum(map(_bytes_of, parts))
    done = 0
    found: list[tuple[Status, str]] = []
    for part in parts:
        found.append(_verify(part, stats))
        done += _bytes_of(part)
        if on_progress is not None:
            call_of_user(on_progress, done, total, part.leaf.name)
    return found


def _bytes_of(part: _Part) -> int:
    return 0 if part.leaf.error is not None else part.leaf.bytes_of(part.boxes)


def _verify(part: _Part, stats: ReadStats) -> tuple[Status, str]:
    """Verifies a part; returns its status and the reason."""
    leaf = part.leaf
    try:
        leaf.raise_error()
        if 0 in leaf.shape:
            return "ok", "no elements"
        if leaf.checksums is not None:
            run_on_read_thread(_compare(leaf, stats))
            return "ok", HOLDS
        run_on_read_thread(_read_all(part, stats))
    except CorruptCheckpointError as error:
        return "damaged", error.message
    except CheckpointError as error:
        return "unreadable", f"{type(error).__name__}: {error.message}"
    if leaf.chunk_checksum is not None:
        return "ok", f"the checksums of its {leaf.chunk_checksum} chunks hold"
    return "no checksum", NOTHING


async def _compare(leaf: Leaf, stats: ReadStats) -> None:
    await leaf.verify_checksum(stats, ())


async def _read_all(part: _Part, stats: ReadStats) -> None:
    for box in part.boxes:
        await part.leaf.read_into([Request(box, empty_array(box_shape(box), part.leaf.dtype))], stats)
