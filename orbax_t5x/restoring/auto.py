"""Finds the rules that `"auto"` means, and refuses too few of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.filled import filled_parameters, parameter_counts, patterns_for_filled
from orbax_t5x.restoring.sources import AUTO, PASS_RULES, FoundRules
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted
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


_LONGEST_CODE = 600


def partial_rules(plan: RestorePlan) -> list[Problem]:
    """Returns the problem of parameters left to the fallback."""
    names = filled_parameters(plan)
    if not names:
        return []
    total, read, filled = parameter_counts(plan)
    code = textwrap.shorten(calls_code(plan.found_rules), _LONGEST_CODE, placeholder=" …")
    message = (
        f"transforms={AUTO!r}: the rules found cover {read:,} of the model's {counted(total, 'parameter')}, and the "
        f"fallback would fill {filled:,}: {names}. The rules: {code}"
    )
    patterns = patterns_for_filled(plan)
    value = ... if patterns is None else patterns
    return [Problem("rule", None, message, Fix.setting("if these are new, pass {}", fallback_for=value))]
