"""Hypothesis: names begin with another prefix on either side, such as `params/` and `target/`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, Shapes, UnmatchedLeaves, as_template, is_slot
from orbax_t5x.restoring.stacked_names import is_layer_word
from orbax_t5x.transforms import AssignmentMap, Rename

# Missing leaves whose likes are looked for, and prefixes tried for each: every one is tried with all missing leaves.
_SAMPLES = 4
_TRIED = 4
# A single leaf makes no prefix.
_LEAST_ALIKE = 2

# Parts that hold a whole model.
_ROOTS = frozenset({"target", "params", "model", "module", "transformer", "state", "variables", "base", "base_model"})

Prefixes = tuple[str, str]
"""The prefixes of names in a checkpoint and in a target; each is empty or ends with '/'."""


@dataclasses.dataclass(frozen=True)
class OtherPrefix(Hypothesis):
    """Leaves below one prefix of the checkpoint that have the names and shapes of most missing ones below another."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        free, unfilled = unmatched.free_shapes, unmatched.unfilled_shapes
        counts = {pair: _count_filled(pair, free, unfilled) for pair in _likely_prefixes(free, list(unfilled))}
        most = max(counts.values(), default=0)
        best = [pair for pair, count in counts.items() if count == most >= _LEAST_ALIKE]
        if len(best) != 1:
            return
        theirs, ours = best[0]
        reason = f"names begin with {theirs!r} in the checkpoint, and with {ours!r} in the target"
        if not theirs or not ours:
            reason = f"only in the {'checkpoint' if theirs else 'target'} do names begin with {theirs or ours!r}"
        advice = None
        if not _is_nesting(theirs, ours):
            advice = "if the two are the same module, map the names with a rule of AssignmentMap or Rename"
        for kind, old, new in ((AssignmentMap, ours, theirs), (Rename, theirs, ours)):
            yield Remedy((kind(((f"{re.escape(old)}(.*)", f"{as_template(new)}\\1"),)),), reason, advice)


def _is_nesting(theirs: str, ours: str) -> bool:
    """Returns True if one prefix only has more around the same model: `encoder/` and `decoder/` are two modules."""
    one, other = ([part for part in prefix.split("/") if part and part not in _ROOTS] for prefix in (theirs, ours))
    more, fewer = (one, other) if len(one) > len(other) else (other, one)
    return more[len(more) - len(fewer) :] == fewer and not any(map(_is_one_layer, more))


def _is_one_layer(part: str) -> bool:
    word = part.rstrip("0123456789")
    return word != part and (not word or is_layer_word(word.rstrip("_")))


def _likely_prefixes(free: Shapes, unfilled: Sequence[str]) -> list[Prefixes]:
    """Returns pairs that would fill one of a few missing leaves, those that share most parts at the end of the name."""
    by_last: dict[str, list[str]] = {}
    for name in free:
        by_last.setdefault(name.rpartition("/")[2], []).append(name)
    found: dict[Prefixes, None] = {}
    for name in unfilled[:: max(1, len(unfilled) // _SAMPLES)]:
        shared = {other: _shared_end(other, name) for other in by_last.get(name.rpartition("/")[2], ())}
        for other in sorted(shared, key=lambda other: -shared[other])[:_TRIED]:
            pair = other[: -shared[other]], name[: -shared[other]]
            if is_slot(other) == is_slot(name) and pair[0] != pair[1]:
                found[pair] = None
    return list(found)


def _shared_end(one: str, other: str) -> int:
    """Counts the characters at the end of two names that are the same, in whole parts; the last parts are."""
    length = -1
    for part, same in zip(reversed(one.split("/")), reversed(other.split("/")), strict=False):
        if part != same:
            break
        length += len(part) + 1
    return length


def _count_filled(pair: Prefixes, free: Shapes, unfilled: Shapes) -> int:
    theirs, ours = pair
    return sum(
        name.startswith(ours) and free.get(theirs + name[len(ours) :]) == shape for name, shape in unfilled.items()
    )
