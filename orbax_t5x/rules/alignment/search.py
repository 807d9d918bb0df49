"""Proposals of pairs by names, structure and proven neighbours.

Nothing here proves anything: a pair is the best guess of both of its leaves, and no other is as good.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

from orbax_t5x.rules.alignment.evidence import Evidence
from orbax_t5x.rules.alignment.kinds import LeafKind, Sides

# More kinds of one shape are compared by whole names alone.
MOST_RIVALS = 128


def proposals(sides: Sides, evidence: Evidence) -> dict[LeafKind, LeafKind]:
    """Returns sources by targets, proven pairs first."""
    found = dict(evidence.proven)
    scores: dict[LeafKind, dict[LeafKind, float]] = {}
    for target in sides.target.kinds:
        if target not in found:
            sources = {one: score for one, score in _scores(sides, evidence, target) if one not in evidence.target_of}
            if sources:
                scores[target] = sources
    while scores:
        best = {target: _only_best(sources) for target, sources in scores.items()}
        by_source: dict[LeafKind, dict[LeafKind, float]] = {}
        for target, sources in scores.items():
            for source, score in sources.items():
                by_source.setdefault(source, {})[target] = score
        pairs = {
            target: source
            for target, source in best.items()
            if source is not None and _only_best(by_source[source]) is target
        }
        if not pairs:
            break
        found.update(pairs)
        taken = set(pairs.values())
        scores = {
            target: left
            for target, sources in scores.items()
            if target not in pairs and (left := {one: score for one, score in sources.items() if one not in taken})
        }
    return found


def _only_best(scores: Mapping[LeafKind, float]) -> LeafKind | None:
    best = max(scores.values())
    found = [kind for kind, score in scores.items() if score > best - 1e-9]
    return found[0] if len(found) == 1 else None


def _scores(sides: Sides, evidence: Evidence, target: LeafKind) -> Iterator[tuple[LeafKind, float]]:
    """Yields sources with how much speaks for each."""
    sources = sides.source.by_bag.get(target.bag, ())
    others = sides.target.by_bag[target.bag]
    same = sides.source.by_template.get((target.template, target.bag))
    if max(len(sources), len(others)) > MOST_RIVALS:
        sources = [] if same is None else [same]
    counts = collections.Counter(word for kind in (*sources, *others) for word in kind.words)
    places = [place for _, place in sides.target.chain(target)]
    for source in sources:
        if not evidence.is_possible(source, target):
            continue
        score = 100.0 if source is same else 0.0
        score += math.fsum((0.5 if word[0] == " " else 2.0) / counts[word] for word in sides.common(source, target))
        mine = {place for _, place in sides.source.chain(source)}
        score += 0.5 * sum(place in mine for place in places) / len(places) + 0.4 * (places[-1] in mine)
        yield source, score + evidence.nearness(source, target)
