"""Rules for the parameters of a training state, each as a transform of the package and as NumPy's own moves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import orbax_t5x as ot
from tests.transforms.follow.resume_truth import Moves, same

T = ot.transforms
_LAYER = re.compile(r"(.*?)layers_(\d+)/(.*)")
_WORDS = ("core", "trunk", "stem", "branch", "unit", "part")
_TYPES = ("weight", "w", "gamma", "embedding", "matrix")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
      transform: The package's transform.
      moves: Function of the parameters' arrays to what the rule does with them.
      rename: Function of the names below the root that are no parameters (batch statistics, keys).
      fill: What `Pad` puts into parameters.
      keeps_moments: Whether the moments stay where they are (`follow=False`).
      matches_all: Whether the rule matches the names of all trees by itself, copies that are none included.
      names_moments: Whether the rule names moments by themselves.
      drops: Whether it takes parameters out.
      root: New key of the parameters, if the rule changes that alone.
    """

    transform: Any
    moves: Callable[[Mapping[str, Any]], Moves]
    rename: Callable[[str], str | None] = lambda name: name
    fill: float = 0.0
    keeps_moments: bool = False
    matches_all: bool = False
    names_moments: bool = False
    drops: bool = False
    root: str | None = None


@dataclasses.dataclass(frozen=True)
class Names:
    """How rules name the leaves of a tower.

    Attributes:
      prefix: Prefix of the tower in the checkpoint.
      inner: Beginning of the parameters' names that no rule changes.
      suffix: What Orbax puts after names.
      is_nnx: Whether modules must keep the first words of their names.
      others: Parts of names in front of parameters, which no rule may match by accident.
      optimizer: Prefix of the tower's optimizer.
      copies: Prefixes of copies that follow; a `Drop` names them by themselves.
    """

    prefix: str
    inner: str
    suffix: str
    is_nnx: bool
    others: frozenset[str]
    optimizer: str
    copies: tuple[str, ...]


class Drawer:
    """Draws rules that fit the parameters as they are after the rules before."""

    def __init__(self, random: np.random.Generator, names: Names) -> None:
        self.random = random
        self.names = names
        # Whether all towers and copies have the same names and shapes.
        self.is_uniform = True
        # Kinds of moments, with the parameters that have them.
        self.kinds: dict[str, set[str]] = {}
        # Whether a rule gave leaves names without the suffix.
        self.has_bare_names = False

    def draw(self, shapes: Mapping[str, tuple[int, ...]], others: list[str], is_last: bool) -> Rule | None:
        """Returns a rule for parameters of these shapes, or None if the kind drawn does not fit them."""
        kinds = (
            self._leaf, self._module, self._module, self._everywhere, self._swap, self._swap, self._stack,
            self._stack, self._unstack, self._split, self._concat, self._transpose, self._transpose, self._pad,
            self._drop, self._named_moments,
        )  # fmt: skip
        kind = kinds[self.random.integers(len(kinds))]
        rule = kind(dict(shapes), others)
        if rule is None:
            return None
        choice = self.random.random()
        if choice < 0.15:
            return dataclasses.replace(rule, transform=T.FollowOptimizer(rule.transform))
        can_stay = is_last and not (rule.matches_all or rule.names_moments)
        if can_stay and choice < 0.2 and _has_follow(rule.transform):
            return dataclasses.replace(
                rule, transform=dataclasses.replace(rule.transform, follow=False), keeps_moments=True
            )
        return rule

    def _pick(self, values: Any) -> Any:
        values = list(values)
        return values[self.random.integers(len(values))]

    def _full(self, name: str) -> str:
        return re.escape(self.names.prefix) + re.escape(name)

    def _pattern(self, name: str) -> tuple[str, str]:
        """Returns a pattern of a leaf and what its new names must end with."""
        if not self.names.suffix:
            return self._full(name) + self._pick(["", "", "(?:/value)?"]), ""
        if not self.has_bare_names and self.random.random() < 0.5:
            return self._full(name) + self.names.suffix, self.names.suffix
        if self.random.random() < 0.5:
            return self._full(name) + "(?:/value)?", self.names.suffix
        self.has_bare_names = True
        return self._full(name) + "(?:/value)?", ""

    def _own(self, name: str) -> str:
        return name.removeprefix(self.names.inner)

    def _modules(self, shapes: Mapping[str, Any], *, with_layers: bool = False) -> list[str]:
        modules = set()
        for name in shapes:
            parts = self._own(name).split("/")
            modules.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
        if not with_layers:
            modules = {module for module in modules if not module.rsplit("/", 1)[-1].startswith("layers")}
        return sorted(self.names.inner + module for module in modules)

    def _new_word(self, old: str, taken: Any, words: tuple[str, ...] = _WORDS) -> str:
        word = f"{old}_{self._pick('xyz')}" if self.names.is_nnx else self._pick(words)
        while word in taken:
            word += "2"
        return word

    def _renaming(self, transform: Any, new: Mapping[str, str], **more: Any) -> Rule:
        """Returns a rule that gives these modules and leaves new names, all at once."""

        def rename(name: str) -> str:
            for old, word in new.items():
                if name == old or name.startswith(f"{old}/"):
                    return word + name[len(old) :]
            return name

        def moves(arrays: Mapping[str, Any]) -> Moves:
            return {rename(name): (same, (name,)) for name in arrays}

        return Rule(transform, moves, rename, **more)

    def _leaf(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        name = self._pick(shapes)
        if "batch_norm" in name:
            return None
        parent, _, last = name.rpartition("/")
        word = self._new_word(last, _children(shapes, parent), _TYPES)
        new = f"{parent}/{word}" if parent else word
        pattern, suffix = self._pattern(name)
        return self._renaming(T.Rename([(pattern, self.names.prefix + new + suffix)]), {name: new})

    def _module(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        new: dict[str, str] = {}
        for _ in range(self.random.integers(1, 3)):
            modules = [
                module
                for module in self._modules(shapes)
                if not any(module == old or _is_inside(module, old) or _is_inside(old, module) for old in new)
            ]
            if not modules:
                break
            module = self._pick(modules)
            parent, _, last = module.rpartition("/")
            word = self._new_word(last, {*_children(shapes, parent), *(value.split("/")[-1] for value in new.values())})
            new[module] = f"{parent}/{word}" if parent else word
        if not new:
            return None
        rules = [(f"{self._full(old)}/(.*)", rf"{self.names.prefix}{word}/\1") for old, word in new.items()]
        return self._renaming(T.Rename(rules), new)

    def _everywhere(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        module = self._pick(self._modules(shapes) or [""])
        last = module.rsplit("/", 1)[-1]
        parts = [part for name in shapes for part in name.split("/")[:-1]]
        paths = {module for module in self._modules(shapes) if module.rsplit("/", 1)[-1] == last}
        if not module or not self.is_uniform or last in self.names.others:
            return None
        if any(_is_inside(inner, outer) for inner in paths for outer in paths):
            return None
        word = self._new_word(last, parts)
        new = {path: f"{path[: -len(last)]}{word}" for path in paths}
        transform = T.Rename([(f"(.*/|){last}/(.*)", rf"\1{word}/\2")])
        return self._renaming(transform, new, matches_all=True)

    def _swap(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        def inside(module: str) -> dict[str, Any]:
            length = len(module)
            names = {**shapes, **dict.fromkeys(others)}
            return {name[length:]: shape for name, shape in names.items() if _is_inside(name, module)}

        modules = self._modules(shapes, with_layers=True)
        pairs = [
            (one, two)
            for index, one in enumerate(modules)
            for two in modules[:index]
            if inside(one) == inside(two) and not _is_inside(one, two) and not _is_inside(two, one)
        ]
        leaves = sorted(shapes)
        leaf_pairs = [
            (one, two) for index, one in enumerate(leaves) for two in leaves[:index] if shapes[one] == shapes[two]
        ]
        if leaf_pairs and (not pairs or self.random.random() < 0.4):
            one, two = self._pick(leaf_pairs)
            suffix = self._pick(["", "(?:/value)?"]) if not self.names.suffix else self.names.suffix
            if self.has_bare_names:
                suffix = "(?:/value)?"
            ending = self.names.suffix
            rules = [
                (self._full(old) + suffix, self.names.prefix + new + ending) for old, new in ((one, two), (two, one))
            ]
        elif pairs:
            one, two = self._pick(pairs)
            rules = [
                (f"{self._full(old)}/(.*)", rf"{self.names.prefix}{new}/\1") for old, new in ((one, two), (two, one))
            ]
        else:
            return None
        return self._renaming(T.Rename(rules), {one: two, two: one})

    def _stack(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        towers: dict[str, dict[str, dict[int, str]]] = {}
        for name in shapes:
            if match := _LAYER.fullmatch(name):
                towers.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = name
        if not towers:
            return None
        tower = self._pick(sorted(towers))
        stacks = towers[tower]
        depth = len(next(iter(stacks.values())))
        for layers in stacks.values():
            if sorted(layers) != list(range(depth)) or len({shapes[name] for name in layers.values()}) > 1:
                return None
        axis = int(self.random.integers(2))
        new = {f"{tower}layers/{rest}": tuple(layers[i] for i in range(depth)) for rest, layers in stacks.items()}
        if any(name in shapes for name in new):
            return None
        prefix = self.names.prefix
        if self.random.random() < 0.2 and self.is_uniform:
            pattern, into = rf"(.*/|){re.escape(tower)}layers_(?P<i>\d+)/(.*)", rf"\1{tower}layers/\3"
            if len(towers) > 1:
                return None
            everywhere = True
        else:
            pattern, into = rf"{self._full(tower)}layers_(\d+)/(.*)", rf"{prefix}{tower}layers/\2"
            everywhere = False
        gone = {name for sources in new.values() for name in sources}

        def stack(arrays: list[np.ndarray], fill: float) -> np.ndarray:
            return np.stack(arrays, axis)

        def moves(arrays: Mapping[str, Any]) -> Moves:
            kept: Moves = {name: (same, (name,)) for name in arrays if name not in gone}
            return kept | {name: (stack, sources) for name, sources in new.items()}

        return Rule(T.StackLayers(pattern, into, axis), moves, matches_all=everywhere)

    def _unstack(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        towers = sorted({f"{name.partition('layers/')[0]}layers/" for name in shapes if "layers/" in name})
        if not towers:
            return None
        tower = self._pick(towers)
        stacked = [name for name in shapes if name.startswith(tower)]
        axis = int(self.random.integers(2))
        if any(len(shapes[name]) <= axis for name in stacked):
            axis = 0
        depths = {shapes[name][axis] for name in stacked}
        if len(depths) > 1:
            return None
        (depth,) = depths
        base = tower.removesuffix("/")
        new = {f"{base}_{i}/{name.removeprefix(tower)}": (name, i) for name in stacked for i in range(depth)}
        if any(name in shapes for name in new):
            return None

        def layer(number: int) -> Callable[..., np.ndarray]:
            return lambda arrays, fill: np.take(arrays[0], number, axis)

        def moves(arrays: Mapping[str, Any]) -> Moves:
            kept: Moves = {name: (same, (name,)) for name in arrays if name not in stacked}
            return kept | {name: (layer(number), (source,)) for name, (source, number) in new.items()}

        transform = T.UnstackLayers(f"{self._full(tower)}(.*)", rf"{self.names.prefix}{base}_{{i}}/\1", axis)
        return Rule(transform, moves)

    def _split(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        candidates = [
            (name, axis)
            for name, shape in shapes.items()
            for axis, size in enumerate(shape)
            if size >= 4 and "batch_norm" not in name
        ]
        if not candidates:
            return None
        name, axis = self._pick(candidates)
        size = shapes[name][axis]
        sizes = (2, size - 2) if size % 2 or self.random.random() < 0.3 else None
        parent, slash, last = name.rpartition("/")
        new = [f"{parent}{slash}{last}_{part}" for part in ("one", "two")]
        if any(part in shapes for part in new):
            return None
        cut = 2 if sizes else size // 2
        pattern, suffix = self._pattern(name)

        def part(index: int) -> Callable[..., np.ndarray]:
            return lambda arrays, fill: np.split(arrays[0], [cut], axis)[index]

        def moves(arrays: Mapping[str, Any]) -> Moves:
            kept: Moves = {other: (same, (other,)) for other in arrays if other != name}
            return kept | {target: (part(index), (name,)) for index, target in enumerate(new)}

        into = [self.names.prefix + target + suffix for target in new]
        return Rule(T.Split(pattern, into, axis, sizes), moves)

    def _concat(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        names = sorted(name for name in shapes if "batch_norm" not in name)
        candidates = [
            (one, two, axis)
            for one in names
            for two in names
            for axis in range(len(shapes[one]))
            if one != two
            and len(shapes[one]) == len(shapes[two])
            and np.delete(shapes[one], axis).tolist() == np.delete(shapes[two], axis).tolist()
        ]
        if not candidates:
            return None
        one, two, axis = self._pick(candidates)
        parent, slash, last = one.rpartition("/")
        new = f"{parent}{slash}{last}_both"
        if new in shapes:
            return None
        (first, suffix), (second, _) = self._pattern(one), self._pattern(two)

        def join(arrays: list[np.ndarray], fill: float) -> np.ndarray:
            return np.concatenate(arrays, axis)

        def moves(arrays: Mapping[str, Any]) -> Moves:
            kept: Moves = {name: (same, (name,)) for name in arrays if name not in (one, two)}
            return kept | {new: (join, (one, two))}

        return Rule(T.Concat([first, second], self.names.prefix + new + suffix, axis), moves)

    def _transpose(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        matrices = [name for name, shape in shapes.items() if len(shape) > 1]
        if not matrices:
            return None
        name = self._pick(matrices)
        rank = len(shapes[name])
        axes = tuple(int(axis) for axis in self.random.permutation(rank)) if rank > 2 else None
        chosen = [name]
        pattern, _ = self._pattern(name)
        last = name.rsplit("/", 1)[-1]
        alike = [other for other in shapes if other.rsplit("/", 1)[-1] == last]
        if all(len(shapes[other]) == rank for other in alike) and self.random.random() < 0.4 and "/" in name:
            chosen = [other for other in alike if "/" in other]
            pattern = rf"{re.escape(self.names.prefix)}.*/{last}{'(?:/value)?' if self.names.suffix else ''}"
            if not self.names.prefix:
                return None
            if self.names.inner:
                chosen = alike

        def turn(arrays: list[np.ndarray], fill: float) -> np.ndarray:
            return np.transpose(arrays[0], axes)

        def moves(arrays: Mapping[str, Any]) -> Moves:
            return {other: (turn if other in chosen else same, (other,)) for other in arrays}

        return Rule(T.Transpose(pattern, axes), moves)

    def _pad(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        name = self._pick(shapes)
        if "batch_norm" in name or not shapes[name]:
            return None
        axis = int(self.random.integers(len(shapes[name])))
        shape = list(shapes[name])
        shape[axis] += int(self.random.integers(1, 3))
        value = float(self._pick([0, 0, 7]))
        growth = [(0, new - old) for old, new in zip(shapes[name], shape, strict=True)]

        def grow(arrays: list[np.ndarray], fill: float) -> np.ndarray:
            return np.pad(arrays[0], growth, constant_values=fill)

        def moves(arrays: Mapping[str, Any]) -> Moves:
            return {other: (grow if other == name else same, (other,)) for other in arrays}

        pattern, _ = self._pattern(name)
        return Rule(T.Pad(pattern, shape, value), moves, fill=value)

    def _drop(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        modules = [module for module in self._modules(shapes, with_layers=True) if "layers" not in module]
        modules = [module for module in modules if not any(_is_inside(other, module) for other in others)]
        modules = [module for module in modules if not all(_is_inside(name, module) for name in shapes)]
        if not modules:
            return None
        module = self._pick(modules)
        patterns = [f"{self._full(module)}/.*"]
        patterns += [f"{re.escape(prefix)}{re.escape(module)}/.*" for prefix in self.names.copies]

        def moves(arrays: Mapping[str, Any]) -> Moves:
            return {name: (same, (name,)) for name in arrays if not _is_inside(name, module)}

        return Rule(T.Drop(patterns), moves, lambda name: None if _is_inside(name, module) else name, drops=True)

    def _named_moments(self, shapes: dict[str, Any], others: list[str]) -> Rule | None:
        """A rename that names the parameters and the moments of one kind; the others follow."""
        pairs = [
            (module, kind)
            for module in self._modules(shapes)
            for kind, owners in sorted(self.kinds.items())
            if any(_is_inside(name, module) for name in owners) and not any(kind in name.split("/") for name in shapes)
        ]
        if not pairs:
            return None
        module, kind = self._pick(pairs)
        parent, slash, last = module.rpartition("/")
        new = f"{parent}{slash}{self._new_word(last, _children(shapes, parent))}"
        rules = [
            (f"{self._full(module)}/(.*)", rf"{self.names.prefix}{new}/\1"),
            (rf"({re.escape(self.names.optimizer)}(?:.*/|)){kind}/{re.escape(module)}/(.*)", rf"\1{kind}/{new}/\2"),
        ]
        return self._renaming(T.Rename(rules), {module: new}, names_moments=True)


def _has_follow(transform: Any) -> bool:
    return any(field.name == "follow" for field in dataclasses.fields(transform))


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}/")


def _children(shapes: Mapping[str, Any], parent: str) -> set[str]:
    start = f"{parent}/" if parent else ""
    return {name[len(start) :].split("/")[0] for name in shapes if name.startswith(start)}


def new_root(layout_root: str, prefix: str, new: str) -> Rule:
    """Returns the rule that gives the parameters' root another key."""
    transform = T.Rename([(f"{layout_root}/(.*)", rf"{new}/\1")])
    return Rule(transform, lambda arrays: {name: (same, (name,)) for name in arrays}, root=new)
