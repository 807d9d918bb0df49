"""Writes moves of leaves as transforms, and tests these on the leaves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.rules.alignment.moves import Move
from orbax_t5x.rules.alignment.renaming import rename_rules
from orbax_t5x.transforms import Reshape, StackLayers, Transform, Transpose, UnstackLayers

_NUMBER = re.compile(r"\d+")
_BETWEEN = "/_.-"


class _Layers(NamedTuple):
    """Names of a leaf in all layers, split at the number."""

    before: str
    numbers: tuple[str, ...]
    after: str

    @property
    def stem(self) -> str:
        """The name of all layers."""
        stem = self.before.rstrip(_BETWEEN)
        return self.before + "layers" if not stem or (self.before[-1] in "/." and not self._is_word(stem)) else stem

    @staticmethod
    def _is_word(stem: str) -> bool:
        """Tests whether the last part is a word for layers."""
        return re.search(r"(?:^|[/.])(?:layers?|blocks?|h)$", stem) is not None

    @property
    def step(self) -> int:
        """The number of layers in a block; 1 without blocks."""
        first, *others = map(int, self.numbers)
        return others[0] - first if others and first < others[0] - first else 1

    @property
    def in_block(self) -> str:
        """The temporary name of a leaf in all blocks."""
        return f"{self.before}block_{int(self.numbers[0])}{self.after}"

    @property
    def joined(self) -> str:
        """The temporary name of the stacked leaf."""
        return self.stem + self.after

    def name(self, number: int) -> str:
        """Returns the name of a layer's leaf, counted from 0."""
        return f"{self.before}{number}{self.after}"

    @property
    def format(self) -> str | None:
        """The field for numbers in `UnstackLayers`, or None."""
        width = len(self.numbers[0])
        for field in ("i", f"i:0{width}d"):
            if all(text == f"{{{field}}}".format(i=at) for at, text in enumerate(self.numbers)):
                return f"{{{field}}}"
        return None


def _split_at_layer(names: Sequence[str]) -> _Layers:
    """Splits a leaf's names at the layer's number."""
    found = [list(_NUMBER.finditer(name)) for name in names]
    at = next((at for at, numbers in enumerate(zip(*found, strict=False)) if len({n[0] for n in numbers}) > 1), 0)
    match = found[0][at]
    return _Layers(names[0][: match.start()], tuple([numbers[at][0] for numbers in found]), names[0][match.end() :])


def moves_as_transforms(
    moves: Iterable[Move], names: Collection[str], target_names: Collection[str]
) -> list[Transform]:
    """Returns transforms that make moves.

    Args:
      moves: each once.
      names: all names that the transforms see; those without a move stay.
      target_names: all names of the result that matter.
    """
    moves = list(moves)
    moved = {name for move in moves for name in move.sources}
    others = [name for name in names if name not in moved]
    stacked = {name for move in moves if move.stacks for name in move.sources}
    single = [name for name in names if name not in stacked]
    steps = _in_place(moves, names, is_first=True)
    renames: dict[str, str] = {}
    numbered: dict[str, str] = {}
    stacks: dict[tuple[int, str, bool], dict[str, list[_Layers]]] = {}
    splits: dict[tuple[int, str, str, bool], dict[str, list[_Layers]]] = {}
    renumbered: dict[str, str] = {}
    blocks: dict[tuple[int, bool, int, str], list[_Layers]] = {}
    for move in moves:
        if move.axis is None:
            renames[move.sources[0]] = move.targets[0]
        elif (layers := _split_at_layer(move.sources if move.stacks else move.targets)).step > 1:
            renames[layers.in_block if move.stacks else move.sources[0]] = (
                move.targets[0] if move.stacks else layers.in_block
            )
            blocks.setdefault((move.axis, move.stacks, layers.step, layers.before), []).append(layers)
        elif move.stacks:
            renames[layers.joined] = move.targets[0]
            numbered.update((name, layers.name(at)) for at, name in enumerate(move.sources))
            key = (
                move.axis,
                layers.before[len(layers.before.rstrip(_BETWEEN)) :],
                layers.stem == layers.before + "layers",
            )
            stacks.setdefault(key, {}).setdefault(layers.stem, []).append(layers)
        else:
            renames[move.sources[0]] = layers.joined
            field = layers.format
            renumbered.update((layers.name(at), name) for at, name in enumerate(move.targets) if field is None)
            between = layers.before[len(layers.before.rstrip(_BETWEEN)) :]
            split = move.axis, between, field or "{i}", layers.stem == layers.before + "layers"
            splits.setdefault(split, {}).setdefault(layers.stem, []).append(layers)
    if any(
        text != f"{at}"
        for of in stacks.values()
        for all_ in of.values()
        for one in all_
        for at, text in enumerate(map(int_text, one.numbers))
    ):
        steps += rename_rules(numbered, single)
    for (axis, between, is_named), every_tower in stacks.items():
        added = "layers" if is_named else ""
        for towers in _separable(every_tower, single, added):
            befores = _alternatives(one.removesuffix(added) for one in towers)
            steps.append(
                StackLayers(
                    f"({befores}){'' if is_named else re.escape(between)}(?P<i>\\d+){_rest(towers, single, added)}",
                    rf"\g<1>{added}\g<3>",
                    axis,
                )
            )
    steps += _block_steps(blocks, stacks=True)
    steps += rename_rules(renames, others)
    steps += _block_steps(blocks, stacks=False)
    for (axis, between, field, is_named), every_tower in splits.items():
        known = {name for name in (*others, *renames.values())}
        known -= {one.joined for all_ in every_tower.values() for one in all_}
        for towers in _separable(every_tower, known):
            befores = _alternatives(one.removesuffix("layers") if is_named else one for one in towers)
            pattern = f"({befores}){'layers' if is_named else ''}{_rest(towers, known)}"
            steps.append(UnstackLayers(pattern, rf"\g<1>{'' if is_named else between}{field}\g<2>", axis))
    if renumbered:
        every = {name for move in moves for name in move.targets}
        steps += rename_rules(renumbered, [*others, *(every - set(renumbered.values()))])
    return steps + _in_place(moves, target_names, is_first=False)


def _in_place(moves: Sequence[Move], names: Collection[str], *, is_first: bool) -> list[Transform]:
    """Returns the transposes and reshapes of moves.

    They go by the source's names, or by the target's if layers are unstacked.
    """
    is_late = any((move.axes or move.shapes) and move.axis is not None and not move.stacks for move in moves)
    those = [move for move in moves if (move.stacks or (move.axis is None and not is_late)) == is_first]
    split: dict[tuple[int, ...], list[str]] = {}
    turned: dict[tuple[int, ...] | None, list[str]] = {}
    joined: dict[tuple[int, ...], list[str]] = {}
    for move in those:
        its = move.sources if is_first else move.targets
        if move.atoms and move.atoms != move.shapes[0]:
            split.setdefault(move.atoms, []).extend(its)
        if move.axes:
            turned.setdefault(None if move.axes == (1, 0) else move.axes, []).extend(its)
        if move.shapes and tuple(move.atoms[at] for at in move.axes if move.atoms) != move.shapes[1]:
            joined.setdefault(move.shapes[1], []).extend(its)
    return [
        *(Reshape(_pattern(some, names), shape) for shape, some in split.items()),
        *(Transpose(_pattern(some, names), axes) for axes, some in turned.items()),
        *(Reshape(_pattern(some, names), shape) for shape, some in joined.items()),
    ]


def _block_steps(
    blocks: Mapping[tuple[int, bool, int, str], Sequence[_Layers]], *, stacks: bool
) -> Iterator[Transform]:
    for (axis, is_stack, step, before), found in blocks.items():
        afters = f"({_alternatives({one.after for one in found})})"
        if is_stack and stacks:
            numbers = sorted({int(number) for one in found for number in one.numbers})
            pattern = f"({re.escape(before)})(?P<i>{'|'.join(map(str, numbers))}){afters}"
            yield StackLayers(pattern, rf"\g<1>block_{{i%{step}}}\g<3>", axis)
        elif not is_stack and not stacks:
            pattern = rf"({re.escape(before)})block_(\d+){afters}"
            yield UnstackLayers(pattern, rf"\g<1>{{i*{step}+\g<2>}}\g<3>", axis)


def int_text(number: str) -> str:
    """Returns a number without leading zeros."""
    return str(int(number))


def _alternatives(texts: Iterable[str]) -> str:
    return "|".join(sorted(re.escape(text) for text in texts))


def _separable(
    towers: Mapping[str, list[_Layers]], others: Collection[str], added: str = ""
) -> list[dict[str, list[_Layers]]]:
    """Returns all towers together, or each tower.

    Names lack the `added` end of stems.
    """
    ends = {frozenset(one.after for one in all_) for all_ in towers.values()}
    stems = tuple(stem.removesuffix(added) for stem in towers)
    if len(ends) == 1 or not any(name.startswith(stems) for name in others):
        return [dict(towers)]
    return [{stem: all_} for stem, all_ in towers.items()]


def _rest(towers: Mapping[str, Sequence[_Layers]], others: Collection[str], added: str = "") -> str:
    """Returns the pattern for the rest of a layer's name."""
    stems = tuple(stem.removesuffix(added) for stem in towers)
    if not any(name.startswith(stems) for name in others):
        return "(.*)"
    return f"({_alternatives({one.after for all_ in towers.values() for one in all_})})"


def _pattern(names: Sequence[str], every: Collection[str]) -> str:
    others = set(every).difference(names)
    for depth in (1, 2, 3):
        ends = {"".join(re.split(r"([/.])", name)[-2 * depth :]) for name in names}
        found = sorted({_NUMBER.sub(r"\\d+", re.escape(end)) for end in ends})
        pattern = f".*(?:{'|'.join(found)})" if len(found) > 1 else f".*{found[0]}"
        if not any(re.fullmatch(pattern, name) for name in others):
            return pattern
    pattern = "|".join(sorted({_NUMBER.sub(r"\\d+", re.escape(name)) for name in names}))
    # Layers of one name may differ.
    return _alternatives(names) if any(re.fullmatch(pattern, name) for name in others) else pattern
