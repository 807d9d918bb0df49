"""The way back: transforms that undo transforms, in the opposite order.

Rules of names are turned around by their text. With the source's leaves each way back is tried on their names and
shapes; if the text alone would lead elsewhere, rules for single names are written instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.lazy import View, as_view
from orbax_t5x.transforms.arrays import Affine, Reshape, Transpose
from orbax_t5x.transforms.assignment_map import AssignmentMap
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.chain import Chain
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.optimizer import FollowOptimizer
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers, layer_group, written_layer_group
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.patterns.inverted import escaped, inverted_rule, parse_rule, written_pattern, written_template
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_text, rule_table
from orbax_t5x.transforms.split_concat import Concat, Split
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
    leaves = None if source is None else _abstract(flatten(source))
    back: list[Any] = []
    for step in steps:
        found: list[Any] | None
        try:
            found = _inverse_of(step, leaves)
        except ValueError:
            if leaves is None or not isinstance(step, Rename | StackLayers):
                raise
            found = None
        if leaves is not None:
            # A rule of an assignment map looks up the old name of a new one.
            forwards = step if not isinstance(step, AssignmentMap) else Rename(_turned(step.rules, "AssignmentMap"))
            after = _applied([forwards], leaves, {})
            if found is None or not _leads_back(found, after, leaves):
                found = _single_names(forwards, leaves, after)
            leaves = after
        back[:0] = found or []
    return tuple(back)


def _abstract(leaves: Shapes) -> dict[str, Any]:
    """Returns arrays of the same shapes without memory."""
    return {name: _view(leaf) if hasattr(leaf, "shape") else leaf for name, leaf in leaves.items()}


def _view(leaf: Any) -> Any:
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # PRNG keys
        dtype = np.dtype(np.uint32)
    return as_view(np.broadcast_to(np.zeros((), dtype), tuple(leaf.shape)))


def _contents(state: FlatState) -> dict[str, Any]:
    """Returns the shape and the origins of each leaf."""
    return {
        name: (value.shape, frozenset(map(id, value.leaves()))) if isinstance(value, View) else id(value)
        for name, value in state.items()
    }


def _leads_back(steps: Sequence[Any], after: FlatState, before: FlatState) -> bool:
    try:
        return _contents(_applied(steps, after, before)) == _contents(before)
    except ValueError:  # a pattern matches more than what it is for
        return False


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
        return [step.inverse() if not source else _with_source(step, source)] if _has_own(step) else _back(step, source)
    name = getattr(step, "__name__", type(step).__name__)
    raise ValueError(f"{name} is a function: write its way back by hand")


def _has_own(step: Transform) -> bool:
    """Tests for an `inverse` of the class itself."""
    return type(step).inverse is not Transform.inverse


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
    return [dataclasses.replace(step, pattern=_any_of(names), shape=shape) for shape, names in by_shape.items()]


@_back.register
def _(step: StackLayers, source: Shapes | None) -> list[Any]:
    rule = parse_rule(step.pattern, "StackLayers")
    layer = written_layer_group(rule.regex, "StackLayers")
    if layer is None:
        raise ValueError(f"{step.describe()}: name the group of the layer's number `i` for the way back")
    pattern, numbers = written_pattern(rule.template(step.into), rule.groups)
    into = written_template(["{i}" if token == layer else token for token in rule.tokens], numbers)
    return [UnstackLayers(pattern, into, step.axis, step.require_match)]


@_back.register
def _(step: UnstackLayers, source: Shapes | None) -> list[Any]:
    rule, pieces = parse_rule(step.pattern, "UnstackLayers"), step.into.split("{i}")
    if len(pieces) != 2:
        raise ValueError(f"{step.describe()}: the way back needs one {{i}}, without a format, in {step.into!r}")
    tokens = (*rule.template(pieces[0]), _LAYER, *rule.template(pieces[1]))
    pattern, numbers = written_pattern(tokens, {**rule.groups, _LAYER: r"\d+"}, {_LAYER: "i"})
    return [StackLayers(pattern, written_template(rule.tokens, numbers), step.axis, step.require_match)]


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


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(escaped, names))


def _single_names(step: Any, source: FlatState, after: FlatState) -> list[Any]:
    """Writes the inverse of a renaming or stack name by name."""
    if isinstance(step, StackLayers):
        return _single_stacks(step, source)
    if not isinstance(step, Rename):
        names = ", ".join(itertools.islice(source, _SHOWN_NAMES))
        raise ValueError(f"{step.describe()}: its way back leads elsewhere for these leaves ({names}, …)")
    moved = _applied([step], {name: name for name in source}, {name: ... for name in after})
    if len(moved) != len(source):
        raise ValueError(f"{step.describe()} takes leaves out or copies them, which has no way back")
    pairs = tuple((escaped(new), old) for new, old in moved.items() if new != old)
    return [Rename(tuple((pattern, old.replace("\\", "\\\\")) for pattern, old in pairs))]


def _single_stacks(step: StackLayers, source: FlatState) -> list[Any]:
    regex = compile_pattern(step.pattern, "StackLayers")
    matches = [found for name in source if (found := regex.fullmatch(name))]
    group = layer_group(matches, "StackLayers", Diagnostics())
    assert group is not None  # it has stacked them
    layers = {found.expand(step.into): _with_any_layer(found, group) for found in matches}
    return [UnstackLayers(escaped(stacked), into, step.axis) for stacked, into in layers.items()]


def _with_any_layer(found: re.Match[str], group: int | str) -> str:
    name, (start, end) = found.string, found.span(group)
    return "{i}".join(part.replace("\\", "\\\\") for part in (name[:start], name[end:]))
