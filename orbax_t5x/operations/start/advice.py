"""What `restore_or_initialize` says of a checkpoint that does not fit the target: fixes that it takes itself, and
whether it is the checkpoint that is damaged.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, Fix, Problem, RestorePlanError
from orbax_t5x.readers import Limits, open_checkpoint

# What is not given to a step of the run itself.
_CHANGES = re.compile(r"fallback=|init_fn=|transforms\b|ot\.rules\b")


def with_init_fn(error: RestorePlanError) -> RestorePlanError:
    """The same problems, for a call whose values of missing leaves come from `init_fn=`."""

    def worded(text: str) -> str:
        return text.replace("fallback=", "init_fn=")

    problems = [
        dataclasses.replace(
            problem,
            message=worded(problem.message),
            fix=problem.fix and Fix(worded(str(problem.fix))),
        )
        for problem in error.problems
    ]
    return RestorePlanError(problems, path=error.path)


def of_own_step(error: RestorePlanError, path: str, items: Sequence[str]) -> RestorePlanError:
    """The same problems, for a step of the run itself, which is restored as it is.

    Args:
      error: of the plan.
      path: of the step.
      items: of the step, where all of several were to be restored.
    """
    fix = (
        "a step of the run is restored as it is: change the target, or begin a new run in a root of its own with "
        f"init_from={path!r}, transforms= and init_fn="
    )
    if items:
        fix = f"name the item that is the state: item= one of {', '.join(map(repr, items))}; or else {fix}"

    def advised(problem: Problem) -> Problem:
        return dataclasses.replace(problem, fix=Fix(fix)) if _CHANGES.search(str(problem.fix)) else problem

    return RestorePlanError([advised(problem) for problem in error.problems], path=error.path)


def damage_of(path: str, limits: Limits | None) -> CheckpointError | None:
    """What shows, without reading an array, that an item or step is damaged; None where nothing does.

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
