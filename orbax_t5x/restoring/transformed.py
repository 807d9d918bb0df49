"""Leaves of a source after transforms, as views."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, View, as_view
from orbax_t5x.lazy.value import has_unfilled
from orbax_t5x.provenance.steps import steps_of, without_skipped
from orbax_t5x.restoring.lineage import SourceHistory
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import (
    AnySource,
    OneSource,
    Transforms,
    chain_of,
    open_sources,
    rules_found,
    written_out,
)
from orbax_t5x.transforms.base import describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.migrations import Migration
from orbax_t5x.transforms.run import run_on_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class TransformedLeaves:
    """Leaves of a source after transforms, by name."""

    path: str
    views: Mapping[str, View]
    rules: tuple[str, ...]
    warnings: tuple[str, ...]


def open_transformed(
    source: AnySource,
    target: Mapping[str, Any],
    transforms: Transforms,
    options: RestoreOptions,
    stack: contextlib.ExitStack,
) -> TransformedLeaves:
    """Opens a source and runs transforms on its leaves."""
    chain = chain_of(transforms)
    sources = open_sources(source, options, stack)
    path = sources.path or ""
    diagnostics = Diagnostics(allows_unmapped=not options.strict, applied=[])
    stored = sources.leaves(diagnostics)
    given = (*sources.chain, *chain)
    applied = written_out(given, stored, target, path, settings=diagnostics)
    history = SourceHistory(sources)
    records = history.with_older_steps() if applied else history.recorded
    decision = history.decide(records, steps_of(applied, rules_found(given, applied)), options, "restore")
    applied, skipped = without_skipped(applied, decision.skipped)
    state = run_on_leaves(applied, stored, target, is_resuming=False, diagnostics=diagnostics, skipped=skipped)
    views = _views(state, diagnostics)
    if diagnostics.problems:
        raise diagnostics.error(path=path)
    warnings = ([decision.note] if decision.skipped and decision.note else []) + diagnostics.warnings
    rest = [one for index, one in enumerate(applied) if index not in skipped]
    rules = [describe_transform(one) for one in rest if not isinstance(one, OneSource | Migration) or one.steps]
    return TransformedLeaves(path, views, tuple(rules), tuple(warnings))


def _views(state: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, View]:
    """Returns the leaves as views."""
    views: dict[str, View] = {}
    # Two leaves may have one array behind a function: it is called once for both.
    functions: dict[LazyArray, View] = {}
    for name, value in state.items():
        if value is None:
            continue
        try:
            if isinstance(value, LazyArray):
                view = functions.setdefault(value, as_view(value, name))
            else:
                view = as_view(value, name)
        except (TypeError, ValueError) as error:
            diagnostics.problems.append(Problem("transform", name, f"not an array: {error}"))
            continue
        if has_unfilled(view.leaves()):
            message = "Pad takes new elements from the fallback of a restore, and this call has none"
            diagnostics.problems.append(Problem("fallback", name, message, Fix("pad with a number")))
            continue
        views[name] = view
    return views
