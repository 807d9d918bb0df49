"""The way back: transforms that undo transforms, in the opposite order.

Rules of names are turned around by their text. With the source's leaves each way back is tried on their names and
shapes; if the text alone would lead elsewhere, rules for single names are written instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.lazy import Box, View, as_view
from orbax_t5x.optim.moments import find_optimizer
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.arrays import Affine, Reshape, Transpose
from orbax_t5x.transforms.assignment_map import AssignmentMap
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.by_rules import ByRules
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.trace import Symbol
from orbax_t5x.transforms.follow_optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import (
    IN_BLOCK,
    LAYER_NUMBER,
    Concat,
    Split,
    StackLayers,
    UnstackLayers,
    layer_group,
    written_layer_group,
)
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.patterns.inverted import (
    escaped,
    inverted_rule,
    literal,
    parse_rule,
    written_pattern,
    written_template,
)
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_text, rule_table
from orbax_t5x.transforms.repeat_layers import RepeatLayers
from orbax_t5x.transforms.run import Chain
from orbax_t5x.trees.flat import FlatState, flatten

Shapes = Mapping[str, Any]
_SHOWN_NAMES = 3
# The number of a group that the pattern does not have.
_LAYER = 0


def inverse(transforms: Any, source: Any = None) -> tuple[Any, ...]:
    r"""Returns the transforms that undo some transforms.

    Args:
      transforms: one, or several in order.
      source: the leaves that the transforms are for, by name or nested: `checkpoint.leaves`, a state dict, or anything
        with shapes. None: the way back is made from the rules only.

    Returns:
      Transforms to apply to the result, in order.

    Raises:
      ValueError: a transform has no way back, or needs `source`; the text has the reason.

    Example:
      >>> rules = [ot.transforms.Rename([("a/(.*)", r"b/\1")]), ot.transforms.Transpose("b/kernel")]
      >>> [step.describe() for step in ot.transforms.inverse(rules)]
      ["Transpose('b/kernel')", "Rename((('b/(.*)', 'a/\\\\1'),))"]
    """
    steps = tuple(transforms) if isinstance(transforms, Sequence) else (transforms,)
    if source is None:
        return tuple([back for step in reversed(steps) for back in _inverse_of(step, None)])
    return tuple(_checked_inverses(steps, _abstract(_without_followers(steps, flatten(source))))[0])


def _without_followers(steps: Sequence[Any], leaves: Shapes) -> Shapes:
    """Leaves out moments, which follow there and back, unless a rule names them itself."""
    slots = find_optimizer(leaves).parameters_of_slots()
    named = {name for rules in _rules_of_names(steps) for name in rules.matching(slots)}
    return {name: leaf for name, leaf in leaves.items() if name in named or name not in slots}


def _rules_of_names(steps: Iterable[Any]) -> Iterator[ByRules]:
    for step in steps:
        if type(step) is Chain:
            yield from _rules_of_names(step.steps)
        elif isinstance(step, FollowOptimizer):
            yield from _rules_of_names((step.transform,))
        elif isinstance(step, ByRules) and step.takes_names:
            yield step


def _checked_inverses(steps: Iterable[Any], leaves: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the inverses of steps, and the leaves after them."""
    back: list[Any] = []
    for step in steps:
        found, leaves = _checked_inverse(step, leaves)
        back[:0] = found
    return back, leaves


def _checked_inverse(step: Any, leaves: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns an inverse that leads back, and the new leaves."""
    if type(step) is Chain:
        found, leaves = _checked_inverses(step.steps, leaves)
        return [Chain(found)], leaves
    forwards = _forwards(step) if isinstance(step, Transform) else step
    try:
        found, reason = _inverse_of(step, leaves), None
    except ValueError as error:
        found, reason = None, error
        if not isinstance(forwards, Rename | StackLayers | UnstackLayers | Split | Concat):
            raise
    after = _applied([forwards], leaves, {})
    if found is None or _elsewhere(found, after, leaves):
        found = _single_names(forwards, leaves, after)
        if names := _elsewhere(found, after, leaves):
            raise reason or ValueError(
                f"{step.describe()}: its way back leads elsewhere for {listed(names, _SHOWN_NAMES)}"
            )
    return found, _abstract(after)


def _forwards(step: Transform) -> Transform:
    """Replaces assignment maps, which need a target, by renamings."""
    match step:
        case AssignmentMap():
            return Rename(_turned(step.rules, "AssignmentMap"), step.require_all_rules_match)
        case Chain() if type(step) is Chain:
            return Chain([_forwards(one) if isinstance(one, Transform) else one for one in step.steps])
        case FollowOptimizer() if isinstance(step.transform, Transform):
            return dataclasses.replace(step, transform=_forwards(step.transform))
    return step


def _abstract(leaves: Shapes) -> dict[str, Any]:
    """Returns arrays of the same shapes without memory."""
    return {name: _view(leaf) if hasattr(leaf, "shape") else leaf for name, leaf in leaves.items()}


def _view(leaf: Any) -> Any:
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # PRNG keys
        dtype = np.dtype(np.uint32)
    return as_view(Symbol("", tuple(leaf.shape), dtype))


def _elsewhere(steps: Sequence[Any], after: FlatState, before: FlatState) -> list[str]:
    """Lists the leaves that a way back does not lead to."""
    try:
        found = _applied(steps, after, before)
    except ValueError:  # a pattern matches more than what it is for
        return list(before)
    lost = [name for name, leaf in before.items() if name not in found or not _is_same(found[name], leaf)]
    return lost + [name for name in found if name not in before]


def _is_same(view: Any, leaf: Any) -> bool:
    """Tests if corners of a view are those of a leaf.

    Of merged leaves, equal by a check when they are read, one is the leaf.
    """
    if view is leaf or not (isinstance(view, View) and isinstance(leaf, View)):
        return view is leaf
    return view.shape == leaf.shape and all(
        one in found for box in _corners(view.shape) for found in [view.requests(box)] for one in leaf.requests(box)
    )


def _corners(shape: Sequence[int]) -> Iterator[Box]:
    """Yields boxes of one element: the origin, and each axis' end."""
    first = tuple((0, min(size, 1)) for size in shape)
    yield first
    yield from ((*first[:axis], (max(size - 1, 0), size), *first[axis + 1 :]) for axis, size in enumerate(shape))


def _applied(steps: Iterable[Any], state: FlatState, target: FlatState) -> dict[str, Any]:
    """Runs transforms on abstract leaves; problems are a ValueError."""
    result: dict[str, Any] = dict(state)
    for step in steps:
        diagnostics = Diagnostics()
        result = step.apply(result, target, diagnostics)
        if diagnostics.problems:
            raise ValueError(f"{step.describe()}: {diagnostics.problems[0].message}")
    return result


def _inverse_of(step: Any, source: Shapes | None) -> list[Any]:
    """Returns the inverse of a transform, by its class."""
    if isinstance(step, Transform):
        if type(step).inverse is Transform.inverse:
            return _back(step, source)
        return [_with_source(step, source) if source else step.inverse()]
    name = getattr(step, "__name__", type(step).__name__)
    raise ValueError(f"{name} is a function: write its way back by hand")


def _with_source(step: Any, source: Shapes) -> Any:
    """Calls an own `inverse`, with the number of layers."""
    if "depth" not in inspect.signature(step.inverse).parameters or not isinstance(step.how, str):
        return step.inverse()
    regex = compile_pattern(step.pattern, "RepeatLayers")
    matches = [found for name in source if (found := regex.fullmatch(name))]
    if step.axis is not None:
        return step.inverse(source[matches[0].string].shape[step.axis])
    group = layer_group(matches, "RepeatLayers", Diagnostics()) if matches else None
    return step.inverse(1 + max(int(found[group]) for found in matches) if group else None)


@functools.singledispatch
def _back(step: Any, source: Shapes | None) -> list[Any]:
    raise ValueError(f"{step.describe()} has no way back: what it changes cannot be told from the result")


@_back.register
def _(step: Chain, source: Shapes | None) -> list[Any]:
    return [Chain(inverse(step.steps, source))]


@_back.register
def _(step: FollowOptimizer, source: Shapes | None) -> list[Any]:
    back = inverse(step.transform, source)
    return [dataclasses.replace(step, transform=back[0] if len(back) == 1 else Chain(back))]


@_back.register
def _(step: Rename, source: Shapes | None) -> list[Any]:
    return [dataclasses.replace(step, rules=_turned(step.rules, "Rename"))]


@_back.register
def _(step: AssignmentMap, source: Shapes | None) -> list[Any]:
    if any(template is None for _, template in step.rules):
        raise ValueError(f"{step.describe()} leaves target leaves out, which have no way back")
    return [Rename(step.rules, step.require_all_rules_match)]


def _turned(rules: Iterable[tuple[Pattern, str | None]], owner: str) -> tuple[tuple[str, str], ...]:
    found = []
    for pattern, template in rules:
        if template is None:
            raise ValueError(f"{owner}: {pattern_text(pattern)!r} takes leaves out, which do not come back")
        found.append(inverted_rule(pattern, template, owner))
    return tuple(found)


@_back.register
def _(step: Transpose, source: Shapes | None) -> list[Any]:
    if step.axes is None or any(axis < 0 for axis in step.axes):
        rank = None if step.axes is None else len(step.axes)
        axes = None if rank is None else [axis % rank for axis in step.axes or ()]
    else:
        axes = list(step.axes)
    return [step if axes is None else dataclasses.replace(step, axes=tuple(map(int, np.argsort(axes))))]


@_back.register
def _(step: Affine, source: Shapes | None) -> list[Any]:
    if step.scale == 0:
        raise ValueError(f"{step.describe()} has no way back: a scale of 0 leaves nothing of the values")
    return [dataclasses.replace(step, scale=1 / step.scale, offset=-step.offset / step.scale)]


@_back.register
def _(step: Reshape, source: Shapes | None) -> list[Any]:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in _matching((step.pattern,), source, step):
        by_shape.setdefault(tuple(source[name].shape), []).append(name)  # pyright: ignore[reportOptionalSubscript]
    if len(by_shape) == 1:
        return [dataclasses.replace(step, shape=next(iter(by_shape)))]
    return [
        dataclasses.replace(step, pattern="|".join(map(escaped, names)), shape=shape)
        for shape, names in by_shape.items()
    ]


@_back.register
def _(step: StackLayers, source: Shapes | None) -> list[Any]:
    rule = parse_rule(step.pattern, "StackLayers")
    layer = written_layer_group(rule.regex, "StackLayers")
    if layer is None:
        raise ValueError(f"{step.describe()}: name the group of the layer's number `i` for the way back")
    first, *others = IN_BLOCK.split(step.into)
    tokens = [*rule.template(first)]
    for text in others[1::2]:
        tokens += [_LAYER, *rule.template(text)]
    pattern, numbers = written_pattern(tokens, {**rule.groups, _LAYER: r"\d+"})
    into = written_template(["{i}" if token == layer else token for token in rule.tokens], numbers)
    if others:
        into = into.replace("{i}", f"{{i*{others[0]}+\\g<{numbers[_LAYER]}>}}")
    return [UnstackLayers(pattern, into, step.axis, step.require_match)]


@_back.register
def _(step: UnstackLayers, source: Shapes | None) -> list[Any]:
    rule, (before, field, after) = parse_rule(step.pattern, "UnstackLayers"), _at_number(step)
    tokens = (*rule.template(before), _LAYER, *rule.template(after))
    pattern, numbers = written_pattern(tokens, {**rule.groups, _LAYER: r"\d+"}, {_LAYER: "i"})
    in_block = rule.template(field["first"])[1:2] if field["step"] else ()
    if field["step"] and not in_block:
        raise ValueError(f"{step.describe()}: {field['first']!r} is no group with the place in a block")
    template = [f"{{i%{field['step']}}}" if token in in_block else token for token in rule.tokens]
    return [StackLayers(pattern, written_template(template, numbers), step.axis, step.require_match)]


def _at_number(step: UnstackLayers) -> tuple[str, re.Match[str], str]:
    """Splits new names at the layer's number."""
    field, *others = LAYER_NUMBER.finditer(step.into)
    if others:
        raise ValueError(f"{step.describe()}: the way back needs one number in {step.into!r}")
    return step.into[: field.start()], field, step.into[field.end() :]


@_back.register
def _(step: Split, source: Shapes | None) -> list[Any]:
    turned = [inverted_rule(step.pattern, template, "Split") for template in step.into]
    if len({into for _, into in turned}) != 1:
        raise ValueError(f"{step.describe()}: the parts name the groups of the pattern in different orders")
    return [Concat(tuple(pattern for pattern, _ in turned), turned[0][1], step.axis, step.require_match)]


@_back.register
def _(step: Concat, source: Shapes | None) -> list[Any]:
    turned = [inverted_rule(pattern, step.into, "Concat") for pattern in step.patterns]
    if len({pattern for pattern, _ in turned}) != 1:
        raise ValueError(f"{step.describe()}: its patterns have different groups")
    sizes: dict[tuple[int, ...], None] = {}
    names = [_matching((pattern,), source, step) for pattern in step.patterns]
    for parts in zip(*names, strict=True):
        sizes[tuple(source[name].shape[step.axis] for name in parts)] = None  # pyright: ignore[reportOptionalSubscript]
    if len(sizes) != 1:
        raise ValueError(f"{step.describe()}: joined leaves have parts of different sizes: {[*sizes]}")
    into = tuple(template for _, template in turned)
    return [Split(turned[0][0], into, step.axis, next(iter(sizes)), step.require_match)]


def _matching(patterns: Sequence[Pattern], source: Shapes | None, step: Any) -> list[str]:
    """Lists the names of the source that match, sorted.

    Raises:
      ValueError: there is no source.
    """
    if source is None:
        raise ValueError(f"{step.describe()}: the way back needs the old shapes; pass source=")
    table = rule_table(tuple(patterns))
    return sorted(name for name, leaf in source.items() if table.first(name) is not None and leaf is not None)


def _single_names(step: Any, source: FlatState, after: FlatState) -> list[Any]:
    """Writes the inverse of a transform of names name by name."""
    match step:
        case StackLayers():
            return _single_stacks(step, source)
        case UnstackLayers():
            head, _, tail = _at_number(step)
            patterns = {
                found.string: rf"{escaped(found.expand(head))}(?P<i>\d+){escaped(found.expand(tail))}"
                for found in _matches(step, source)
            }
            return [StackLayers(pattern, literal(name), step.axis) for name, pattern in patterns.items()]
        case Split():
            parts = {
                found.string: [escaped(found.expand(part)) for part in step.into] for found in _matches(step, source)
            }
            return [Concat(patterns, literal(name), step.axis) for name, patterns in parts.items()]
        case Concat():
            return _single_parts(step, source)
        case Rename() | RepeatLayers(axis=None):
            return _single_renames(step, source, after)
    return []


def _matches(step: Any, source: FlatState) -> list[re.Match[str]]:
    """Returns the matches of arrays' names."""
    regex = compile_pattern(step.pattern, type(step).__name__)
    return [found for name, leaf in source.items() if leaf is not None and (found := regex.fullmatch(name))]


def _single_parts(step: Concat, source: FlatState) -> list[Any]:
    table = rule_table(step.patterns)
    found = [one for name in source if (one := table.first(name)) is not None]
    joined: dict[str, list[str]] = {}
    for _, match in sorted(found, key=lambda one: one[0]):
        joined.setdefault(match.expand(step.into), []).append(match.string)
    return [
        Split(escaped(name), list(map(literal, parts)), step.axis, [source[part].shape[step.axis] for part in parts])
        for name, parts in joined.items()
    ]


def _single_renames(step: Rename | RepeatLayers, source: FlatState, after: FlatState) -> list[Any]:
    """Renames each leaf, or one of its copies, back."""
    moved = _applied([step], {name: name for name in source}, {name: ... for name in after})
    back = {old: new for new, old in reversed(moved.items())}
    back |= {new: new for new, old in moved.items() if new == old}
    if back.keys() != source.keys():
        raise ValueError(f"{step.describe()} takes leaves out, which has no way back")
    rules = [(escaped(new), literal(old) if back[old] == new else None) for new, old in moved.items() if new != old]
    return [Rename(rules)]


def _single_stacks(step: StackLayers, source: FlatState) -> list[Any]:
    matches = _matches(step, source)
    group = layer_group(matches, "StackLayers", Diagnostics()) if matches else None
    if group is None:
        return []
    block = IN_BLOCK.search(step.into)
    layers: dict[str, str] = {}
    width = max((len(found[group]) for found in matches if found[group].startswith("0")), default=1)
    for found in matches:
        name, (start, end), into, field = found.string, found.span(group), step.into, "i"
        if block is not None:
            place = int(found[group]) % int(block[1])
            into, field = IN_BLOCK.sub(str(place), into), f"i*{block[1]}+{place}"
        if width > 1:
            field += f":0{width}d"
        layers.setdefault(found.expand(into), f"{literal(name[:start])}{{{field}}}{literal(name[end:])}")
    return [UnstackLayers(escaped(stacked), into, step.axis) for stacked, into in layers.items()]
