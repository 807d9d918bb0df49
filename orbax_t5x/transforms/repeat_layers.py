"""Models of another depth: layers copied, left out or reordered."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.lazy.several import concatenate
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.by_rules import ByRules, Matches
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, view_of
from orbax_t5x.transforms.layers import MOST_LAYERS, layer_group, layer_number, written_layer_group
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_text
from orbax_t5x.trees.flat import FlatState

_SHOWN_LAYERS = 5


@dataclasses.dataclass(frozen=True)
class RepeatLayers(ByRules):
    r"""Layers of a deeper, shallower or reordered model.

    Layers are leaves with a number in their names, or, with `axis`, one leaf that holds them all. A leaf that only
    layer 0 of several has, such as the relative bias in Hugging Face's T5, stays the one of layer 0; of other leaves
    each new layer has those of the layer that it copies. The optimizer's moments are copied, too, and
    those of copies are approximate.

    Attributes:
      pattern: a regex that must match a whole name. Without `axis` one group is the layer number: the one named `i`,
        or else the only one that matches only digits. Everything before the number tells towers apart.
      depth: the new number of layers.
      how: "interleave": layer i is layer i * old // new; "append": layer i is layer i % old; or the layer of the
        checkpoint for each new one.
      axis: the axis of the layers in leaves that hold them all.
      require_match: whether it is an error that no name matches.

    Example:
      >>> deeper = ot.transforms.RepeatLayers(r"enc/layers_(\d+)/.*", depth=4)
      >>> state = deeper({"enc": {f"layers_{i}": {"w": np.full(1, i)} for i in range(2)}}, {})
      >>> [int(state["enc"][f"layers_{i}"]["w"][0]) for i in range(4)]
      [0, 0, 1, 1]
      >>> scanned = ot.transforms.RepeatLayers("w", 3, how=[1, 0, 1], axis=0)
      >>> np.asarray(scanned({"w": np.arange(2)}, {})["w"])
      array([1, 0, 1])
    """

    pattern: Pattern
    depth: int
    how: str | Sequence[int] = "interleave"
    axis: int | None = None
    require_match: bool = True

    def __post_init__(self) -> None:
        regex = compile_pattern(self.pattern, "RepeatLayers")
        depth = operator.index(self.depth)
        if not 1 <= depth <= MOST_LAYERS:
            raise ValueError(f"RepeatLayers: depth is from 1 to {MOST_LAYERS}, not {depth}")
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "how", _checked_how(self.how, depth))
        if self.axis is not None:
            object.__setattr__(self, "axis", operator.index(self.axis))
        elif not regex.groups:
            text = f"{pattern_text(self.pattern)!r} has no group for the layer number"
            raise ValueError(f"RepeatLayers: {text}; leaves that hold all layers need axis=")
        else:
            written_layer_group(regex, "RepeatLayers")

    def sources(self, old: int) -> list[int]:
        """Lists the checkpoint's layer for each new layer."""
        if not isinstance(self.how, str):
            if max(self.how) >= old:
                raise ValueError(f"there is no layer {max(self.how)} among {old}")
            return list(self.how)
        if not old:
            raise ValueError("there are no layers")
        return [i * old // self.depth if self.how == "interleave" else i % old for i in range(self.depth)]

    # The number of layers is all that it needs of the source.
    def inverse(self, depth: int | None = None) -> RepeatLayers:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the transform back to the checkpoint's layers.

        Args:
          depth: the checkpoint's number of layers; None where `how` lists them all.

        Raises:
          ValueError: the depth is not known, or some layers have no copy.
        """
        if depth is None:
            if isinstance(self.how, str):
                raise ValueError(f"RepeatLayers: the way back from how={self.how!r} needs the checkpoint's depth")
            depth = max(self.how) + 1
        copies = self.sources(operator.index(depth))
        lacking = sorted(set(range(depth)).difference(copies))
        if lacking:
            raise ValueError(f"RepeatLayers: layers {listed(map(str, lacking), _SHOWN_LAYERS)} have no copy")
        return dataclasses.replace(self, depth=depth, how=tuple(copies.index(layer) for layer in range(depth)))

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        found = [match for _, match in matches.values()]
        for name, value in state.items():
            if name not in matches:
                new.put(name, value, name)
        if self.axis is not None:
            for match in found:
                self._put_stacked(match.string, state[match.string], self.axis, new, diagnostics)
            return
        group = layer_group(found, "RepeatLayers", diagnostics) if found else None
        if group is None:
            return
        towers: dict[str, dict[str, dict[int, re.Match[str]]]] = collections.defaultdict(dict)
        for match in found:
            number = layer_number(match, group, "RepeatLayers", diagnostics)
            if number is None:
                continue
            before, after = match.string[: match.start(group)], match.string[match.end(group) :]
            other = towers[before].setdefault(after, {}).setdefault(number, match)
            if other is not match:
                message = f"RepeatLayers: {other.string!r} and {match.string!r} are both layer {number}"
                diagnostics.problem("duplicate", match.string, message, Fix("rename or drop one of the two"))
        for before, leaves in towers.items():
            self._put_tower(before, leaves, group, state, new, diagnostics)

    def _put_stacked(self, name: str, value: Any, axis: int, new: NewState, diagnostics: Diagnostics) -> None:
        view = None if value is None else view_of(name, value, diagnostics)
        if view is None:
            new.put(name, value, name)
            return
        try:
            if not -view.ndim <= axis < view.ndim:
                raise ValueError(f"there is no axis {axis} in shape {view.shape}")
            old = view.shape[axis]
            made = _taken(view, self.sources(old), axis % view.ndim)
        except ValueError as error:
            message = f"RepeatLayers {pattern_text(self.pattern)!r}: {error}"
            diagnostics.problem("shape", name, message, Fix("leave the leaf out of the pattern, or check the axis"))
            new.put(name, value, name)
            return
        new.put(name, made, name, f"RepeatLayers: {old} layers on axis {axis} become {self.depth}")

    def _put_tower(
        self,
        before: str,
        leaves: dict[str, dict[int, re.Match[str]]],
        group: int,
        state: FlatState,
        new: NewState,
        diagnostics: Diagnostics,
    ) -> None:
        numbers = {number for layers in leaves.values() for number in layers}
        old = max(numbers) + 1
        lacking = [str(number) for number in itertools.islice(sorted(set(range(old)) - numbers), _SHOWN_LAYERS)]
        try:
            if lacking:
                raise ValueError(f"layer {', '.join(lacking)} of {old} is missing")
            sources = self.sources(old)
        except ValueError as error:
            message = f"RepeatLayers: below {before!r} {error}"
            first = next(iter(leaves.values()))
            fix = Fix("correct the pattern or the layers to copy")
            diagnostics.problem("missing" if lacking else "rule", next(iter(first.values())).string, message, fix)
            diagnostics.explained.update(f"{before}{i}{after}" for i in range(self.depth) for after in leaves)
            return
        texts = [match[group] for layers in leaves.values() for match in layers.values()]
        width = max((len(text) for text in texts if len(text) > 1 and text[0] == "0"), default=1)
        for after, layers in leaves.items():
            if layers.keys() == {0} and old > 1:
                new.put(layers[0].string, state[layers[0].string], layers[0].string)
                continue
            for number, source in enumerate(sources):
                if source in layers:
                    name = layers[source].string
                    rule = None if number == source else f"RepeatLayers: layer {number} is layer {source} of {old}"
                    new.put(f"{before}{number:0{width}}{after}", state[name], name, rule)


def _checked_how(how: Any, depth: int) -> str | tuple[int, ...]:
    """Normalizes a list of layers."""
    if isinstance(how, str):
        if how not in ("interleave", "append"):
            raise ValueError(f"RepeatLayers: how is 'interleave', 'append' or a list of layers, not {how!r}")
        return how
    layers = tuple(operator.index(layer) for layer in how)
    if len(layers) != depth or min(layers) < 0:
        raise ValueError(f"RepeatLayers: how lists one layer from 0 for each of {depth} new ones, not {layers}")
    return layers


def _taken(view: View, layers: Sequence[int], axis: int) -> View:
    """Takes layers along an axis, each box once."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = runs[-1][0], layer + 1
        else:
            runs.append((layer, layer + 1))
    if sum(stop - start for start, stop in set(runs)) != len(set(layers)):  # runs overlap
        runs = [(layer, layer + 1) for layer in layers]
    before = (slice(None),) * axis
    parts = [view[(*before, slice(start, stop))] for start, stop in runs]
    return parts[0] if len(parts) == 1 else concatenate(parts, axis)
