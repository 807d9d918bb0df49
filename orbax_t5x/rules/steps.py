"""Transforms of rule packs that depend on several names."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import repeat
from orbax_t5x.lazy.several import all_equal
from orbax_t5x.rules.leaf_table import LeafTable
from orbax_t5x.rules.pack import FIND_PACK
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves, view_of
from orbax_t5x.transforms.layers import numbered_names
from orbax_t5x.transforms.patterns.table import compile_pattern, new_name
from orbax_t5x.transforms.prefix import model_prefix, rename_leaves
from orbax_t5x.trees.flat import FlatState

# Relative biases of a tower under any program's names, with the tower filled in; the group is the layer's number.
_BIAS_NAMES = (
    r"(?:.*[./])?{tower}[./]block[./](\d+)[./].*[./]relative_attention_bias[./].*",
    r"{tower}\.layer\.(\d+)\.self_attention\.attention\.relative_attention_bias\.weight",
    r"{short}\.blk\.(\d+)\.attn_rel_b\.weight",
)
# Wan's models have an encoder only.
_ENCODER_BIAS_NAMES = (r"(?:.*?\.)??(?:blocks\.(\d+)\.)?pos_embedding\.embedding\.weight",)
_STACKED_BIAS = r"(?:.*/)?{tower}/{tower}/(?:subblock_\d+/)?relpos_bias/rel_embedding"


def has_leaf(target: FlatState, pattern: str) -> bool:
    """Reports whether the whole name of a target leaf matches."""
    regex = compile_pattern(pattern, "rules")
    return any(regex.fullmatch(name) for name in target)


def has_bias_per_layer(names: Iterable[str], tower: str) -> bool:
    """Tests if foreign names have a bias beyond layer 0."""
    return any(number not in (None, 0) for number in _bias_layers(names, tower))


def has_bias_of_tower(names: Iterable[str], tower: str) -> bool:
    """Tests if foreign names have a bias of the tower."""
    found = _bias_layers(names, tower)
    return bool(found) and found <= {None, 0}


def _bias_layers(names: Iterable[str], tower: str) -> set[int | None]:
    """Returns layers with a bias; None: no layer, -1: stacked."""
    texts = [*_BIAS_NAMES, *(_ENCODER_BIAS_NAMES if tower == "encoder" else ())]
    named = "|".join(texts).format(tower=tower, short=tower[:3])
    regex = re.compile(f"(?P<stacked>{_STACKED_BIAS.format(tower=tower)})|{named}")
    found: set[int | None] = set()
    for name in names:
        match = regex.fullmatch(name)
        if match is not None:
            numbers = [int(group) for group in match.groups()[1:] if group is not None]
            found.add(-1 if match["stacked"] else numbers[0] if numbers else None)
    return found


@dataclasses.dataclass(frozen=True)
class RepeatPerLayer(Transform):
    """Copies of a tower's leaf for each layer.

    Attributes:
      pattern: a regex of the leaf's whole name.
      layers: a regex, with the pattern's groups filled in as `{1}`, …, that matches names in layers; its one group
        is the number.
      into: the new name; with `{i}`, one leaf per layer.
      axis: of the layers; None with `{i}`.
      unless_target: with the groups filled in, a regex of target names: where one matches, the leaf stays.
    """

    pattern: str
    layers: str
    into: str
    axis: int | None
    unless_target: str | None = None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        regex = compile_pattern(self.pattern, "rules")
        result = NewState(diagnostics)
        for name, value in state.items():
            match = regex.fullmatch(name)
            if match is None or (self.unless_target and has_leaf(target, _fill_groups(self.unless_target, match))):
                result.put(name, value, name)
                continue
            depth = _layer_count(compile_pattern(_fill_groups(self.layers, match), "rules"), state)
            view = view_of(name, value, diagnostics)
            if view is None:
                continue
            if not depth:
                message = f"{name!r} is for every layer, and its tower has no layers"
                diagnostics.problem("rule", name, message, Fix("restore all of the tower, or drop this leaf"))
            elif self.axis is None:
                for new in numbered_names(match, self.into, depth, "per layer", diagnostics) or ():
                    result.put(new, value, name, f"the same in each of {depth} layers")
            else:
                new = new_name(match, self.into, "per layer", diagnostics)
                if new is not None:
                    result.put(new, repeat(view, depth, self.axis), name, f"repeated for {depth} layers")
        return result.finish()


@dataclasses.dataclass(frozen=True)
class MergeEqualLayers(Transform):
    """Merge of equal leaves of layers into the tower's.

    Attributes:
      pattern: a regex of a layer's leaf's whole name; the group `i` is the layer number.
      into: the new name.
      unless_target: with the groups filled in, a regex of target names: where one matches, the leaves stay.
    """

    pattern: str
    into: str
    unless_target: str | None = None

    def _stays(self, layers: Sequence[re.Match[str]], new: str, target: FlatState) -> bool:
        """Tests if the target has a bias of each layer."""
        match = layers[0]
        if self.unless_target and has_leaf(target, _fill_groups(self.unless_target, match)):
            return True
        # What a later pack makes of it.
        return has_bias_per_layer(target, new.split("/")[-3])

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        regex = compile_pattern(self.pattern, "rules")
        result = NewState(diagnostics)
        towers: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(regex.fullmatch, state)):
            towers.setdefault(match.expand(self.into), []).append(match)
        towers = {new: layers for new, layers in towers.items() if not self._stays(layers, new, target)}
        merged_names = {match.string for layers in towers.values() for match in layers}
        for name, value in state.items():
            if name not in merged_names:
                result.put(name, value, name)
        for new, layers in towers.items():
            names = [match.string for match in sorted(layers, key=lambda match: int(match["i"]))]
            rule = f"one of {len(names)} layers' that must be equal"
            equal = functools.partial(all_equal, advice="with bias_per_layer=True the pack keeps a bias in each layer")
            merged = combine_leaves([(name, state[name]) for name in names], equal, diagnostics, becomes=new, rule=rule)
            if merged is not None:
                result.put(new, merged if len(names) > 1 else state[names[0]], names[0], rule)
        return result.finish()


@dataclasses.dataclass(frozen=True)
class MergeWhereWanted(MergeEqualLayers):
    """Merge only if the target has a leaf per tower."""

    def _stays(self, layers: Sequence[re.Match[str]], new: str, target: FlatState) -> bool:
        is_wanted = new in target or has_bias_of_tower(target, new.split("/")[-3])
        return not is_wanted or super()._stays(layers, new, target)


@dataclasses.dataclass(frozen=True)
class MergeAlone(MergeEqualLayers):
    """Merge only in a tower of one layer."""

    def _stays(self, layers: Sequence[re.Match[str]], new: str, target: FlatState) -> bool:
        return len(layers) > 1 or super()._stays(layers, new, target)


@dataclasses.dataclass(frozen=True)
class HeadsCheck(Transform):
    """Check of attention kernels: another number of heads is a problem.

    A reshape finds that only where it does not divide: (32, 48) becomes (16, 6, 16), too, which mixes the
    embedding with the heads.

    Attributes:
      attention: a regex of the text before `query/kernel`, …, in whole names.
      num_heads: H.
      head_dim: D.
      layers_axis: the position of the layers' axis, if there is one.
    """

    attention: str
    num_heads: int
    head_dim: int
    layers_axis: int | None = None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        regex = compile_pattern(rf"(?:{self.attention})/(?P<which>query|key|value|out)/kernel", "rules")
        heads, joined = (self.num_heads, self.head_dim), self.num_heads * self.head_dim
        for name, value in state.items():
            match = regex.fullmatch(name)
            # An optimizer's None, or what is no array, has no heads.
            whole = getattr(value, "shape", None)
            if match is None or whole is None:
                continue
            shape = list(whole)
            if self.layers_axis is not None and -len(shape) <= self.layers_axis < len(shape):
                del shape[self.layers_axis]
            found = tuple(shape[:-1] if match["which"] == "out" else shape[1:])
            if found not in ((joined,), heads) and math.prod(whole) % joined == 0:
                self._problem(name, tuple(whole), found, diagnostics)
        return dict(state)

    def _problem(self, name: str, shape: tuple[int, ...], found: tuple[int, ...], diagnostics: Diagnostics) -> None:
        size = " x ".join(map(str, found)) or "no size"
        diagnostics.problem(
            "shape",
            name,
            f"its shape {shape} has {size} for the heads, and {self.num_heads} heads of {self.head_dim} are "
            f"{self.num_heads * self.head_dim}",
            Fix.any_of(Fix("give the pack the model's num_heads and head_dim"), *FIND_PACK.ways),
        )


@dataclasses.dataclass(frozen=True)
class FirstName(Transform):
    """Merge of several names of a leaf, compared when read."""

    names: tuple[str, ...]
    into: str

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        there = [name for name in self.names if name in state]
        result = NewState(diagnostics)
        for name, value in state.items():
            if there and name == there[0]:
                rule = f"{name!r} -> {self.into!r}"
                if len(there) > 1:
                    rule = f"{rule}, which {listed(map(repr, there[1:]), 2)} must equal"
                    value = equal_copies(there, state, diagnostics, becomes=self.into, rule=rule)
                if value is not None:
                    result.put(self.into, value, name, rule)
            elif name not in there:
                result.put(name, value, name)
        return result.finish()


def equal_copies(
    names: Sequence[str], state: FlatState, diagnostics: Diagnostics, *, becomes: str, rule: str
) -> Any | None:
    """Merges leaves that must be equal; records other shapes."""
    advice = "put ot.transforms.Drop before the pack for those that the model does not use"
    copies = [(name, state[name]) for name in names]
    return combine_leaves(copies, all_equal, diagnostics, becomes=becomes, rule=rule, advice=advice)


@dataclasses.dataclass(frozen=True)
class WithoutPrefix(Transform):
    """Move of a layout's only model to bare names."""

    leaves: LeafTable

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        prefixes = self.leaves.prefixes(state)
        if len(prefixes) != 1 or not prefixes[0]:
            return dict(state)
        moved = {name: name.removeprefix(prefixes[0]) for name in self.leaves.model(state)}
        return rename_leaves(state, moved, f"without {prefixes[0]!r}", diagnostics)


@dataclasses.dataclass(frozen=True)
class PrefixAsTarget(Transform):
    """Prefix for matching names: the target's.

    Attributes:
      pattern: a regex of the names, without groups.
      default: the prefix where there is no target.
    """

    pattern: str
    default: str

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        prefix = target_prefix(target, self.default)
        regex = compile_pattern(self.pattern, "rules")
        moved = {name: prefix + name for name in state if prefix and regex.fullmatch(name)}
        return rename_leaves(state, moved, f"below {prefix!r}", diagnostics)


def target_prefix(names: FlatState, default: str) -> str:
    """Returns the prefix of the target's parameters, or `default`."""
    return (model_prefix(names) or "") if names else default


def _fill_groups(pattern: str, match: re.Match[str]) -> str:
    for number in range(1, (match.re.groups or 0) + 1):
        pattern = pattern.replace(f"{{{number}}}", re.escape(match[number] or ""))
    return pattern


def _layer_count(layers: re.Pattern[str], names: Iterable[str]) -> int:
    numbers = [int(match[1]) for name in names if (match := layers.fullmatch(name)) is not None]
    return max(numbers, default=-1) + 1
