"""An item's file of checksums from all processes of a save.

Each process sends its checksums once, to the process that finalizes the save, through the key-value store of
`jax.distributed`. That process writes one file: nothing is listed, read again or removed in the item's directory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import jax
import orbax.checkpoint as ocp
from etils import epath

from orbax_t5x.files.limits import Limits
from orbax_t5x.handlers.type_handlers.checksums import SaveSums
from orbax_t5x.lazy.box import Box
from orbax_t5x.readers.box_sums import BoxSums
from orbax_t5x.readers.orbax.checksums import encode_checksums, parse_checksums
from orbax_t5x.readers.orbax.metadata import CHECKSUMS_FILE
from orbax_t5x.restoring.processes import received, send


def publish_sums(directory: epath.Path, sums: SaveSums) -> None:
    """Sends this process's checksums to the finalizing process.

    The only process of a job writes the file.
    """
    if jax.process_count() == 1:
        if not sums.is_empty:
            (directory / CHECKSUMS_FILE).write_bytes(sums.encode())
    elif jax.distributed.is_initialized():
        send(os.fspath(directory), ocp.multihost.process_index(), sums.encode())


def write_published_sums(directory: epath.Path, primary: int | None, active: Collection[int] | None) -> None:
    """Writes the file of the published checksums.

    For the process that finalizes, after Orbax's barrier.

    Args:
      directory: of the item.
      primary: the process that finalizes for all; None where each finalizes a directory of its own.
      active: the processes that save, all by default.
    """
    if jax.process_count() > 1 and jax.distributed.is_initialized():
        saving = range(jax.process_count()) if active is None else sorted(active)
        processes = [ocp.multihost.process_index()] if primary is None else saving
        write_sums(directory, received(os.fspath(directory), processes))


def write_sums(directory: epath.Path, parts: Iterable[bytes]) -> None:
    """Writes the file of encoded checksums.

    They are from some processes, as `SaveSums.encode` returns them. An array of which they do not have all boxes (a
    process saved into another directory) is left out.
    """
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for part in parts:
        for key, sums in parse_checksums(part, os.fspath(directory), Limits()).items():
            shapes[key] = sums.shape, sums.dtype
            boxes.setdefault(key, {}).update(zip(sums.boxes, sums.crcs, strict=True))
    merged = {
        key: BoxSums(shape, dtype, tuple(sorted(boxes[key])), tuple(boxes[key][box] for box in sorted(boxes[key])))
        for key, (shape, dtype) in shapes.items()
    }
    complete = {key: sums for key, sums in merged.items() if sums.is_complete}
    if complete:
        (directory / CHECKSUMS_FILE).write_bytes(encode_checksums(complete))
