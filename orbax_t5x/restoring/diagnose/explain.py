"""Explanations of a failed plan: the entry of this package.

Names of Hugging Face without the pack, a scanned target, `params/` against `target/`: each makes dozens of missing
leaves, and each is one mistake. The hypotheses are asked in order for transforms, which are tried by matching again,
and then for what explains the leaves that are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Remedy, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.joined_fixes import with_joined_fixes
from orbax_t5x.restoring.diagnose.naming import other_item, other_prefix, renamed_parts
from orbax_t5x.restoring.diagnose.other_depth import other_depth
from orbax_t5x.restoring.diagnose.other_layout import aligned_model, needless_rules, other_pack, unfollowed_rules
from orbax_t5x.restoring.diagnose.other_optimizer import other_optimizer
from orbax_t5x.restoring.diagnose.other_shapes import other_shapes
from orbax_t5x.restoring.diagnose.unexplained import no_value, tied_logits, unexplained, unread_scales
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.restoring.planner import PlanInputs
from orbax_t5x.restoring.sources import AUTO, FoundRules
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms import AssignmentMap
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_on_leaves

REMEDIES = (needless_rules, unfollowed_rules, other_pack, other_item, other_prefix, renamed_parts, aligned_model)
# Causes of many missing leaves, then of single leaves, then of leaves that are left over.
EXPLANATIONS = (no_value, other_optimizer, other_depth, other_shapes, unread_scales, tied_logits, unexplained)

_NOTHING_MORE = Fix("")
# Arguments with which a restore may end although a rule that is proposed before them is missing.
_UNSAFE = frozenset({"strict", "fallback", "fallback_for"})


class _TriedRemedy(NamedTuple):
    """A remedy with the problems that it leaves, equal remedies, and the leaves after it."""

    remedy: Remedy
    left: list[Problem]
    others: list[Remedy]
    after: Matcher

    @property
    def rank(self) -> tuple[bool, int]:
        """Code goes before advice, then what leaves fewer problems."""
        return self.remedy.advice is not None, len(self.left)


def explain_failure(inputs: PlanInputs, matcher: Matcher) -> list[Problem]:
    """Returns all problems, the main cause first, after a whole match."""
    mends_rule = any(problem.fix and problem.fix.rule for problem in matcher.diagnostics.problems)
    if inputs.proposes and matcher.unfilled and matcher.target.kind == "tree" and not mends_rule:
        problems = _remedied(inputs, matcher)
        if problems is not None:
            return problems
    return _problems(matcher, inputs)


def _remedied(inputs: PlanInputs, matcher: Matcher) -> list[Problem] | None:
    """Returns the problems with the best remedy, or None."""
    best = _best_remedy(matcher, inputs)
    if best is None:
        return None
    remedy, left, others, after = best
    # Of a model of another size names show how to map it, and the problems that are left which sizes differ.
    is_by_name = 2 * len(after.unfilled) >= len(matcher.unfilled) and bool(_unnamed(matcher))
    count = len(_unnamed(matcher)) if is_by_name else len(matcher.unfilled)
    found_by = "name" if is_by_name else "name and shape"
    leaves = counted(count, "target leaf has", "target leaves have")
    message = f"{leaves} no match by {found_by} in the checkpoint: {remedy.reason}"
    if matcher.restores_nothing:
        message = f"no leaf of the checkpoint has a place in the target, and {message}"
    causes = [problem for problem in left if problem in matcher.diagnostics.problems]
    left = [problem for problem in left if problem not in causes]
    if left:
        message += f"; with the fix, {counted(len(left), 'problem is', 'problems are')} left, listed below"
    if remedy.advice is not None or _unmatched(matcher, inputs).may_fill_unasked:
        left = list(map(_in_words, left))  # right only after the fix, and a restore may end without it
    kind = "nothing_restored" if matcher.restores_nothing else "missing"
    ways = [_fix_of_remedy(way, inputs) for way in (remedy, *others)]
    fix = ways[0]
    if others and remedy.advice is None:
        # One text is enough for Python; another interface may have words for the others only.
        fix = dataclasses.replace(fix, alternatives=tuple(ways))
    return [*causes, Problem(kind, None, message, fix), *left]


def _in_words(problem: Problem) -> Problem:
    """Returns a problem with a fix that no program follows."""
    if problem.fix is None:
        return problem
    ways = [way if _UNSAFE.isdisjoint(way.arguments) else way.in_words() for way in problem.fix.ways]
    return dataclasses.replace(problem, fix=Fix.any_of(*ways))


def _best_remedy(matcher: Matcher, inputs: PlanInputs) -> _TriedRemedy | None:
    """Returns the remedy that leaves the fewest problems, of those that fill a leaf and lose none."""
    unmatched = _unmatched(matcher, inputs)
    best: _TriedRemedy | None = None
    for remedy in (remedy for hypothesis in REMEDIES for remedy in hypothesis(unmatched)):
        if best is not None and best.rank == (False, 0) and remedy.reason != best.remedy.reason:
            break
        after = _match_with(remedy, matcher, inputs)
        problems = _problems_after(remedy, after, matcher, inputs) if _is_better(after, matcher) else None
        if problems is None:
            continue
        tried = _TriedRemedy(remedy, problems, [], after)
        if best is None or tried.rank < best.rank:
            best = tried
        elif problems == best.left and remedy.reason == best.remedy.reason:
            best.others.append(remedy)
    return best


def _is_better(after: Matcher, before: Matcher) -> bool:
    return (
        set(after.unfilled) <= set(before.unfilled)
        and _unnamed(after) <= _unnamed(before)
        and (len(after.unfilled) < len(before.unfilled) or len(_unnamed(after)) < len(_unnamed(before)))
    )


def _unnamed(matcher: Matcher) -> set[str]:
    """Returns the target's names that the state dict lacks."""
    return {name for name in matcher.unfilled if name not in matcher.state}


def _match_with(remedy: Remedy, matcher: Matcher, inputs: PlanInputs) -> Matcher:
    notes, state, transforms = matcher.diagnostics.copy(), matcher.state, remedy.transforms
    if remedy.is_first or remedy.is_instead:
        notes, state = Diagnostics(problems=list(inputs.before)), inputs.source
        transforms = (*remedy.transforms, *(() if remedy.is_instead else inputs.transforms))
    state = run_on_leaves(transforms, state, matcher.target.original, is_resuming=False, diagnostics=notes)
    after = inputs.match(state, notes)
    after.entries()
    return after


def _problems_after(remedy: Remedy, after: Matcher, before: Matcher, inputs: PlanInputs) -> list[Problem] | None:
    """Returns the problems left, or None after rules of names that ask for more than there is."""
    is_of_names = any(isinstance(rule, AssignmentMap) for rule in remedy.transforms) or remedy.advice is not None
    if is_of_names and len(after.diagnostics.problems) > len(before.diagnostics.problems):
        return None
    # Advice corrects no unwritten rules.
    return _problems(after, inputs if remedy.advice is None else dataclasses.replace(inputs, takes_rules=False))


def _fix_of_remedy(remedy: Remedy, inputs: PlanInputs) -> Fix:
    if remedy.advice is not None:
        return Fix.setting(remedy.advice, transforms=AUTO) if "{}" in remedy.advice else Fix(remedy.advice)
    if remedy.item:
        return Fix.setting("pass {}", item=remedy.item)
    if remedy.is_instead:
        return _instead(remedy.transforms, inputs)
    if remedy.is_first:
        return _instead((*remedy.transforms, *inputs.transforms), inputs)
    return _adding(remedy.transforms, inputs)


def _instead(transforms: Sequence[Any], inputs: PlanInputs) -> Fix:
    """Returns the fix that replaces the transforms of the call; a source's own would be applied twice."""
    if not inputs.sources.chain:
        return Fix.setting("pass {}", transforms=tuple(transforms))
    return Fix.in_program(f"pass the source without transforms, and transforms=[{calls_code(transforms)}]")


def _adding(transforms: Sequence[Any], inputs: PlanInputs, way: Fix = _NOTHING_MORE) -> Fix:
    """Returns the fix that adds a remedy to the call.

    To what `"auto"` found the transforms are written out.
    """
    given = inputs.given[len(inputs.sources.chain) :]
    if any(isinstance(transform, FoundRules) for transform in given):
        fix = _instead((*inputs.transforms, *transforms), inputs)
        return fix.also_setting("pass {}", **fix.arguments, **way.arguments) if fix.arguments else fix
    fix = Fix.adding(*transforms, to_others=bool(given))
    return fix.also_setting(way.words, **way.arguments) if way.arguments else fix


def _with_given(problem: Problem, inputs: PlanInputs) -> Problem:
    """Returns a problem with a fix that adds its transforms."""
    if problem.fix is None or not inputs.given:
        return problem
    ways = [_adding(way.transforms, inputs, way) if way.transforms else way for way in problem.fix.ways]
    return dataclasses.replace(problem, fix=Fix.any_of(*ways))


def _unmatched(matcher: Matcher, inputs: PlanInputs) -> UnmatchedLeaves:
    return UnmatchedLeaves(
        stored={name: value for name, value in matcher.state.items() if value is not None},
        target=matcher.target,
        unfilled=matcher.unfilled,
        missing=tuple(matcher.missing),
        leftovers=tuple([name for name in matcher.leftovers if name not in matcher.diagnostics.explained])
        if inputs.options.strict
        else (),
        transforms=inputs.transforms,
        takes_rules=inputs.takes_rules,
        source=inputs.source,
        clashes={
            problem.leaf: problem
            for problem in matcher.problems
            if problem.kind == "shape" and problem.leaf is not None
        },
        items=_items(inputs),
        options=inputs.options,
    )


def _items(inputs: PlanInputs) -> tuple[str, ...]:
    """Returns the names of the items of a single checkpoint."""
    checkpoint = inputs.sources.checkpoints.get("")
    return () if checkpoint is None else tuple(checkpoint.metadata.get("item_names", ()))


def _problems(matcher: Matcher, inputs: PlanInputs) -> list[Problem]:
    """Returns the problems of transforms, leaves and hypotheses."""
    unmatched = _unmatched(matcher, inputs)
    position = {leaf.name: at for at, leaf in enumerate(unmatched.missing)}
    explained: list[Problem] = []
    for hypothesis in EXPLANATIONS:
        explanations = list(hypothesis(unmatched))
        explained += [explanation.problem for explanation in explanations]
        unmatched = unmatched.without({name for explanation in explanations for name in explanation.names})
    # Causes of many missing leaves, then single ones in the target's order, then what is left over.
    last = len(position)

    def place(problem: Problem) -> int:
        if problem.kind == "leftover":
            return last
        return -1 if problem.leaf is None else position.get(problem.leaf, last)

    single = [problem for problem in matcher.problems if problem.kind != "shape" or problem.leaf in unmatched.clashes]
    problems = [*single, *dict.fromkeys(sorted(explained, key=place))]
    names = {*matcher.target.leaves, *matcher.state}
    return [*matcher.diagnostics.problems, *(_with_given(one, inputs) for one in with_joined_fixes(problems, names))]
