"""`inspect`: the contents of a checkpoint, as a tree.

Only its index is read, and JAX is not imported.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.readers.checkpoint import checkpoint_rows
from orbax_t5x.text.fold import empty_text
from orbax_t5x.text.output import print_json, print_text
from orbax_t5x.text.table import table_lines, terminal_width, wrapped
from orbax_t5x.text.wording import array_bytes, counted, dtype_text, leaves_text, plain, size_text


def run(options: argparse.Namespace) -> int:
    """Prints the tree, or JSON."""
    with open_checkpoint(options.path, item=options.item) as checkpoint:
        if options.json:
            print_json(as_json(checkpoint))
        else:
            print_text("\n".join(as_text(checkpoint, terminal_width(), folded=not options.all)))
    return 0


def as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint's description without reading arrays."""
    leaves = [
        {
            "name": name,
            "shape": [int(size) for size in view.shape],
            "dtype": np.dtype(view.dtype).name,
            "nbytes": None if np.dtype(view.dtype).hasobject else _view_bytes(view),
        }
        for name, view in checkpoint.leaves.items()
    ]
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "step": checkpoint.step,
        "leaves": leaves,
        "empties": {name: empty_text(empty) for name, empty in checkpoint.empties.items()},
        "total_bytes": sum(leaf["nbytes"] or 0 for leaf in leaves),
        "index_bytes": checkpoint.index_bytes,
        "metadata": checkpoint.metadata,
    }


def as_text(checkpoint: Checkpoint, width: int, *, folded: bool = True) -> list[str]:
    """Returns the tree for people."""
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    lines = wrapped(f"{plain(checkpoint.path)}: {checkpoint.format}{step}", width, rest="  ")
    if rows := checkpoint_rows(checkpoint, folded=folded):
        lines += ["", *table_lines(rows, width)]
    return [*lines, "", *_totals(checkpoint)]


def _view_bytes(view: Any) -> int:
    return array_bytes(view.dtype, view.shape)


def _totals(checkpoint: Checkpoint) -> list[str]:
    by_dtype: dict[str, tuple[int, int]] = {}
    for view in checkpoint.leaves.values():
        size, count = by_dtype.get(dtype_text(view.dtype), (0, 0))
        by_dtype[dtype_text(view.dtype)] = size + _view_bytes(view), count + 1
    total = sum(size for size, _ in by_dtype.values())
    elements = sum(view.size for view in checkpoint.leaves.values())
    lines = [f"{leaves_text(len(checkpoint.leaves))}, {counted(elements, 'element')}, {size_text(total)}"]
    if len(by_dtype) > 1:
        dtypes = sorted(by_dtype.items(), key=lambda item: item[1], reverse=True)
        lines += [f"  {name}: {leaves_text(count)}, {size_text(size)}" for name, (size, count) in dtypes]
    if checkpoint.empties:
        lines.append(f"  {counted(len(checkpoint.empties), 'node')} without leaves")
    return lines
