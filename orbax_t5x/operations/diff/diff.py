"""Comparison of two checkpoints: names, shapes, dtypes, and values by streaming.

Names are matched after transforms of the first checkpoint. Arrays of one shape are read block by block, the same box of
both sides at a time, so that memory is bounded by the limit whatever the size of a leaf, as long as stored chunks are
smaller. What checksums the formats keep are compared on the way. A leaf that is damaged or cannot be read is reported,
and the others are compared all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.lazy import ReadStats, View, full_box
from orbax_t5x.operations.diff.blocks import LeafPair, PairOutcome, compare_pairs
from orbax_t5x.operations.diff.report import DiffReport, DiffStatus, LeafDiff
from orbax_t5x.operations.diff.values import LargestDifference, Tolerance, are_comparable
from orbax_t5x.operations.division import divided
from orbax_t5x.readers import Limits
from orbax_t5x.restoring.execute.groups import clusters_of
from orbax_t5x.restoring.options import AnyProcesses, RestoreOptions
from orbax_t5x.restoring.sources import AnySource, Transforms
from orbax_t5x.restoring.transformed import open_transformed
from orbax_t5x.text.progress_bar import Progress, shown_progress
from orbax_t5x.text.wording import dtype_text
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_tuple
from orbax_t5x.trees.narrow import check_flag


@guarded
def diff(
    a: AnySource,
    b: AnySource,
    transforms: Transforms = (),
    *,
    values: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
    only: Pattern | Iterable[Pattern] = (),
    strict: bool = True,
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
    progress: Progress | None = RestoreOptions.progress,
    is_resuming: bool | None = RestoreOptions.is_resuming,
    item: str | None = RestoreOptions.item,
    limits: Limits | None = RestoreOptions.limits,
    multiprocessing_options: AnyProcesses | None = RestoreOptions.multiprocessing_options,
) -> DiffReport:
    """Compares two checkpoints, of any formats and in any stores.

    In a job every process calls this, and reads its share of the leaves. Only arrays are compared: None and empty
    containers have no values, and some formats no place for them. Values of different dtypes are compared in a type
    that has both, NaN equals NaN, and -0 equals 0.

    Args:
      a, b: as `orbax_t5x.restore` takes its source: paths, open checkpoints, `orbax_t5x.Source` with transforms of its
        own, or mappings of several.
      transforms: applied to `a`; as their target they get the leaves of `b`, to which `"auto"` finds the way, too.
      values: whether arrays are read; if not, only names, shapes and dtypes are compared.
      only: patterns of whole names; if there are any, other leaves are neither compared nor reported.
      strict: whether leaves that only one side has are a difference; False: they are reported all the same.
      atol, rtol: elements are equal where `|a - b| <= atol + rtol * |b|`, as in `numpy.isclose`.
      memory_limit_bytes: host memory for blocks in flight, 256 MiB by default; a larger chunk is read by itself.
        Chunks that are decoded beside them have as much memory of their own.
      progress: called as `progress(done_bytes, total_bytes, leaf)` of this process's share, from one thread at a time;
        "bar" shows a bar on a terminal.
      is_resuming: whether the transforms were applied before `a` was written; None decides by its record.
      item: which item of an Orbax step, of both; where they differ, pass `orbax_t5x.Source(path, item=…)`.
      limits: what a file's headers may claim.
      multiprocessing_options: the processes that call it together, as in `orbax_t5x.restore`.

    Returns:
      What was found for each leaf, the same on every process; differences and damage are no exceptions.

    Raises:
      RestorePlanError: the transforms cannot be applied to `a`.
      CheckpointError: a checkpoint cannot be opened.
      ValueError, TypeError: a tolerance that is negative or no number, or another argument that cannot be.

    Example:
      >>> report = ot.diff(bundle, bundle, [ot.transforms.Drop(["shared/embedding"])])
      >>> [leaf.name for leaf in report.leaves if leaf.status == "only in b"]  # the embedding's moments follow it
      ['shared/embedding', 'shared/embedding_slot_vc', 'shared/embedding_slot_vr']
    """
    started = time.monotonic()
    tolerance = _tolerance(atol, rtol)
    if not isinstance(values, bool):
        raise TypeError(f"values={values!r}: pass True, or False to compare only names, shapes and dtypes")
    check_flag("strict", strict)
    patterns = [compile_pattern(pattern, "only") for pattern in pattern_tuple(only, "only")]
    reading = RestoreOptions(memory_limit_bytes=memory_limit_bytes, progress=progress)
    options = RestoreOptions(item=item, is_resuming=is_resuming, strict=False, limits=limits)
    stats = ReadStats("touched", reading.limit)
    paths = ", ".join(os.fspath(side) for side in (a, b) if isinstance(side, str | os.PathLike))
    with divided(multiprocessing_options, paths, "diff") as division, contextlib.ExitStack() as stack:
        right = open_transformed(b, {}, (), RestoreOptions(item=item, strict=False, limits=limits), stack)
        left = open_transformed(a, right.views, transforms, options, stack)
        names = [name for name in sorted({*left.views, *right.views}) if not patterns or _matches(patterns, name)]
        found = {name: _without_values(name, left.views.get(name), right.views.get(name)) for name in names}
        if values:
            pairs = [
                LeafPair(name, left.views[name], right.views[name])
                for name, leaf in found.items()
                if leaf.status in ("equal", "dtype") and not leaf.reason
            ]
            on_progress = stack.enter_context(shown_progress(reading.progress, "comparing"))

            def compare(share: Sequence[Sequence[LeafPair]]) -> list[Any]:
                pairs = [pair for cluster in share for pair in cluster]
                outcomes = compare_pairs(pairs, tolerance, reading.limit, on_progress, stats)
                return [[_result(outcomes[pair.name]) for pair in cluster] for cluster in share]

            # One process compares a checksum: it needs all pairs of a leaf.
            clusters = clusters_of(pairs, lambda leaf, boxes: 1)
            names = [
                f"{leaf.name} {leaf.dtype_a} {leaf.shape_a} {leaf.dtype_b} {leaf.shape_b}" for leaf in found.values()
            ]
            results = division.results(clusters, names, _nbytes, compare)
            for pair, result in zip(itertools.chain(*clusters), itertools.chain(*results), strict=True):
                found[pair.name] = _with_values(found[pair.name], result)
        stats.check_watched()
        nbytes, seconds = division.total(stats.bytes_read, time.monotonic() - started)
        return DiffReport(
            left.path,
            right.path,
            left.rules,
            tuple(found.values()),
            values,
            tolerance.atol,
            tolerance.rtol,
            (*left.warnings, *right.warnings),
            nbytes,
            seconds,
            strict,
        )


def _matches(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)


def _tolerance(atol: float, rtol: float) -> Tolerance:
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r} is no number")
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r} must be finite and not negative")
    return Tolerance(float(atol), float(rtol))


def _without_values(name: str, a: View | None, b: View | None) -> LeafDiff:
    """Compares names, shapes and dtypes.

    "equal" or "dtype" without a reason: values are to be compared.
    """
    broken = next((error for view in (a, b) if view is not None for error in _errors(view)), None)
    if broken is not None:
        status, reason = _failed("a" if a is not None and broken in _errors(a) else "b", broken)
    elif a is None or b is None:
        status, reason = ("only in b" if a is None else "only in a"), ""
    elif a.shape != b.shape:
        status, reason = "shape", ""
    elif not are_comparable(a.dtype, b.dtype):
        status, reason = "dtype", "text against numbers"
    else:
        status, reason = ("equal" if a.dtype == b.dtype else "dtype"), ""
    return LeafDiff(
        name,
        status,
        None if a is None else tuple(a.shape),
        None if b is None else tuple(b.shape),
        None if a is None else dtype_text(a.dtype),
        None if b is None else dtype_text(b.dtype),
        reason=reason,
    )


def _errors(view: View) -> Iterable[CheckpointError]:
    return [leaf.error for leaf in view.leaves() if leaf.error is not None]


def _failed(side: str, error: CheckpointError) -> tuple[DiffStatus, str]:
    if isinstance(error, CorruptCheckpointError):
        return "damaged", f"{side}: {error.message}"
    return "unreadable", f"{side}: {type(error).__name__}: {error.message}"


def _nbytes(pairs: Iterable[LeafPair]) -> int:
    return sum(pair.bytes_of(full_box(pair.shape)) for pair in pairs)


def _result(outcome: PairOutcome) -> list[Any]:
    """Encodes the outcome of a pair as JSON data."""
    if outcome.failure is not None:
        return list(_failed(*outcome.failure))
    apart = outcome.apart
    largest = (None if one is None else one.as_data() for one in (apart.absolute, apart.relative))
    return [apart.differing, apart.one_nan, *largest]


def _with_values(leaf: LeafDiff, result: Sequence[Any]) -> LeafDiff:
    """Adds the results of reading both sides to a comparison."""
    if len(result) == 2:
        return dataclasses.replace(leaf, status=result[0], reason=result[1])
    differing, one_nan, *largest = result
    absolute, relative = (None if one is None else LargestDifference.of_data(one) for one in largest)
    status = "values" if differing else leaf.status
    size = math.prod(leaf.shape_a or ())
    return dataclasses.replace(
        leaf, status=status, size=size, differing=differing, one_nan=one_nan, absolute=absolute, relative=relative
    )
