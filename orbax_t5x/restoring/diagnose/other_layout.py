"""Hypotheses on rules: missing, other or needless, or of a source."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x import on_demand, transforms
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.optim.containers import is_in_optimizer
from orbax_t5x.restoring.diagnose.hypothesis import Remedy, UnmatchedLeaves
from orbax_t5x.restoring.sources import OneSource
from orbax_t5x.text.code import calls_code
from orbax_t5x.transforms import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import pattern_text
from orbax_t5x.transforms.run import run_on_leaves

_MESH_TF = "the checkpoint's names are Mesh TensorFlow's"
# Leaves of a model that is aligned; fewer are explained one by one.
_LEAST_ALIGNED = 8
_LET_AUTO_FIND = 'if the two are one model, pass transforms="auto" (on the command line: --rules auto)'
_VALUE = "/value"
_PATTERN_FIELDS = frozenset({"pattern", "patterns", "rules"})
_find_layout = on_demand.function("orbax_t5x.rules.layouts", "find_layout")
_find_rules = on_demand.function("orbax_t5x.rules.finding", "find_rules")
_find_pack = on_demand.function("orbax_t5x.rules.inference", "find_pack")
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")
_pack_to_t5x = on_demand.function("orbax_t5x.rules.graph", "pack_to_t5x")


def needless_rules(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes no transforms, if they take away the target's names."""
    if unmatched.transforms and any(name in unmatched.source for name in unmatched.unfilled):
        yield Remedy(
            (), "the target has the names of the checkpoint as they are without the transforms", is_instead=True
        )


def unfollowed_rules(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes that the optimizer follows rules that renamed its parameters."""
    if not any(map(is_in_optimizer, unmatched.unfilled)):
        return
    chain = list(unmatched.transforms)
    followed = [transforms.FollowOptimizer(rule) if _may_follow(rule) else rule for rule in chain]
    if followed != chain:
        reason = "the rules of the call name parameters, and the optimizer's leaves do not follow them"
        yield Remedy(tuple(followed), reason, is_instead=True)


def _may_follow(rule: Any) -> bool:
    return not isinstance(rule, transforms.FollowOptimizer | OneSource | transforms.Drop | transforms.Keep)


def patterns_of_variables(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes patterns that end in `/value`, as the names of a saved NNX state do."""
    names = [name for name in unmatched.source if name.endswith(_VALUE)]
    changed = [_with_value(rule, names) for rule in unmatched.transforms] if names else []
    if changed and changed != list(unmatched.transforms):
        yield Remedy(tuple(changed), f"the checkpoint's names end in '{_VALUE}', as NNX saves them", is_instead=True)


def _with_value(rule: Any, names: list[str]) -> Any:
    """Returns a transform whose patterns match names with `/value`, where they match none without."""

    def extended(pattern: Any) -> Any:
        text = pattern_text(pattern)
        matches = any(re.fullmatch(text + _VALUE, name) for name in names)
        is_needed = matches and not any(re.fullmatch(text, name) for name in names)
        return f"{text}(?:{_VALUE})?" if is_needed else pattern

    if isinstance(rule, transforms.FollowOptimizer):
        return dataclasses.replace(rule, transform=_with_value(rule.transform, names))
    fields = {field.name for field in dataclasses.fields(rule)} if isinstance(rule, Transform) else set()
    if isinstance(rule, transforms.AssignmentMap) or fields.isdisjoint(_PATTERN_FIELDS):
        return rule
    (field,) = fields & _PATTERN_FIELDS
    value = getattr(rule, field)
    if field == "rules":
        changed = tuple([(extended(pattern), replacement) for pattern, replacement in value])
    else:
        changed = extended(value) if field == "pattern" else tuple(map(extended, value))
    return rule if changed == value else dataclasses.replace(rule, **{field: changed})


def other_pack(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes a pack that `orbax_t5x.rules.infer` finds.

    It is `Translate` for a target too small a part of a model for that.
    """
    remedy = pack_remedy(unmatched.stored, unmatched.target.original)
    if remedy is not None:
        yield remedy
    elif _is_untranslated(unmatched):
        yield Remedy((transforms.Translate(),), _MESH_TF)
    # The rules of the call may be written for the names that a pack makes.
    if unmatched.transforms and all(map(_is_rule, unmatched.transforms)):
        first = pack_remedy(unmatched.source, unmatched.target.original)
        if first is not None:
            yield first._replace(is_first=True)


def _is_rule(transform: Any) -> bool:
    return isinstance(transform, Transform) and not isinstance(transform, OneSource)


def pack_remedy(stored: Mapping[str, Any], target: Mapping[str, Any]) -> Remedy | None:
    """Finds the pack from stored leaves to a target, or None."""
    pack = _find_pack(stored, target)
    if pack is None:
        return _aligned_pack(stored, target)
    if not pack.steps:
        return None
    reason = f"a rule pack leads {pack.found.removesuffix(f': {pack.name}')}"
    if all(map(_is_prefix_rule, pack.parts)):
        reason = "the checkpoint has them below another prefix"
    return Remedy(_with_translate(pack.parts), reason)


def _is_prefix_rule(part: Transform) -> bool:
    moved = part.transform if isinstance(part, transforms.FollowOptimizer) else part
    return isinstance(moved, (transforms.Rename, transforms.Drop))


def _with_translate(parts: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Returns the parts with `Translate` in the pack's place."""
    return tuple([transforms.Translate() if _is_translation(part) else part for part in parts])


def _is_translation(part: Transform) -> bool:
    return part == _pack_function("mesh_tf_to_t5x")()


def _aligned_pack(stored: Mapping[str, Any], target: Mapping[str, Any]) -> Remedy | None:
    """Returns a pack and an alignment of its result."""
    kind = _find_layout(stored).kind
    if len(target) < _LEAST_ALIGNED or _pack_to_t5x(kind) is None:
        return None
    try:
        found = _find_rules(stored, target)
    except RestorePlanError:
        return None
    others = [part for part in found.parts if not _is_translation(part) and not isinstance(part, transforms.Drop)]
    if kind == "mesh tf" and not (found.is_whole and others and any(map(_is_translation, found.parts))):
        return None  # `Translate` by itself leads from those names to a part of a model, too
    return Remedy(
        _with_translate(found.parts), "a rule pack leads to a model that has other words for some parts of the names"
    )


def _is_untranslated(unmatched: UnmatchedLeaves) -> bool:
    has_translate = any(isinstance(transform, transforms.Translate) for transform in unmatched.transforms)
    return not has_translate and _find_layout(unmatched.stored).kind == "mesh tf"


def aligned_model(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes the rules of `"auto"` for the whole model, as advice.

    Names alone do not show that they are right.
    """
    if unmatched.transforms or len(unmatched.missing) < _LEAST_ALIGNED:
        return
    try:
        found = _find_rules(unmatched.arrays, unmatched.target.original)
    except RestorePlanError:
        return
    if found.is_whole:
        reason = "the names differ, and shapes, structure and words give each one reading"
        yield Remedy(found.parts, reason, _LET_AUTO_FIND)


def several_sources(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes `Average` or `Overlay` of several sources."""
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
    overlay = transforms.Overlay(tuple(sorted(filled, key=lambda source: len(filled[source]))))
    own_rules = [rule for source in filled for rule in rules.get(source, ())]
    reason = f"the sources {names} have leaves for them, each below its own name"
    if len({name for found_names in filled.values() for name in found_names}) == sum(map(len, filled.values())):
        yield Remedy((*own_rules, overlay), reason, _advice(own_rules, overlay) if own_rules else None)
        return
    # Where two sources have the same leaf, its name does not show which value is wanted.
    average = transforms.Average(tuple([(source, 1.0) for source in sorted(filled)]))
    is_same = len(set(map(frozenset, filled.values()))) == 1
    ways = (average, overlay) if is_same else (overlay,)
    yield Remedy((*own_rules, ways[0]), reason, _advice(own_rules, *ways))


def _advice(own_rules: list[OneSource], *ways: Transform) -> str:
    """Returns the fix in words: sources' transforms and combinations."""
    meanings = {"Average": "for their mean", "Overlay": "to take each leaf from the first that has it"}
    combine = ", or ".join(f"[{calls_code((way,))}] {meanings[type(way).__name__]}" for way in ways)
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


def bare_source(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes a pack for a source, below the source's name."""
    for source, leaves in unmatched.bare_sources.items():
        found = pack_remedy(leaves, OneSource(source, ()).target_below(unmatched.target.original))
        if found is not None:
            advice = (
                f"give the source its transforms: {{{source!r}: ot.Source(path, [{calls_code(found.transforms)}])}}"
            )
            yield Remedy(found.transforms, f"of the source {source!r}, {found.reason}", advice, source)
