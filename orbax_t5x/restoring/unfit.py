"""Errors about a step of a run that does not fit the target, and about what a run begins with.

Of a step the first problem says which of the rules given were applied and which were not. Its fix is found by planning
again: with the rules that the difference between step and target shows, with those that were not applied, or with new
leaves that the fallback gives. What such a plan does not confirm is not proposed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.provenance.decision import Decision
from orbax_t5x.provenance.records import text_of
from orbax_t5x.provenance.steps import RuleStep, without_skipped
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.planner import PlanInputs, build_plan, plan_inputs
from orbax_t5x.restoring.show.filled import patterns_for_filled
from orbax_t5x.restoring.sources import AUTO, FoundRules, Transforms, asks_for_rules
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.base import AnyTransform
from orbax_t5x.transforms.migrations import Migration, Migrations
from orbax_t5x.trees.flat import unflatten
from orbax_t5x.trees.narrow import is_sequence

_SHOWN = 6
_ANY_NAME = ("(?s:.*)",)
_CHANGE_TARGET = Fix.by_target("give the target what the step has")


def explain_unfit_source(
    error: RestorePlanError, inputs: PlanInputs, target: Any, chain: Sequence[AnyTransform], given: Transforms
) -> RestorePlanError:
    """Returns the error of a new run; with `"auto"` before the rules given, if they lead to the target then.

    Args:
      error: of the plan.
      inputs: of the plan.
      target: of the call.
      chain: the call's transforms one by one.
      given: the same as the call has them.
    """
    if not chain or any(map(asks_for_rules, inputs.given)):
        return error
    if _confirmed_plan(inputs, target, (FoundRules(), *chain), inputs.options) is None:
        return error
    rules = given if is_sequence(given) else (given,)
    fix = Fix.setting("pass {}", transforms=(FoundRules(), *rules))
    first = Problem("rule", None, f"the rules given lead to the target after those that {AUTO!r} finds", fix)
    others = [dataclasses.replace(problem, fix=None) for problem in error.problems]
    return RestorePlanError([first, *others], path=error.path)


def explain_own_step(
    error: RestorePlanError, target: Any, given: Transforms, inputs: PlanInputs, decision: Decision
) -> RestorePlanError:
    """Returns the error of a handler's restore of a step of its run; another one where `"auto"` is no answer.

    There `"auto"` stands for the rules with which the run began.
    """
    ways = [way for problem in error.problems if problem.fix for way in problem.fix.ways]
    if not any(map(asks_for_rules, inputs.transforms)) and not any(
        way.arguments.get("transforms") == AUTO for way in ways
    ):
        return error
    has_values = inputs.options.fallback is not None
    step = UnfitStep("the run's step", target, given, inputs, decision, is_foreign=False, has_values=has_values)
    return step.explain(error)


def _confirmed_plan(
    inputs: PlanInputs, target: Any, transforms: Sequence[AnyTransform], options: RestoreOptions
) -> RestorePlan | None:
    """Plans the restore again with other transforms; None where that fails, too."""
    with contextlib.suppress(RestorePlanError):
        changed = plan_inputs(inputs.sources, target, transforms, options)
        return build_plan(changed, Decision(), proposes=False)
    return None


def _as_migration(rules: Sequence[AnyTransform]) -> Migrations:
    return Migrations([("migration-1", tuple(rules))])


@dataclasses.dataclass(frozen=True, eq=False)
class UnfitStep:
    """A step of the run that does not fit the target.

    Attributes:
      name: what the error calls it.
      target: of the call.
      given: the transforms as the call has them.
      inputs: of the plan that failed.
      decision: which of the transforms it applied.
      is_foreign: whether another writer saved the step.
      has_values: whether the call has a fallback.
      keyword: name of the fallback in the call.
      items: names of the step's items, where all of several were to be restored.
    """

    name: str
    target: Any
    given: Transforms
    inputs: PlanInputs
    decision: Decision
    is_foreign: bool
    has_values: bool
    keyword: str = "fallback"
    items: Sequence[str] = ()

    def explain(self, error: RestorePlanError) -> RestorePlanError:
        """Returns the error of the plan with the rules first, and with fixes for a step of the run."""
        what = f"{self.name} does not fit the target: {self._describe_rules()}"
        first = self._confirmed_fix()
        if first is None:
            fixes, kept = [self._item_fix()] if self.items else [], [*map(self._with_own_fix, error.problems)]
            if not any(problem.fix for problem in kept):
                fixes.append(_CHANGE_TARGET)
            problem = Problem("rule", None, what, Fix.any_of(*fixes) if fixes else None)
            return RestorePlanError([problem, *kept], path=error.path)
        difference, fix = first
        others = [dataclasses.replace(problem, fix=None) for problem in error.problems]
        return RestorePlanError([Problem("rule", None, f"{what}; {difference}", fix), *others], path=error.path)

    # -- which rules were applied

    def _describe_rules(self) -> str:
        steps = self.inputs.steps
        if not steps:
            return "no rules were given for it"
        skipped = [step for position, step in enumerate(steps) if position in self.decision.skipped]
        applied = [step for position, step in enumerate(steps) if position not in self.decision.skipped]
        if self.is_foreign:
            why = "rules were not applied, because another writer saved it"
            parts = [f"{why}: {self._listed(skipped)}"] if skipped else []
        else:
            parts = [f"applied before: {self._listed(skipped)}"] if skipped else []
        if applied:
            parts.append(f"applied now: {self._listed(applied)}")
        elif not self.is_foreign:
            parts.append("none of the rules given was applied now")
        return "; ".join(parts)

    def _listed(self, steps: Sequence[RuleStep]) -> str:
        return listed(map(self._text_of, steps), _SHOWN, separator="; ")

    def _text_of(self, step: RuleStep) -> str:
        if not step.is_placeholder:
            return text_of(step.entry)
        found = [entry["text"] for entry in self.decision.lineage if "auto" in entry]
        rules = listed(found, _SHOWN, separator="; ") if found and not self.is_foreign else "no rules"
        return f"{text_of(step.entry)} (which found {rules} when the run began)"

    def _applied(self) -> list[AnyTransform]:
        """Returns the transforms that the failed plan applied."""
        chain, skipped = without_skipped(self.inputs.transforms, self.decision.skipped)
        return [transform for position, transform in enumerate(chain) if position not in skipped]

    # -- fixes that a plan confirms

    def _confirmed_fix(self) -> tuple[str, Fix] | None:
        """Returns the difference between step and target, and a fix with which a plan succeeds; or None."""
        applied = self._applied()
        plan = self._plan((*applied, FoundRules()))
        # Rules that leave something of a run behind are for a person to write.
        if plan is not None and not plan.dropped:
            return "these rules lead from it to the target", self._adding(plan.found_rules)
        every = [rule for rule in self.inputs.transforms if not isinstance(rule, FoundRules)]
        if self.is_foreign and not any(isinstance(rule, Migration) for rule in every) and self._plan(every):
            fix = Fix.setting("pass {}", transforms=_as_migration(every))
            return "a migration is applied to such a step, too, and once", fix
        fallback = self.inputs.options.fallback
        values = self._zeros() if fallback is None else fallback
        plan = self._plan(applied, fallback=values, fallback_for=_ANY_NAME)
        if plan is None or plan.dropped or not any(entry.action == "read" for entry in plan.entries):
            return None
        patterns = patterns_for_filled(plan)
        named = tuple(self.inputs.options.fallback_for or ())
        value = ... if patterns is None else (*named, *patterns)
        gives = "" if self.has_values else f" and {self.keyword}=, which gives them"
        fills = Fix.setting(f"if they are new, pass {{}}{gives}", fallback_for=value)
        makes = Fix.in_program("if other leaves make them, pass transforms=ot.Migrations([(name, [transforms])])")
        count = counted(len(plan.filled), "leaf", "leaves")
        return f"{count} of the target are new to it: {listed(plan.filled, _SHOWN)}", Fix.any_of(fills, makes)

    def _zeros(self) -> dict[str, Any]:
        """Returns a state dict of zeros for a plan that is not executed."""
        leaves = self.inputs.target.leaves.items()
        shapes = {name: leaf for name, leaf in leaves if leaf.kind in ("jax", "numpy") and leaf.dtype is not None}
        zeros = {name: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for name, leaf in shapes.items()}
        return unflatten(zeros, join_clashes=True)

    def _plan(self, transforms: Sequence[AnyTransform], **options: Any) -> RestorePlan | None:
        """Plans a restore of the step with transforms; None where that fails, too."""
        changed = dataclasses.replace(self.inputs.options, **options)
        return _confirmed_plan(self.inputs, self.target, transforms, changed)

    # -- fixes in the keywords of the call

    def _adding(self, rules: Sequence[AnyTransform], way: Fix | None = None) -> Fix:
        """Returns the fix that adds rules at the end of those of the call."""
        settings: Mapping[str, Any] = {} if way is None else way.arguments
        listed_rules = self._given_list()
        migrations = listed_rules[-1] if listed_rules else None
        if isinstance(migrations, Migrations):
            steps = [(step.migration_name, step.steps) for step in migrations.steps]
            if any(step.is_assumed for step in migrations.steps):
                return Fix.in_program(f"add a migration at the end: (name, [{calls_code(rules)}])")
            grown = Migrations([*steps, (f"migration-{len(steps) + 1}", tuple(rules))])
            return Fix.setting("pass {}", transforms=(*listed_rules[:-1], grown), **settings)
        if self.is_foreign:
            return Fix.setting("pass {}", transforms=(*listed_rules, _as_migration(rules)), **settings)
        if not is_sequence(self.given):
            return Fix.setting("pass {}", transforms=(*listed_rules, *rules), **settings)
        fix = Fix.adding(*rules, to_others=bool(listed_rules))
        return fix.also_setting(way.words, **settings) if way is not None and settings else fix

    def _given_list(self) -> tuple[Any, ...]:
        """Returns the transforms of the call as a list."""
        if isinstance(self.given, str):
            return (FoundRules(),)
        return tuple(self.given) if is_sequence(self.given) else (self.given,)

    def _item_fix(self) -> Fix:
        return Fix.setting(f"name the item that is the state: {{}} one of {', '.join(map(repr, self.items))}", item=...)

    def _with_own_fix(self, problem: Problem) -> Problem:
        """Returns a problem with those of its fixes that help a step of the run."""
        if problem.fix is None:
            return problem
        ways = [*self._own_ways(problem, problem.fix)]
        return dataclasses.replace(problem, fix=Fix.any_of(*ways) if ways else None)

    def _own_ways(self, problem: Problem, fix: Fix) -> Iterator[Fix]:
        for way in fix.ways:
            if way.transforms:
                yield self._adding(way.transforms, way)
            elif "fallback_for" in way.arguments:
                patterns = way.arguments["fallback_for"]
                yield Fix.setting(f"if it is new, pass {{}} ({self.keyword}= gives it)", fallback_for=patterns)
            elif "transforms" not in way.arguments and way.removed is None:
                yield way.with_keywords({"fallback": self.keyword})
