"""`inspect`: what a checkpoint holds, as a tree in which repeated layers are one branch. Only its index is read.

Leaves fold where their names differ in one number and shape and dtype are alike; the tree is that of the folded names,
and a chain of single branches is one line. JAX is not imported. Linear in the leaves.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from orbax_t5x.cli.output import emit, emit_json
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.text.fold import fold, times_text
from orbax_t5x.text.table import TableRow, table_lines, terminal_width
from orbax_t5x.text.wording import array_bytes, array_text, counted, dtype_text, leaves_text, plain, size_text

_INDENT = "  "


def run(options: argparse.Namespace) -> int:
    """Prints the tree, or JSON."""
    with open_checkpoint(options.path, item=options.item) as checkpoint:
        if options.json:
            emit_json(as_json(checkpoint))
        else:
            emit("\n".join(as_text(checkpoint, terminal_width(), folded=not options.all)))
    return 0


def as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns all that is known of a checkpoint without reading arrays; strings have null bytes."""
    leaves = [
        {
            "name": name,
            "shape": [int(size) for size in view.shape],
            "dtype": np.dtype(view.dtype).name,
            "nbytes": None if np.dtype(view.dtype).hasobject else _size(view),
        }
        for name, view in checkpoint.leaves.items()
    ]
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "step": checkpoint.step,
        "leaves": leaves,
        "empties": {name: _empty_text(empty) for name, empty in checkpoint.empties.items()},
        "total_bytes": sum(leaf["nbytes"] or 0 for leaf in leaves),
        "index_bytes": checkpoint.index_bytes,
        "metadata": checkpoint.metadata,
    }


def as_text(checkpoint: Checkpoint, width: int, *, folded: bool = True) -> list[str]:
    """Returns the tree for people."""
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    lines = [f"{plain(checkpoint.path)}: {checkpoint.format}{step}"]
    leaves = {name: _Line(array_text(view.dtype, view.shape), _size(view)) for name, view in checkpoint.leaves.items()}
    leaves |= {name: _Line(_empty_text(empty), 0) for name, empty in checkpoint.empties.items()}
    if leaves:
        rows = [(name, line.array, line.size) for name, line in leaves.items()]
        lines += ["", *table_lines(list(_tree(rows, folded).rows()), width)]
    return [*lines, "", *_totals(checkpoint)]


@dataclasses.dataclass(slots=True)
class _Line:
    """Text to the right of a name: a leaf's array (with how many there are) and bytes, or a branch's bytes."""

    array: str
    size: int


@dataclasses.dataclass(slots=True)
class _Branch:
    """A part of a name; it may be a leaf and have parts below at once, as TensorFlow's names do."""

    leaf: _Line | None = None
    size: int = 0
    parts: dict[str, _Branch] = dataclasses.field(default_factory=dict)

    def add(self, names: Sequence[str], leaf: _Line) -> None:
        """Puts a leaf below."""
        branch = self
        for name in names:
            branch.size += leaf.size
            branch = branch.parts.setdefault(name, _Branch())
        branch.leaf = leaf

    def rows(self) -> Iterator[TableRow]:
        """Returns rows of names with their indent, of any depth."""
        pending = [iter(self.parts.items())]
        while pending:
            for name, branch in pending[-1]:
                while branch.leaf is None and len(branch.parts) == 1:
                    ((below, branch),) = branch.parts.items()
                    name = f"{name}/{below}"
                label = _INDENT * (len(pending) - 1) + plain(name)
                if branch.leaf is not None:
                    array = branch.leaf.array
                    yield TableRow(label, array, size=size_text(branch.leaf.size) if "[" in array else "")
                if branch.parts:
                    yield TableRow(f"{label}/", size=size_text(branch.size) if branch.size else "")
                    pending.append(iter(branch.parts.items()))
                    break
            else:
                pending.pop()


def _tree(rows: Sequence[tuple[str, str, int]], folded: bool) -> _Branch:
    root = _Branch()
    if not folded:
        for name, array, size in rows:
            root.add(name.split("/"), _Line(array, size))
        return root
    for row in fold([(name,) for name, _, _ in rows], [array for _, array, _ in rows]):
        _, array, size = rows[row.members[0]]
        count = len(row.members)
        root.add(row.texts[0].split("/"), _Line(array + times_text(count), size * count))
    return root


def _empty_text(value: Any) -> str:
    if value is ...:
        return "... (nothing was saved)"
    return "None" if value is None else f"empty {type(value).__name__}"


def _size(view: Any) -> int:
    return array_bytes(view.dtype, view.shape)


def _totals(checkpoint: Checkpoint) -> list[str]:
    by_dtype: dict[str, tuple[int, int]] = {}
    for view in checkpoint.leaves.values():
        size, count = by_dtype.get(dtype_text(view.dtype), (0, 0))
        by_dtype[dtype_text(view.dtype)] = size + _size(view), count + 1
    total = sum(size for size, _ in by_dtype.values())
    elements = sum(view.size for view in checkpoint.leaves.values())
    lines = [f"{leaves_text(len(checkpoint.leaves))}, {counted(elements, 'element')}, {size_text(total)}"]
    if len(by_dtype) > 1:
        dtypes = sorted(by_dtype.items(), key=lambda item: item[1], reverse=True)
        lines += [f"  {name}: {leaves_text(count)}, {size_text(size)}" for name, (size, count) in dtypes]
    if checkpoint.empties:
        lines.append(f"  {counted(len(checkpoint.empties), 'node')} without leaves")
    return lines
