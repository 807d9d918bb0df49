"""Errors of `restore_or_initialize` in its own keywords, and the damage that explains some of them."""

from __future__ import annotations

import dataclasses

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, RestorePlanError
from orbax_t5x.readers import Limits, open_checkpoint

_KEYWORDS = {"fallback": "init_fn"}


def with_init_fn(error: RestorePlanError) -> RestorePlanError:
    """Rewrites problems for a call with `init_fn=`, from which the values of missing leaves come."""
    problems = [
        problem if problem.fix is None else dataclasses.replace(problem, fix=problem.fix.with_keywords(_KEYWORDS))
        for problem in error.problems
    ]
    return RestorePlanError(problems, path=error.path)


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
