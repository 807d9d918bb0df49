"""Hypothesis: each of several sources has leaves of the target below its own name, and nothing combines them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x.restoring.chains import OneSource
from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.other_pack import pack_remedy
from orbax_t5x.text.code import calls_code
from orbax_t5x.transforms import Average, Overlay, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_on_leaves


@dataclasses.dataclass(frozen=True)
class SeveralSources(Hypothesis):
    """Sources that fill the same leaves, which `Average` combines, or different ones, which `Overlay` does."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        rules: dict[str, tuple[Transform, ...]] = {}
        filled: dict[str, set[str]] = {}
        for source in unmatched.sources:
            start = f"{source}/"
            if any(name.startswith(start) for name in unmatched.target.leaves):
                return
            own = {name.removeprefix(start): value for name, value in unmatched.free.items() if name.startswith(start)}
            found_names = _filled_names(own, unmatched)
            if not found_names and source in unmatched.bare_sources:
                found = pack_remedy(own, unmatched.target.original)
                if found is not None:
                    # As a transform of the call: after those of other sources, on this one's leaves.
                    rules[source] = (OneSource(source, found.transforms, frozenset(own)),)
                    found_names = _filled_names(_transformed(found.transforms, own, unmatched), unmatched)
            if found_names:
                filled[source] = found_names
        if len(filled) < 2:
            return
        *others, last = map(repr, filled)
        names = f"{', '.join(others)} and {last}"
        combined: Transform = Average(tuple([(source, 1.0) for source in sorted(filled)]))
        reason = f"each of the sources {names} has leaves for them below its own name"
        if len({frozenset(found_names) for found_names in filled.values()}) > 1:
            # A source with fewer leaves is one that changes some of the others'.
            combined = Overlay(tuple(sorted(filled, key=lambda source: len(filled[source]))))
            reason = f"the sources {names} have leaves for them, each below its own name"
        own_rules = [rule for source in filled for rule in rules.get(source, ())]
        yield Remedy((*own_rules, combined), reason, _advice(own_rules, combined))


def _advice(own_rules: list[Transform], combined: Transform) -> str | None:
    """Returns the fix in words where sources need transforms of their own."""
    given = ", ".join(
        f"{rule.source!r}: ot.Source(path, [{calls_code(rule.steps)}])"
        for rule in own_rules
        if isinstance(rule, OneSource)
    )
    if not given:
        return None
    return f"give the source its transforms: {{{given}}}, and combine the sources: [{calls_code((combined,))}]"


def _transformed(
    transforms: tuple[Transform, ...], leaves: Mapping[str, Any], unmatched: UnmatchedLeaves
) -> Mapping[str, Any]:
    return run_on_leaves(
        transforms, leaves, unmatched.target.original, is_resuming=False, diagnostics=Diagnostics(problems=[])
    )


def _filled_names(leaves: Mapping[str, Any], unmatched: UnmatchedLeaves) -> set[str]:
    """Returns the unfilled names of the target for which there is a leaf of their shape."""
    shapes = unmatched.unfilled_shapes
    return {name for name, leaf in leaves.items() if name in shapes and tuple(leaf.shape) == shapes[name]}
