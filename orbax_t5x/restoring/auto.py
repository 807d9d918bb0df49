"""Finds the rules that `"auto"` means, and refuses too few of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy import View, as_view
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.filled import filled_parameters, parameter_counts, patterns_for_filled
from orbax_t5x.restoring.sources import AUTO, PASS_RULES, FoundRules
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.base import AnyTransform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.inverses import inverse
from orbax_t5x.transforms.migrations import Migration
from orbax_t5x.transforms.run import Chain, run_transforms
from orbax_t5x.transforms.sizes import Pad, Slice
from orbax_t5x.trees.flat import FlatState

_SHOWN_NAMES = 3
_STANDS_BEFORE = Fix.any_of(
    Fix(f"put it before {AUTO!r}, by the checkpoint's names"),
    Fix.in_program(f"pass the rules that {AUTO!r} finds in its place: [*plan.found_rules, …]"),
)
_find_rules = on_demand.function("orbax_t5x.rules.finding", "find_rules")

_rename_streams = on_demand.function("orbax_t5x.rules.nnx_streams", "rename_streams")

_logger = logging.getLogger(__name__)


def find_mapping(
    auto: FoundRules,
    source: FlatState,
    target: Mapping[str, Any],
    path: str | None,
    fillable: Collection[str],
    settings: Diagnostics,
    following: Sequence[AnyTransform] = (),
) -> Any:
    """Returns the `FoundMapping` to the target as it is before the `following` transforms.

    Raises:
      RestorePlanError: no rules lead there, or a following transform has no inverse. Its problems name `"auto"`.
    """
    if not target:
        what = f"transforms={AUTO!r} finds rules between a checkpoint and a target, and there is no target"
        fix = Fix.any_of(PASS_RULES, Fix.in_program("pass the target"))
        raise RestorePlanError([Problem("rule", None, what, fix)], path=path)
    try:
        leaves = {name: leaf for name, leaf in source.items() if leaf is not None}
        if any(map(_changes_names, following)):
            wanted = _before(following, {name: leaf for name, leaf in target.items() if name not in fillable})
            target = _before(following, target)
            fillable = target.keys() - wanted.keys()
        streams = _rename_streams(leaves, target)
        leaves = run_transforms(streams, leaves, target, is_resuming=False, diagnostics=Diagnostics())
        mapping = (
            _find_rules(leaves, target, dict(auto.given))
            if auto.given
            else _mapping(leaves, target, fillable, settings)
        )
    except RestorePlanError as error:
        problems = [
            dataclasses.replace(problem, message=f"transforms={AUTO!r}: {problem.message}")
            for problem in error.problems
        ]
        raise RestorePlanError(problems, path=path) from error
    _logger.info("transforms=%r: %s", AUTO, mapping.found)
    return mapping._replace(parts=(*streams, *mapping.parts))


def _mapping(source: FlatState, target: Mapping[str, Any], fillable: Collection[str], settings: Diagnostics) -> Any:
    """Finds the `FoundMapping` of the target, or without fallback leaves."""
    wanted = {name: leaf for name, leaf in target.items() if name not in fillable}
    if not wanted or len(wanted) == len(target):
        return _find_rules(source, target, settings=settings)
    found = None
    with contextlib.suppress(RestorePlanError):
        found = _find_rules(source, target, settings=settings)
        if found.is_whole:
            return found
    with contextlib.suppress(RestorePlanError):
        return _find_rules(source, wanted, settings=settings)
    return found or _find_rules(source, target, settings=settings)


# What these change cannot be told from the target, and rules between names need not know it.
_KEEP_NAMES = (Pad, Slice)


def _steps_of(transforms: Iterable[AnyTransform]) -> Iterator[AnyTransform]:
    """Yields transforms in order, those of chains and migrations one by one."""
    for transform in transforms:
        # Rule packs are chains with inverses of their own.
        if isinstance(transform, Chain | Migration) and type(transform) in (Chain, Migration):
            yield from _steps_of(transform.steps)
        else:
            yield transform


def _changes_names(transform: AnyTransform) -> bool:
    """Returns True if the target may have other leaves before a transform than after it."""
    selects = getattr(transform, "only_selects", False) is True
    return not (selects or isinstance(transform, (FoundRules, *_KEEP_NAMES)))


def _before(following: Sequence[AnyTransform], target: FlatState) -> dict[str, Any]:
    """Returns the target's leaves as they are before transforms, by the inverses of these."""
    steps = [step for step in _steps_of(following) if _changes_names(step)]
    views = {name: _abstract(name, leaf) for name, leaf in target.items()}
    leaf_of = {id(view): target[name] for name, view in views.items()}
    state = views
    for step in reversed(steps):
        try:
            state = run_transforms(inverse(step), state, {}, is_resuming=False, diagnostics=Diagnostics())
        except ValueError as error:
            message = f"the target is seen through the inverse of what follows {AUTO!r}: {error}"
            raise RestorePlanError([Problem("rule", None, message, _STANDS_BEFORE)]) from error
    again = run_transforms(steps, state, target, is_resuming=False, diagnostics=Diagnostics())
    arrays = {name: view.shape for name, view in views.items() if isinstance(view, View)}
    changed = [name for name, shape in arrays.items() if getattr(again.get(name), "shape", None) != shape]
    if changed:
        message = f"what follows {AUTO!r} makes no {listed(changed, _SHOWN_NAMES)} of the target's own names"
        raise RestorePlanError([Problem("rule", changed[0], message, _STANDS_BEFORE)])
    return {name: leaf_of.get(id(leaf), leaf) for name, leaf in state.items()}


def _abstract(name: str, leaf: Any) -> Any:
    """Returns an array of the target as a view without values; anything else as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # PRNG keys
        dtype = np.dtype(np.uint32)
    return as_view(np.broadcast_to(np.empty((), dtype), leaf.shape), name)


def partial_rules(plan: RestorePlan) -> list[Problem]:
    """Returns the problem of parameters left to the fallback."""
    names = filled_parameters(plan)
    if not names:
        return []
    total, read, filled = parameter_counts(plan)
    message = (
        f"transforms={AUTO!r}: the rules found cover {read:,} of the model's {counted(total, 'parameter')}, and the "
        f"fallback would fill {filled:,}: {names}"
    )
    patterns = patterns_for_filled(plan)
    value = ... if patterns is None else patterns
    new = Fix.setting("if these are new, pass {}", fallback_for=value)
    others = Fix.in_program(f"add rules for them to those found: transforms=[{calls_code(plan.found_rules)}]")
    return [Problem("rule", None, message, Fix.any_of(new, others))]
