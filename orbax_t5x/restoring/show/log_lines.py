"""Log lines of a restore: one before it reads, one when it is done."""

from __future__ import annotations

from orbax_t5x.restoring.plan import RestorePlan, RestoreReport
from orbax_t5x.text.wording import leaves_text, plain, size_text


def about_to_restore(plan: RestorePlan) -> str:
    """Describes what will be read."""
    return f"restoring {_counts(plan)} from {sources_text(plan)}: {size_text(plan.bytes_to_read)} to read here"


def has_restored(plan: RestorePlan, report: RestoreReport) -> str:
    """Describes what was read and verified, and the time it took."""
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
