"""Everything that is wrong between a transformed state dict and a target, said once and in the order that helps.

A plan without problems pays nothing for this. One with missing leaves is matched again with what may explain them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.chains import FoundRules
from orbax_t5x.restoring.diagnose.cures import Matched, cured
from orbax_t5x.restoring.diagnose.proposals import call_text
from orbax_t5x.restoring.diagnose.unplaced import leftover_problems, missing_problems
from orbax_t5x.restoring.fallback import open_fallback
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.targets import Target
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.translate import missing_translation


class PlanChecks:
    """Matches state dicts with one target, and gathers what is wrong.

    Args:
      checkpoints: the sources.
      given: the transforms of the caller.
      transforms: the same with what `"auto"` stands for.
      target: what is to be filled.
      options: of the plan.
      stored: what the checkpoints have, by name.
      source: the same as transforms get it.
      takes_rules: whether a rule more would be applied; not so when the run is resumed.

    Attributes:
      fallback: the caller's, or None where there is none or it cannot be used.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Checkpoint],
        given: Sequence[Callable[..., Any]],
        transforms: Sequence[Callable[..., Any]],
        target: Target,
        options: PlanOptions,
        stored: Mapping[str, Any],
        source: Mapping[str, Any],
        *,
        takes_rules: bool,
    ):
        self._checkpoints = checkpoints
        self._given = given
        self._transforms = transforms
        self._target = target
        self._options = options
        self._source = source
        self._takes_rules = takes_rules
        self._names = {leaf: name for name, view in stored.items() if view is not None for leaf in view.leaves()}
        self._fallback_problems: list[Problem] = []
        self.fallback = open_fallback(options.fallback, self._fallback_problems.append)

    def matcher(self, state: Mapping[str, Any], diagnostics: Diagnostics) -> Matcher:
        """Of a state dict and the target."""
        return Matcher(self._target, state, self._options, self.fallback, diagnostics, self._names)

    def problems(
        self, matcher: Matcher, state: Mapping[str, Any], diagnostics: Diagnostics, *, proposes: bool
    ) -> list[Problem]:
        """Everything that is wrong; what explains missing leaves comes first, and alone says so."""
        leftovers = matcher.leftovers() if self._options.strict else []
        found = [*diagnostics.problems, *self._fallback_problems, *matcher.problems]
        if not found and not matcher.missing and not leftovers:
            return []
        outcome = self._outcome(matcher, state, diagnostics)
        if proposes and matcher.unfilled and self._target.kind == "tree":
            after = self._cured(outcome, diagnostics)
            if after is not None:
                return after
        hint = self._translation(len(matcher.missing), state) if matcher.missing and self._takes_rules else []
        return [*hint, *outcome.problems()]

    def _cured(self, outcome: Matched, diagnostics: Diagnostics) -> list[Problem] | None:
        """What is wrong, from one explanation on; None where there is none."""
        is_translate = len(self._transforms) == 1 and any(one.kind == "translate" for one in diagnostics.problems)
        if is_translate and not outcome.state:  # it knew no name at all
            notes = Diagnostics(problems=list(self._target.problems))
            matcher = self.matcher(self._source, notes)
            matcher.entries()
            untouched = self._outcome(matcher, self._source, notes)
            attempt = self._attempting(self._source, notes)
            return cured(
                untouched, self._target, attempt, lambda calls: Fix(f"pass transforms=[{calls}] for Translate()")
            )
        return cured(outcome, self._target, self._attempting(outcome.state, diagnostics), self._fix)

    def _fix(self, calls: str) -> Fix:
        """What to pass to have one transform more than was given."""
        if not self._given:
            return Fix(f"add transforms=[{calls}]")
        if any(isinstance(transform, FoundRules) for transform in self._given):
            found = map(call_text, self._transforms)
            return Fix(f"pass transforms=[{', '.join([*found, calls])}]")
        return Fix(f"pass transforms=[*transforms, {calls}]")

    def _outcome(self, matcher: Matcher, state: Mapping[str, Any], diagnostics: Diagnostics) -> Matched:
        target = self._target.leaves

        def problems() -> list[Problem]:
            return [
                *diagnostics.problems,
                *self._fallback_problems,
                *matcher.problems,
                *missing_problems(matcher.missing, state, target, takes_rules=self._takes_rules),
                *(leftover_problems(matcher.leftovers(), target, matcher.unfilled) if self._options.strict else ()),
            ]

        return Matched(state, matcher.unfilled, problems)

    def _attempting(self, state: Mapping[str, Any], diagnostics: Diagnostics) -> Callable[[Transform], Matched]:
        def attempt(transform: Transform) -> Matched:
            notes = diagnostics.copy()
            after = transform.apply(dict(state), self._target.original, notes)
            matcher = self.matcher(after, notes)
            matcher.entries()
            return self._outcome(matcher, after, notes)

        return attempt

    def _translation(self, missing: int, state: Mapping[str, Any]) -> list[Problem]:
        formats = {checkpoint.format for checkpoint in self._checkpoints.values()}
        fix = missing_translation(formats, self._transforms, state)
        if fix is None:
            return []
        leaves = counted(missing, "target leaf is", "target leaves are")
        message = f"{leaves} missing, and the checkpoint's names are Mesh TensorFlow's"
        return [Problem("missing", None, message, Fix(fix))]
