"""Log lines of a restore, and texts about filled parameters.

A fallback fills these. A model parameter is a leaf that `dtype=` would cast; in a tree without any such, every leaf is
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orbax_t5x.restoring.plan import PlanEntry, RestorePlan, RestoreReport
from orbax_t5x.text.fold import fold_names
from orbax_t5x.text.wording import counted, leaves_text, listed, plain, size_text
from orbax_t5x.trees.subtrees import exact_patterns, whole_subtrees


def about_to_restore(plan: RestorePlan) -> str:
    """Describes the bytes to read."""
    return f"restoring {_counts(plan)} from {sources_text(plan)}: {size_text(plan.bytes_to_read)} to read here"


def has_restored(plan: RestorePlan, report: RestoreReport) -> str:
    """Describes the bytes read and verified, and the time."""
    return f"restored {leaves_text(len(plan.entries))} from {sources_text(plan)}: {report.summary()}"


def _counts(plan: RestorePlan) -> str:
    words = {"read": "read", "value": "constant", "fallback": "from the fallback", "keep": "kept"}
    counts = {word: sum(entry.action == action for entry in plan.entries) for action, word in words.items()}
    parts = [f"{count:,} {word}" for word, count in counts.items() if count]
    left = [(len(plan.unused), "unused"), (len(plan.dropped), "dropped")]
    parts += [f"{count:,} of the checkpoint {word}" for count, word in left if count]
    return leaves_text(len(plan.entries)) + (f" ({', '.join(parts)})" if parts else "")


def sources_text(plan: RestorePlan) -> str:
    """Lists the paths with their formats, without control characters for a terminal."""
    paths = [f"{plain(checkpoint.path)} ({checkpoint.format})" for checkpoint in plan.checkpoints.values()]
    return ", ".join(paths) or "no checkpoint"


_SHOWN_PATTERNS = 8


class ParameterCounts(NamedTuple):
    """Numbers of model parameters: all, read and filled."""

    total: int
    from_checkpoint: int
    from_fallback: int


def parameter_counts(plan: RestorePlan) -> ParameterCounts:
    """Counts the model parameters of a plan."""
    parameters = _parameter_entries(plan)
    read, filled = (sum(entry.action == action for entry in parameters) for action in ("read", "fallback"))
    return ParameterCounts(len(parameters), read, filled)


def filled_text(plan: RestorePlan) -> str:
    """Counts the fallback's leaves in a sentence."""
    if not plan.filled:
        return ""
    total, read, filled = parameter_counts(plan)
    return f"{read:,} of {counted(total, 'model parameter')} from the checkpoint, {filled:,} from fallback"


def filled_patterns(plan: RestorePlan) -> str:
    """Lists the fallback's leaves as patterns of names."""
    every = [entry.name for entry in plan.entries if entry.action != "keep"]
    return plain(listed(folded_subtrees(plan.filled, every), _SHOWN_PATTERNS))


def warning_of_filled(plan: RestorePlan) -> str:
    """Returns the warning about filled parameters."""
    if plan.is_fill_expected or not (names := filled_parameters(plan)):
        return ""
    count = f"{parameter_counts(plan).from_fallback:,} of {counted(parameter_counts(plan).total, 'model parameter')}"
    unused = f" {leaves_text(len(plan.unused))} of the checkpoint found no place." if plan.unused else ""
    return (
        f"{count} come from the fallback, for want of them in {sources_text(plan)}: {names}.{unused} "
        "If that is meant, name them by fallback_for=[patterns]."
    )


def filled_parameters(plan: RestorePlan) -> str:
    """Lists the filled model parameters as patterns of names."""
    parameters = _parameter_entries(plan) if plan.filled else ()
    filled = [entry.name for entry in parameters if entry.action == "fallback"]
    return plain(listed(folded_subtrees(filled, [entry.name for entry in parameters]), _SHOWN_PATTERNS))


def patterns_for_filled(plan: RestorePlan) -> list[str] | None:
    """Returns all filled names as regexes for `fallback_for`."""
    patterns = exact_patterns(plan.filled, [entry.name for entry in plan.entries if entry.action != "keep"])
    return patterns if len(patterns) <= _SHOWN_PATTERNS else None


def _parameter_entries(plan: RestorePlan) -> Sequence[PlanEntry]:
    with_values = [entry for entry in plan.entries if entry.action != "keep"]
    return [entry for entry in with_values if entry.leaf is not None and entry.leaf.is_float_param] or with_values


def folded_subtrees(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """Folds names to `dec/** (46)` for subtrees that they fill."""
    found = whole_subtrees(names, every)
    sizes = list(found.values())
    return [f"{row.texts[0]} ({sum(sizes[at] for at in row.members):,})" for row in fold_names(found)]
