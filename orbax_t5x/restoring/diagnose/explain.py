"""Explains why a state dict does not fill a target: the one entry of this package, for a plan that has failed.

Names of Hugging Face without the pack, a scanned target, `params/` against `target/`: each makes dozens of missing
leaves, and each is one mistake. The hypotheses are asked in order for transforms, which are tried by matching again,
and then for what explains the leaves that are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.chains import FoundRules, OneSource
from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves, model_leaves
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.text.code import code_of
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_on_leaves

# In order: causes of many missing leaves, then of single leaves, each with the attribute of the leaves that it needs.
HYPOTHESES = (
    ("transforms", "other_layout", "NeedlessRules"),
    ("sources", "several_sources", "SeveralSources"),
    ("bare_sources", "several_sources", "BareSource"),
    ("unfilled", "other_layout", "OtherPack"),
    ("likes", "other_prefix", "OtherPrefix"),
    ("likes", "renamed_part", "RenamedPart"),
    ("missing", "other_layout", "OtherNames"),
    ("missing", "unexplained", "SingleArray"),
    ("missing", "unexplained", "NoValue"),
    ("optimizer", "other_optimizer", "OtherOptimizer"),
    ("sized", "other_depth", "OtherDepth"),
    ("fed_forward", "other_depth", "OtherFeedForward"),
    ("leftovers", "leftovers", "EncoderOnly"),
    ("leftovers", "leftovers", "UnreadScales"),
    ("leftovers", "leftovers", "TiedLogits"),
    ("likes", "similar_name", "SimilarName"),
    ("leftovers", "leftovers", "OtherModels"),
    ("unexplained", "unexplained", "Unexplained"),
)

_NOTHING_MORE = Fix("")
_is_pack = on_demand.function("orbax_t5x.rules.pack", "is_pack")


@dataclasses.dataclass(frozen=True, eq=False)
class MatchFailure:
    """A state dict that does not fill a target, and what it takes to try again.

    Attributes:
      matcher: of the two; it has looked for every leaf.
      match: makes a matcher of another state dict, with the diagnostics of what made it.
      source: the leaves before the transforms, by name.
      before: the problems that were known before the transforms.
      given: the caller's transforms.
      transforms: the same with what `"auto"` found.
      proposes: whether transforms are proposed.
      strict: whether leftovers are problems.
      takes_rules: whether one more transform would be applied; not so where a run is resumed.
      sources: names of several sources, with which the names of their leaves begin.
    """

    matcher: Matcher
    match: Callable[[Mapping[str, Any], Diagnostics], Matcher]
    source: Mapping[str, Any]
    before: Sequence[Problem]
    given: Sequence[Callable[..., Any]]
    transforms: Sequence[Callable[..., Any]]
    proposes: bool
    strict: bool
    takes_rules: bool
    sources: tuple[str, ...] = ()

    def bare_sources(self) -> dict[str, dict[str, Any]]:
        """Returns the leaves of the sources without transforms of their own, by the sources' own names for them."""
        bare = set(self.sources) - {one.source for one in self.transforms if isinstance(one, OneSource)}
        leaves: dict[str, dict[str, Any]] = {}
        for name, value in self.source.items() if bare else ():
            # Of the sources `a` and `a/b` both may be meant; the longer one is tried.
            owner = max((one for one in self.sources if name.startswith(f"{one}/")), key=len, default="")
            if owner in bare and value is not None:
                leaves.setdefault(owner, {})[name.removeprefix(f"{owner}/")] = value
        return leaves


class _TriedRemedy(NamedTuple):
    """A remedy, the problems that it leaves, equally good remedies, and the count of leaves without a match before."""

    remedy: Remedy
    left: list[Problem]
    others: list[Remedy]
    unfilled: int


def explain_failure(**failed: Any) -> list[Problem]:
    """Returns everything that is wrong; the cause of most missing leaves comes first, with a fix that was tried.

    Args:
      failed: the attributes of a `MatchFailure`.
    """
    failure = MatchFailure(**failed)
    if failure.proposes and failure.matcher.unfilled and failure.matcher.target.kind == "tree":
        problems = _remedied(failure)
        if problems is not None:
            return problems
    return _problems(failure.matcher, failure)


def _remedied(failure: MatchFailure) -> list[Problem] | None:
    """Returns the problems with the best remedy, and before them the one that it solves; None without a remedy."""
    matcher, is_added = _matched_before(failure)
    best, found_by = _best_remedy(matcher, failure, lambda matcher: matcher.unfilled), "name and shape"
    if best is None:
        # A model of another size: the names show how to map it, and the problems that are left which sizes differ.
        best, found_by = _best_remedy(matcher, failure, _without_name), "name"
    if best is None:
        return None
    remedy, left, others, unfilled = best
    leaves = counted(unfilled, "target leaf has", "target leaves have")
    message = f"{leaves} no match by {found_by} in the checkpoint: {remedy.reason}"
    if matcher.restores_nothing:
        message = f"no leaf of the checkpoint has a place in the target, and {message}"
    if left:
        message += f"; with the fix, {counted(len(left), 'problem is', 'problems are')} left, listed below"
    kind = "nothing_restored" if matcher.restores_nothing else "missing"
    ways = [_fix_of_remedy(way, failure, is_added=is_added) for way in (remedy, *others)]
    fix = ways[0]
    if others and remedy.advice is None:
        # One text is enough for Python; another interface may have words for the others only.
        fix = dataclasses.replace(fix, alternatives=tuple(ways))
    return [Problem(kind, None, message, fix), *left]


def _without_name(matcher: Matcher) -> list[str]:
    return [name for name in matcher.unfilled if name not in matcher.state]


def _best_remedy(
    matcher: Matcher, failure: MatchFailure, unfilled_of: Callable[[Matcher], list[str]]
) -> _TriedRemedy | None:
    """Returns the remedy that leaves the fewest problems of those that fill most of the leaves of `unfilled_of`."""
    unfilled = unfilled_of(matcher)
    unmatched = _unmatched(matcher, failure)
    best: _TriedRemedy | None = None
    for remedy in (remedy for hypothesis in hypotheses(unmatched) for remedy in hypothesis.remedies(unmatched)):
        if best is not None and not best.left and remedy.reason != best.remedy.reason:
            break
        after = _match_with(remedy, matcher, failure)
        if not _fills_most(unfilled, unfilled_of(after)):
            continue
        problems = _problems_after(remedy, after, matcher, failure)
        if problems is None:
            continue
        if best is None or len(problems) < len(best.left):
            best = _TriedRemedy(remedy, problems, [], len(unfilled))
        elif problems == best.left and remedy.reason == best.remedy.reason:
            best.others.append(remedy)
    return best


def _hypothesis(module: str, name: str) -> Hypothesis:
    return on_demand.function(f"orbax_t5x.restoring.diagnose.{module}", name)()


def hypotheses(unmatched: UnmatchedLeaves) -> Iterator[Hypothesis]:
    """Loads the hypotheses that unmatched leaves can have, in order."""
    for needed, module, name in HYPOTHESES:
        if getattr(unmatched, needed):
            yield _hypothesis(module, name)


def _matched_before(failure: MatchFailure) -> tuple[Matcher, bool]:
    """Returns the matcher to start from, and whether a remedy is added to the transforms or replaces them.

    A `Translate` or a rule pack that knew no name at all is one that should not have been given.
    """
    found = failure.matcher
    kinds = {problem.kind for problem in found.diagnostics.problems}
    is_translate = "translate" in kinds and not found.state
    is_pack = "unused_rule" in kinds and found.state.keys() == failure.source.keys()
    if len(failure.transforms) != 1 or not (is_translate or (is_pack and _is_pack(failure.transforms[0]))):
        return found, True
    matcher = failure.match(failure.source, Diagnostics(problems=list(failure.before)))
    matcher.entries()
    return matcher, False


def _match_with(remedy: Remedy, matcher: Matcher, failure: MatchFailure) -> Matcher:
    notes, state, transforms = matcher.diagnostics.copy(), matcher.state, remedy.transforms
    if remedy.source:
        names = frozenset(failure.bare_sources()[remedy.source])
        notes, state = Diagnostics(problems=list(failure.before)), failure.source
        transforms = (OneSource(remedy.source, remedy.transforms, names), *failure.transforms)
    elif remedy.is_first or remedy.is_instead:
        notes, state = Diagnostics(problems=list(failure.before)), failure.source
        transforms = (*remedy.transforms, *(() if remedy.is_instead else failure.transforms))
    state = run_on_leaves(transforms, state, matcher.target.original, is_resuming=False, diagnostics=notes)
    after = failure.match(state, notes)
    after.entries()
    return after


def _problems_after(remedy: Remedy, after: Matcher, before: Matcher, failure: MatchFailure) -> list[Problem] | None:
    """Returns the problems that are left; after advice none that corrects or adds to rules that nobody has written."""
    if remedy.advice is None or remedy.source:
        return _problems(after, failure)
    if len(after.diagnostics.problems) > len(before.diagnostics.problems):
        return None
    return _problems(after, dataclasses.replace(failure, takes_rules=False))


def _fills_most(before: Collection[str], after: Collection[str]) -> bool:
    """Returns True if most of what was missing is there, and nothing that was there is missing.

    An optimizer's state may be missing for another reason, such as that it was never saved.
    """
    model = model_leaves(before)
    return set(after) <= set(before) and 2 * len(set(after).intersection(model)) < len(model)


def _fix_of_remedy(remedy: Remedy, failure: MatchFailure, *, is_added: bool) -> Fix:
    if remedy.advice is not None:
        return Fix(remedy.advice)
    if remedy.is_instead:
        return Fix.setting("pass {}", transforms=remedy.transforms)
    if not is_added:
        return Fix.setting(f"pass {{}} in place of {code_of(failure.transforms[0])}", transforms=remedy.transforms)
    if remedy.is_first:
        return Fix.setting("pass {}", transforms=(*remedy.transforms, *failure.transforms))
    return _adding(remedy.transforms, failure)


def _adding(transforms: Sequence[Any], failure: MatchFailure, way: Fix = _NOTHING_MORE) -> Fix:
    """Returns the fix that adds transforms to those of the call, and sets the arguments of `way`, too.

    To what `"auto"` found the transforms are written out.
    """
    if any(isinstance(transform, FoundRules) for transform in failure.given):
        return Fix.setting("pass {}", transforms=(*failure.transforms, *transforms), **way.arguments)
    has_others = any(not isinstance(transform, OneSource) for transform in failure.given)
    fix = Fix.adding(*transforms, to_others=has_others)
    return fix.also_setting(way.words, **way.arguments) if way.arguments else fix


def _with_given(problem: Problem, failure: MatchFailure) -> Problem:
    """Returns a problem whose fix adds its transforms to those of the call."""
    if problem.fix is None or not failure.given:
        return problem
    ways = [_adding(way.transforms, failure, way) if way.transforms else way for way in problem.fix.ways]
    return dataclasses.replace(problem, fix=Fix.any_of(*ways))


def _unmatched(matcher: Matcher, failure: MatchFailure) -> UnmatchedLeaves:
    return UnmatchedLeaves(
        stored={name: value for name, value in matcher.state.items() if value is not None},
        target=matcher.target,
        unfilled=matcher.unfilled,
        missing=tuple(matcher.missing),
        leftovers=tuple([name for name in matcher.leftovers if name not in matcher.diagnostics.explained])
        if failure.strict
        else (),
        transforms=failure.transforms,
        takes_rules=failure.takes_rules,
        bare_sources=failure.bare_sources() if len(failure.sources) else {},
        source=failure.source,
        sources=failure.sources,
        clashes={one.leaf or "": one for one in matcher.problems if one.kind == "shape"},
    )


def _problems(matcher: Matcher, failure: MatchFailure) -> list[Problem]:
    """Returns the problems of the transforms and of the leaves that do not fit, and those that hypotheses explain."""
    unmatched = _unmatched(matcher, failure)
    position = {one.name: at for at, one in enumerate(unmatched.missing)}
    found: list[Problem] = []
    for needed, module, name in HYPOTHESES:
        if getattr(unmatched, needed):
            explained = list(_hypothesis(module, name).explanations(unmatched))
            found += [_with_given(one.problem, failure) for one in explained]
            unmatched = unmatched.without({name for one in explained for name in one.names})
    # Causes of many missing leaves, then single ones in the target's order, then what is left over.
    last = len(position)
    found.sort(
        key=lambda one: last if one.kind == "leftover" else -1 if one.leaf is None else position.get(one.leaf, last)
    )
    left = [one for one in matcher.problems if one.kind != "shape" or (one.leaf or "") in unmatched.clashes]
    left = [_with_given(one, failure) for one in left]
    return [*matcher.diagnostics.problems, *left, *dict.fromkeys(found)]
