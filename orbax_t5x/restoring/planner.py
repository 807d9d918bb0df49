"""Makes a plan, or an error with every problem.

Nothing here reads or lists anything: the checkpoints are open, and whether the transforms were applied before is
decided by the caller between `plan_inputs` and `build_plan`. Every stage gathers `Problem`s; only the end raises,
after `diagnose` has explained them. The cost is linear in the number of leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import Leaf
from orbax_t5x.lazy.node import LeafNode
from orbax_t5x.lazy.read_stats import counting_reads
from orbax_t5x.provenance.decision import Decision
from orbax_t5x.provenance.records import Lineage
from orbax_t5x.provenance.steps import RuleStep, steps_of, without_skipped
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import PlanEntry, PlanMigrations, RestorePlan
from orbax_t5x.restoring.sources import (
    FoundRules,
    OneSource,
    OpenSources,
    asks_for_rules,
    names_of_migrations,
    rules_found,
    without_saved_whole_prefix,
    written_out,
)
from orbax_t5x.restoring.targets import Target, flatten_target
from orbax_t5x.text.code import Code
from orbax_t5x.text.wording import size_text
from orbax_t5x.transforms.base import AnyTransform
from orbax_t5x.transforms.diagnostics import Diagnostics, Why
from orbax_t5x.transforms.migrations import Migration
from orbax_t5x.transforms.run import run_on_leaves
from orbax_t5x.trees.flat import parents, prefixed
from orbax_t5x.trees.subtrees import exact_patterns

# Only a plan that fails is explained, and only found rules can cover a part of a model.
_explain_failure = on_demand.function("orbax_t5x.restoring.diagnose.explain", "explain_failure")
_partial_rules = on_demand.function("orbax_t5x.restoring.auto", "partial_rules")
_open_fallback = on_demand.function("orbax_t5x.restoring.fallback", "open_fallback")
# Only of restores that leave leaves unread.
_warnings_of_scales = on_demand.function("orbax_t5x.transforms.dequantize", "warnings_of_scales")


@dataclasses.dataclass(frozen=True, eq=False)
class PlanInputs:
    """Inputs of a plan: sources, target, transforms, decisions.

    Attributes:
      stored: the leaves by their names in the sources.
      source: the leaves by the names that transforms get.
      given: the sources' own transforms and those of the call.
      transforms: the same with the rules that `"auto"` found.
      why: its reasons for leaves of the target.
      takes_rules: whether transforms are applied, and one more would be; not so when a run is resumed.
      proposes: whether transforms that would help are looked for.
      fallback: values for missing leaves, by name.
      before: the problems that were known before the transforms.
    """

    sources: OpenSources
    target: Target
    stored: dict[str, Any]
    source: dict[str, Any]
    given: Sequence[Callable[..., Any]]
    transforms: Sequence[Callable[..., Any]]
    options: RestoreOptions
    diagnostics: Diagnostics
    why: Mapping[str, Why]
    takes_rules: bool = True
    proposes: bool = True
    fallback: Mapping[str, Any] | None = None
    before: tuple[Problem, ...] = ()

    @functools.cached_property
    def stored_names(self) -> dict[Leaf, str]:
        """The name of each stored leaf in its source."""
        found: dict[Leaf, str] = {}
        for name, view in self.stored.items():
            if view is not None:
                leaves = (view.node.leaf,) if type(view.node) is LeafNode else view.leaves()
                found.update(dict.fromkeys(leaves, name))
        return found

    @functools.cached_property
    def steps(self) -> tuple[RuleStep, ...]:
        """The single rules of the transforms, for records."""
        return steps_of(self.transforms, rules_found(self.given, self.transforms))

    def match(self, state: Mapping[str, Any], diagnostics: Diagnostics) -> Matcher:
        """Makes a matcher of a state dict."""
        return Matcher(self.target, self.options, self.fallback, self.stored_names, state, diagnostics)


def plan_inputs(
    sources: OpenSources,
    target: Any,
    transforms: Sequence[Callable[..., Any]],
    options: RestoreOptions,
    *,
    finds_rules: bool = True,
) -> PlanInputs:
    """Prepares the inputs of a plan.

    Without `finds_rules` `"auto"` stays: it stands for the rules that the record marks as found.
    """
    given = (*sources.chain, *transforms)
    flattened = flatten_target(target)
    diagnostics = Diagnostics(allows_unmapped=not options.strict, applied=[])
    stored = source = sources.leaves(diagnostics)
    for name in (*flattened.train_states, *flattened.inference_states):
        source = without_saved_whole_prefix(source, f"{name}/" if name else "")
    diagnostics.problems.extend(flattened.problems)
    if flattened.problems and not flattened.leaves:  # whatever else is wrong follows from that
        raise diagnostics.error(list(flattened.problems), path=sources.path)
    written, why = given, dict[str, Why]()
    patterns = [] if options.fallback is None else list(options.fallback_for or ())
    fillable = {name for pattern in patterns for name in flattened.original if re.fullmatch(pattern, name)}
    diagnostics.new_leaves = fillable
    if finds_rules and any(map(asks_for_rules, given)):
        path, target_leaves = sources.path, flattened.original
        written = written_out(given, source, target_leaves, path, fillable=fillable, settings=diagnostics, why=why)
    if any(not isinstance(one, OneSource | FoundRules) for one in given):
        why = {}  # another transform may give the names to other leaves
    return PlanInputs(sources, flattened, stored, source, given, written, options, diagnostics, why)


def build_plan(
    inputs: PlanInputs,
    decision: Decision,
    *,
    proposes: bool = True,
    warns_of_skipped: bool = False,
    read_provenance: Callable[[], Lineage] | None = None,
) -> RestorePlan:
    """Plans a restore after a `decision` about its transforms.

    The provenance is the decision's, or what `read_provenance` makes of it on first use. With `warns_of_skipped` rules
    that were applied before are a warning of the plan.
    """
    target, options, diagnostics = inputs.target, inputs.options, inputs.diagnostics
    if decision.skipped and decision.note and warns_of_skipped:
        diagnostics.warnings.append(decision.note)
    resuming = decision.is_resuming
    transforms, skipped = without_skipped(inputs.transforms, decision.skipped)
    applied = [] if resuming else [one for index, one in enumerate(transforms) if index not in skipped]
    rest = tuple([one for one in applied if not isinstance(one, OneSource | Migration) or one.steps])
    fallback = compute = None
    if options.fallback is not None:
        fallback, compute = _open_fallback(options.fallback, diagnostics.problems.append)
    inputs = dataclasses.replace(
        inputs,
        transforms=transforms,
        takes_rules=not resuming,
        proposes=proposes and not resuming,
        fallback=fallback,
        before=tuple(diagnostics.problems),
    )
    with counting_reads() as reads:
        state = run_on_leaves(
            transforms, inputs.source, target.original, is_resuming=resuming, diagnostics=diagnostics, skipped=skipped
        )
    if reads.bytes_read:
        diagnostics.warnings.append(
            f"transforms read {size_text(reads.bytes_read)} while the plan was made, in every process: "
            "view.map(fn) and ot.transforms.Affine compute as each shard is read"
        )
    _refuse_lost(inputs, diagnostics)
    matcher = inputs.match(state, diagnostics)
    entries = matcher.entries()
    # The reader's own error, before the problems: the shape of a broken leaf is unknown, and clashes with any target.
    if broken := [leaf for entry in entries for leaf in entry.leaves if leaf.error is not None]:
        broken[0].raise_error()
    if diagnostics.problems or matcher.problems or matcher.missing or (options.strict and matcher.leftovers):
        applied_now = dataclasses.replace(inputs, transforms=rest)
        raise diagnostics.error(_explain_failure(applied_now, matcher), path=inputs.sources.path)
    used = {name for entry in entries if entry.action == "read" for name in entry.sources}
    unused = [name for name in matcher.leftover_sources() if name not in used] if matcher.leftovers else []
    dropped = {name for name, value in inputs.stored.items() if value is not None} - used - set(unused)
    if unused:
        diagnostics.warnings += _warnings_of_scales({name: inputs.stored[name] for name in used}, unused)
    diagnostics.warnings += matcher.warnings_of_fills(entries)
    for pattern in matcher.unused_patterns() if options.fallback_for else ():
        diagnostics.warnings.append(f"fallback_for: {pattern!r} matches no leaf of the target")
    if target.kind == "everything":
        target = _everything(inputs, state, entries, is_changed=bool(transforms) and not resuming)
    plan = RestorePlan(
        entries=tuple(entries),
        target=target,
        checkpoints=inputs.sources.checkpoints,
        latest_steps=inputs.sources.latest_steps,
        unused=tuple(sorted(unused)),
        dropped=tuple(sorted(dropped)),
        warnings=tuple(diagnostics.warnings),
        read_provenance=read_provenance or (lambda: decision.lineage),
        fallback=compute,
        is_fill_expected=options.fallback_for is not None,
        found_rules=Code(() if resuming or not inputs.given else rules_found(inputs.given, transforms)),
        why={} if decision.skipped else inputs.why,
        bytes_read_at_planning=reads.bytes_read,
        is_resuming=resuming,
        lineage=decision.lineage,
        rest=rest,
        migrations=_migrations(inputs.transforms, rest) if inputs.transforms else None,
        processes=options.multiprocessing_options,
    )
    if plan.found_rules and plan.filled and not plan.is_fill_expected:
        if problems := _partial_rules(plan):
            raise diagnostics.error(problems, path=inputs.sources.path)
    return plan


def _refuse_lost(inputs: PlanInputs, diagnostics: Diagnostics) -> None:
    """Records a problem for each slot that the target wants and that cannot follow, unless `fallback_for` names it."""
    targets = inputs.target.leaves
    lost = [name for name in diagnostics.lost if name in targets and name not in diagnostics.new_leaves]
    if not lost:
        return
    words = "if their history may be lost, pass {} with values for them in the fallback"
    alone = Fix("give the rule follow=False, which leaves the moments as they are")
    fix = Fix.any_of(alone, Fix.setting(words, fallback_for=tuple(exact_patterns(lost, list(targets)))))
    for name in lost:
        message = f"the optimizer's leaf cannot follow its parameter: {diagnostics.lost[name]}"
        diagnostics.problem("optimizer", name, message, fix)


def _migrations(given: Sequence[AnyTransform], rest: Sequence[AnyTransform]) -> PlanMigrations | None:
    """Returns the names of the migrations, applied before and now."""
    names, now = names_of_migrations(given), names_of_migrations(rest)
    return PlanMigrations(tuple([name for name in names if name not in now]), now) if names else None


def _everything(
    inputs: PlanInputs, state: Mapping[str, Any], entries: Sequence[PlanEntry], *, is_changed: bool
) -> Target:
    """Makes the target of a restore without a target."""
    empties: dict[str, Any] = {name: None for name, value in state.items() if value is None}
    for prefix, checkpoint in inputs.sources.checkpoints.items():
        found = {prefixed(prefix, name): empty for name, empty in checkpoint.empties.items()}
        if is_changed:
            before, after = _containers(prefixed(prefix, name) for name in checkpoint.leaves), _containers(state)
            remaining = {name: empty for name, empty in found.items() if empty is not None and name not in state}
            found = {name: empty for name, empty in remaining.items() if _is_beside(name, before, after)}
        empties |= found
    leaves = {entry.name: entry.leaf for entry in entries if entry.leaf is not None}

    def rebuild(values: Mapping[str, Any]) -> Any:
        return inputs.target.rebuild({**values, **empties})

    return dataclasses.replace(inputs.target, leaves=leaves, rebuild=rebuild)


def _is_beside(name: str, before: Collection[str], after: Collection[str]) -> bool:
    """Tests if an empty container's neighbours stay, and nothing is in it."""
    beside = next((parent for parent in reversed(parents(name)) if parent in before), "")
    return beside in after and name not in after


def _containers(names: Iterable[str]) -> set[str]:
    return {"", *(parent for name in names for parent in parents(name))}
