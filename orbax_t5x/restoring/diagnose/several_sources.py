"""Hypotheses on several sources: uncombined or untransformed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.other_layout import pack_remedy
from orbax_t5x.restoring.sources import OneSource
from orbax_t5x.text.code import calls_code
from orbax_t5x.transforms import Average, Overlay, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_on_leaves


@dataclasses.dataclass(frozen=True)
class SeveralSources(Hypothesis):
    """Sources to combine with `Average` or `Overlay`."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        rules: dict[str, tuple[OneSource, ...]] = {}
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
        # A source with fewer leaves is one that changes some of the others'.
        overlay = Overlay(tuple(sorted(filled, key=lambda source: len(filled[source]))))
        own_rules = [rule for source in filled for rule in rules.get(source, ())]
        reason = f"the sources {names} have leaves for them, each below its own name"
        if len({name for found_names in filled.values() for name in found_names}) == sum(map(len, filled.values())):
            yield Remedy((*own_rules, overlay), reason, _advice(own_rules, overlay) if own_rules else None)
            return
        # Where two sources have the same leaf, its name does not show which value is wanted.
        average = Average(tuple([(source, 1.0) for source in sorted(filled)]))
        is_same = len(set(map(frozenset, filled.values()))) == 1
        ways = (average, overlay) if is_same else (overlay,)
        yield Remedy((*own_rules, ways[0]), reason, _advice(own_rules, *ways))


def _advice(own_rules: list[OneSource], *ways: Transform) -> str:
    """Returns the fix in words: sources' transforms and combinations."""
    meanings = {Average: "for their mean", Overlay: "to take each leaf from the first that has it"}
    combine = ", or ".join(f"[{calls_code((way,))}] {meanings[type(way)]}" for way in ways)
    given = ", ".join(f"{rule.source!r}: ot.Source(path, [{calls_code(rule.steps)}])" for rule in own_rules)
    sources = f"give the source its transforms: {{{given}}}, and " if given else ""
    return f"{sources}combine the sources: {combine}"


def _transformed(
    transforms: tuple[Transform, ...], leaves: Mapping[str, Any], unmatched: UnmatchedLeaves
) -> Mapping[str, Any]:
    return run_on_leaves(
        transforms, leaves, unmatched.target.original, is_resuming=False, diagnostics=Diagnostics(problems=[])
    )


def _filled_names(leaves: Mapping[str, Any], unmatched: UnmatchedLeaves) -> set[str]:
    """Returns unfilled names with leaves of their shape."""
    shapes = unmatched.unfilled_shapes
    return {name for name, leaf in leaves.items() if name in shapes and tuple(leaf.shape) == shapes[name]}


@dataclasses.dataclass(frozen=True)
class BareSource(Hypothesis):
    """A pack for a source, below the source's name."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        for source, leaves in unmatched.bare_sources.items():
            found = pack_remedy(leaves, OneSource(source, ()).target_below(unmatched.target.original))
            if found is not None:
                advice = (
                    f"give the source its transforms: {{{source!r}: ot.Source(path, [{calls_code(found.transforms)}])}}"
                )
                yield Remedy(found.transforms, f"of the source {source!r}, {found.reason}", advice, source)
