"""A plan's views as safetensors files, written in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orbax_t5x.errors import Problem, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.handlers.failed_saves import sync_directory
from orbax_t5x.handlers.stream import ChunkWriter, Job
from orbax_t5x.lazy import View
from orbax_t5x.operations import safetensors_files
from orbax_t5x.operations.safetensors_files import INDEX_NAME, Tensor, TensorInFile, create, index_of, why_not
from orbax_t5x.operations.writing import WriteOptions, Written
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.dtypes import kind_of

CONFIG_NAME = "config.json"
SAFETENSORS_FILES = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX_NAME) + "|" + re.escape(CONFIG_NAME)
)
"""Names of the files that a conversion writes."""

_MODEL_PARAMETERS = ("target/", "params/")
# More names than this in one error hide the first.
_SHOWN_LEAVES = 10


def write_safetensors(plan: RestorePlan, directory: Path, writing: WriteOptions) -> Written:
    """Writes the files, their index where there are several, and config.json where one is given."""
    views = {entry.name: entry.view for entry in plan.entries if entry.view is not None}
    skipped = _unsupported(views, skip=writing.on_unsupported == "skip")
    kept = _cast({name: view for name, view in views.items() if name not in skipped}, writing.dtype)
    tensors = {name: Tensor(name, view.shape, view.dtype) for name, view in kept.items()}
    files = safetensors_files.plan_files(list(tensors.values()), safetensors_files.MAX_FILE_BYTES)
    directory.mkdir()
    writer = ChunkWriter(writing.memory_limit_bytes, writing.progress, deferred=True)
    for file in files:
        path = create(file, directory)
        places = {name: TensorInFile(path, start, tensors[name]) for name, start in file.starts.items()}
        writer.defer([_job(kept[name], name, place, path) for name, place in places.items()])
    writer.run_deferred()
    if len(files) > 1:
        (directory / INDEX_NAME).write_bytes(index_of(files, list(tensors.values())))
    if writing.config is not None:
        (directory / CONFIG_NAME).write_bytes(writing.config)
    sync_directory(directory)
    return Written(len(kept), sum(tensor.nbytes for tensor in tensors.values()), skipped)


def _job(view: View, name: str, place: TensorInFile, path: Path) -> Job:
    def output(chunk: tuple[int, ...], context: Any) -> TensorInFile:
        return place

    return Job(view, name, output, None, str(path))


def _unsupported(views: Mapping[str, View], *, skip: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """The leaves to leave out, with shape and dtype; all of them together are one error unless they may be skipped."""
    reasons = {name: reason for name, view in views.items() if (reason := why_not(name, np.dtype(view.dtype)))}
    if not reasons or (skip and len(reasons) < len(views)):
        return {name: (tuple(views[name].shape), str(views[name].dtype)) for name in reasons}
    shown = listed([f"{name!r} {reason}" for name, reason in reasons.items()], _SHOWN_LEAVES, separator="; ")
    fix = "" if skip else '; nothing was written. Drop them by a transform, or pass on_unsupported="skip"'
    raise UnsupportedCheckpointError(
        f"{len(reasons)} of {len(views)} leaves cannot be stored in safetensors files: {shown}{fix}",
        leaf=next(iter(reasons)) if len(reasons) == 1 else None,
    )


def _cast(views: Mapping[str, View], dtype: Any) -> dict[str, View]:
    """The views, floating-point model parameters in `dtype`; where no name says which those are, all are."""
    if dtype is None:
        return dict(views)
    wanted = np.dtype(dtype)
    if kind_of(wanted) != "float" or why_not("", wanted):
        message = f"{wanted.name} is no floating-point type that safetensors files have"
        raise RestorePlanError([Problem("dtype", None, message)])
    is_named = any(name.startswith(_MODEL_PARAMETERS) for name in views)

    def is_parameter(name: str, view: View) -> bool:
        return kind_of(view.dtype) == "float" and (not is_named or name.startswith(_MODEL_PARAMETERS))

    return {name: view.astype(wanted) if is_parameter(name, view) else view for name, view in views.items()}
