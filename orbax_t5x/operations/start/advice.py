"""Errors of `restore_or_initialize` about unfit checkpoints.

The fixes have its own keywords; damage may explain the misfit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, Fix, Problem, RestorePlanError
from orbax_t5x.readers import Limits, open_checkpoint

_KEYWORDS = {"fallback": "init_fn"}
# Keywords that are not given to a step of the run itself.
_OF_NEW_RUNS = frozenset({"fallback", "transforms"})


def with_init_fn(error: RestorePlanError) -> RestorePlanError:
    """Rewrites problems for a call with `init_fn=`.

    The values of missing leaves come from it.
    """
    problems = [
        problem if problem.fix is None else dataclasses.replace(problem, fix=problem.fix.with_keywords(_KEYWORDS))
        for problem in error.problems
    ]
    return RestorePlanError(problems, path=error.path)


def of_own_step(error: RestorePlanError, path: str, items: Sequence[str]) -> RestorePlanError:
    """Rewrites problems for the run's own step.

    It is restored as it is.

    `items` are those of the step, where all of several were to be restored.
    """
    new_run = Fix.setting(
        "a step of the run is restored as it is: change the target, or begin a new run in a root of its own with {}",
        init_from=path,
        transforms=...,
        init_fn=...,
    )
    fix = new_run
    if items:
        names = ", ".join(map(repr, items))
        fix = Fix.any_of(Fix.setting(f"name the item that is the state: {{}} one of {names}", item=...), new_run)

    def advised(problem: Problem) -> Problem:
        is_for_new_run = problem.fix is not None and any(map(_is_for_new_run, problem.fix.ways))
        return dataclasses.replace(problem, fix=fix) if is_for_new_run else problem

    return RestorePlanError([advised(problem) for problem in error.problems], path=error.path)


def _is_for_new_run(fix: Fix) -> bool:
    return bool(fix.transforms) or fix.removed is not None or not _OF_NEW_RUNS.isdisjoint(fix.arguments)


def damage_of(path: str, limits: Limits | None) -> CheckpointError | None:
    """Describes the damage of a step, or returns None.

    An array cannot be opened, or the checksums are of other names or shapes than the metadata.
    """
    try:
        with open_checkpoint(path, limits=limits) as checkpoint:
            for view in checkpoint.leaves.values():
                for leaf in view.leaves():
                    checksums = leaf.checksums
                    for error in (leaf.error, None if checksums is None else checksums.error):
                        if isinstance(error, CorruptCheckpointError):
                            return error
    except CheckpointError:
        return None  # it could be opened before, and whatever it is now is said at the next start
    return None
