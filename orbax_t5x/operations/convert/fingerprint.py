"""Identifies a conversion for resuming.

A killed conversion is resumed only if the same blocks would be written. A view is identified by its nodes, so that the
same transforms under another name, or a lambda, are the same; a stored leaf by its name, with a stamp of the
checkpoint's files; a constant by its contents. A view that a function computes, and a source without local files,
cannot be identified: such a conversion always begins anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orbax_t5x.files.paths import url_scheme
from orbax_t5x.lazy import Leaf, ValueLeaf
from orbax_t5x.lazy.node import Node
from orbax_t5x.operations.convert.partition import PlannedArray
from orbax_t5x.readers import Checkpoint

# The fields of every node.
_COMMON_FIELDS = frozenset({"shape", "dtype", "inputs", "leaf"})


def arrays_digest(arrays: Sequence[PlannedArray]) -> str:
    """Computes a digest of the names, shapes, dtypes and chunks."""
    return _hashed([[one.name, one.key, one.view.shape, one.view.dtype.name, one.chunk] for one in arrays])


def conversion_digest(format: str, arrays: Sequence[PlannedArray], checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Computes a conversion's digest, or returns None."""
    stamps = {name: _stamp(checkpoint) for name, checkpoint in checkpoints.items()}
    names = {
        leaf: (source, name)
        for source, checkpoint in checkpoints.items()
        for name, view in checkpoint.leaves.items()
        for leaf in view.leaves()
    }

    @functools.cache
    def digest(node: Node) -> str | None:
        inputs = [digest(one) for one in node.inputs]
        leaf = None if node.own_leaf is None else names.get(node.own_leaf) or _value_digest(node.own_leaf)
        if None in inputs or (node.own_leaf is not None and leaf is None):
            return None
        fields = [
            f"{field.name}={getattr(node, field.name)!r}"
            for field in dataclasses.fields(node)
            if field.name not in _COMMON_FIELDS and not field.name.startswith("_")
        ]
        return _hashed([type(node).__name__, node.shape, node.dtype.name, fields, inputs, leaf])

    digests = [digest(array.view.node) for array in arrays]
    if None in stamps.values() or None in digests:
        return None
    return _hashed([format, arrays_digest(arrays), digests, sorted(stamps.items())])


def _value_digest(leaf: Leaf) -> str | None:
    if not isinstance(leaf, ValueLeaf) or leaf.dtype.hasobject:
        return None
    return hashlib.sha256(np.ascontiguousarray(np.asarray(leaf.value)).tobytes()).hexdigest()


def _stamp(checkpoint: Checkpoint) -> Any:
    """Returns a stamp of a checkpoint's files, or None."""
    if url_scheme(checkpoint.path) is not None:
        return None
    files = sorted(_files(checkpoint.path))
    return [checkpoint.path, checkpoint.format, _hashed(files)] if files else None


def _files(path: str) -> Iterator[tuple[str, int, int, int]]:
    """Yields the identities of a checkpoint's files."""
    root = Path(path)
    if root.is_dir():
        found = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    elif root.parent.is_dir():
        found = [
            entry.path for entry in os.scandir(root.parent) if entry.is_file() and entry.name.startswith(root.name)
        ]
    else:
        found = []
    for one in found:
        stat = os.stat(one)
        yield one, stat.st_size, stat.st_mtime_ns, stat.st_ino


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")).hexdigest()
