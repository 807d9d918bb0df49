"""A plan's views as safetensors files, block by block.

Each block is written to its final position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orbax_t5x.errors import Fix, Problem, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.files.durability import sync_directory
from orbax_t5x.handlers.type_handlers.stream import COPIES_PER_BLOCK
from orbax_t5x.lazy import View
from orbax_t5x.lazy.chunks import block_bytes, chunk_of
from orbax_t5x.operations.convert import safetensors_layout
from orbax_t5x.operations.convert.output_format import (
    OutputFormat,
    PlannedArray,
    WriteOptions,
    WriteSummary,
    nothing_to_write,
)
from orbax_t5x.operations.convert.safetensors_layout import (
    INDEX_NAME,
    Tensor,
    TensorInFile,
    create,
    index_of,
    unsupported_reason,
)
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.targets import is_parameter_name
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.dtype_names import as_dtype
from orbax_t5x.trees.dtypes import kind_of

CONFIG_NAME = "config.json"
WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX_NAME))
"""Names of the files that a conversion writes."""

# More names than this in one error hide the first.
_SHOWN_LEAVES = 10


class SafetensorsFormat(OutputFormat):
    """Safetensors files."""

    most_compression = 1

    def __init__(self, plan: RestorePlan, writing: WriteOptions):
        views = {entry.name: entry.view for entry in plan.entries if entry.view is not None}
        if not views:
            raise nothing_to_write(plan)
        self._skipped = _unsupported(views, skip=writing.on_unsupported == "skip")
        kept = _cast({name: view for name, view in views.items() if name not in self._skipped}, writing.dtype)
        self._tensors = {name: Tensor(name, view.shape, view.dtype) for name, view in kept.items()}
        max_bytes = safetensors_layout.MAX_FILE_BYTES
        self._files = safetensors_layout.plan_files(list(self._tensors.values()), max_bytes)
        self._beside = writing.beside or {}
        most = block_bytes(memory_limit(writing.memory_limit_bytes), COPIES_PER_BLOCK)
        self.arrays: Sequence[PlannedArray] = [
            PlannedArray(name, name, kept[name], chunk_of(kept[name], most))
            for file in self._files
            for name in file.starts
        ]

    def prepare(self, blocks: Path) -> None:
        for file in self._files:
            create(file, blocks)

    def output(self, blocks: Path, array: PlannedArray) -> TensorInFile:
        file = next(file for file in self._files if array.key in file.starts)
        return TensorInFile(blocks / file.name, file.starts[array.key], self._tensors[array.key])

    def finish(self, blocks: Path, directory: Path) -> WriteSummary:
        tensors = list(self._tensors.values())
        if len(self._files) > 1:
            (blocks / INDEX_NAME).write_bytes(index_of(self._files, tensors))
        for name, data in self._beside.items():
            (blocks / name).write_bytes(data)
        sync_directory(blocks)
        blocks.rename(directory)
        return WriteSummary(len(tensors), sum(tensor.nbytes for tensor in tensors), self._skipped)


def _unsupported(views: Mapping[str, View], *, skip: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Lists the leaves to leave out, with shape and dtype."""
    reasons = {
        name: reason for name, view in views.items() if (reason := unsupported_reason(name, np.dtype(view.dtype)))
    }
    if not reasons or (skip and len(reasons) < len(views)):
        return {name: (tuple(views[name].shape), str(views[name].dtype)) for name in reasons}
    shown = listed([f"{name!r} {reason}" for name, reason in reasons.items()], _SHOWN_LEAVES, separator="; ")
    fix = Fix.any_of(Fix.setting("pass {}", on_unsupported="skip"), Fix.in_program("drop them by a transform"))
    raise UnsupportedCheckpointError(
        f"{len(reasons)} of {len(views)} leaves cannot be stored in safetensors files: {shown}; nothing was written",
        leaf=next(iter(reasons)) if len(reasons) == 1 else None,
        fix=None if skip else fix,
    )


def _cast(views: Mapping[str, View], dtype: Any) -> dict[str, View]:
    """Casts floating-point model parameters to `dtype`."""
    if dtype is None:
        return dict(views)
    wanted = as_dtype(dtype)
    if kind_of(wanted) != "float" or unsupported_reason("", wanted):
        message = f"{wanted.name} is no floating-point type that safetensors files have"
        raise RestorePlanError([Problem("dtype", None, message)])
    is_named = any(map(is_parameter_name, views))

    def is_parameter(name: str, view: View) -> bool:
        return kind_of(view.dtype) == "float" and (not is_named or is_parameter_name(name))

    return {name: view.astype(wanted) if is_parameter(name, view) else view for name, view in views.items()}
