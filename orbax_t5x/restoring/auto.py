"""Finds the rules that `"auto"` means, between leaves and a target."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.restoring.sources import AUTO, PASS_RULES, FoundRules
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState

_find_rules = on_demand.function("orbax_t5x.rules.finding", "find_rules")

_logger = logging.getLogger(__name__)


def find_mapping(
    auto: FoundRules,
    source: FlatState,
    target: Mapping[str, Any],
    path: str | None,
    fillable: Collection[str],
    settings: Diagnostics,
) -> Any:
    """Returns the `FoundMapping`; its refusals name `"auto"`."""
    if not target:
        what = f"transforms={AUTO!r} finds rules between a checkpoint and a target, and there is no target"
        fix = Fix.any_of(PASS_RULES, Fix.in_program("pass the target"))
        raise RestorePlanError([Problem("rule", None, what, fix)], path=path)
    try:
        leaves = {name: leaf for name, leaf in source.items() if leaf is not None}
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
    return mapping


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
