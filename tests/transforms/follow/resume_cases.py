"""Resuming into a changed model and optimizer: random cases against NumPy's truth.

`python -m tests.transforms.follow.resume_cases --cases 5000 --seed 1` prints a table; `--only 17` runs the 17th case of
that seed alone and prints all of it. Exit code 1: a case was wrong silently, or raised something else than a
RestorePlanError.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from tests.transforms.follow import resume_optimizers as optimizers
from tests.transforms.follow import resume_rules as rules
from tests.transforms.follow.resume_layouts import LAYOUTS, Layout, abstract, leaves_by_name, with_leaves
from tests.transforms.follow.resume_truth import (
    WHOLE,
    Expected,
    Optimizer,
    Path,
    Slot,
    Tree,
    integers,
    moved,
    nested,
    new_number,
    new_optimizer,
    optimizer_slots,
    with_views,
)

Shape = tuple[int, ...]

# "named new": restored, with leaves from the fallback that the checkpoint has; "approximate": the plan says that a
# factored slot is so, and it is; "unknowable": the only difference between two like states was damaged.
OUTCOMES = ("right", "named new", "approximate", "unknowable", "refused", "refused needlessly", "wrong", "raised")


@dataclasses.dataclass
class Tower:
    """Parameters of one model with their optimizer, as the rules leave them.

    Attributes:
      prefix: Prefix of the parameters.
      optimizer_prefix: Prefix of the optimizer's state.
      parameters: Arrays by names below the prefix.
      origins: Which of the checkpoint's parameters each is made of.
      others: Leaves below the prefix that are no parameters: new name -> old name.
      optimizer: The optimizer.
      old: Names of the parameters in the checkpoint.
    """

    prefix: str
    optimizer_prefix: str
    parameters: Tree
    origins: dict[str, frozenset[str]]
    others: dict[str, str]
    optimizer: Optimizer
    old: list[str]


@dataclasses.dataclass
class Outcome:
    """How a case ended.

    Attributes:
      kind: One of OUTCOMES.
      case: What the case is, in words.
      details: What was wrong, or which problems were named.
    """

    kind: str
    case: dict[str, Any]
    details: list[str]


@dataclasses.dataclass
class Case:
    """One random case, from the drawing to the comparison."""

    random: np.random.Generator
    directory: File
    is_shown: bool = False
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def pick(self, values: Any) -> Any:
        values = list(values)
        return values[self.random.integers(len(values))]

    def run(self) -> Outcome:
        self._draw_state()
        self._draw_rules()
        self._draw_optimizers()
        self._damage()
        path = self._save()
        has_target = self.random.random() < 0.85
        self.facts["target"] = has_target
        return self._restore_target(path) if has_target else self._restore_all(path)

    # The state before.

    def _draw_state(self) -> None:
        self.layout: Layout = LAYOUTS[self.pick(LAYOUTS)]
        self.facts["layout"] = self.layout.name
        shapes = self._model()
        count = len(self.layout.towers)
        names = self._usual_optimizers()
        if self.layout.is_t5x and self.random.random() < 0.4:
            names = list(optimizers.T5X_OPTIMIZERS)
        self.names_of_optimizers = [self.pick(names) for _ in range(count)]
        # Changes that take a wrapper off begin with it.
        self.change = self._draw_change()
        self.facts["optimizer"], self.facts["change"] = self.names_of_optimizers, self.change
        built = [self._before(name, shapes) for name in self.names_of_optimizers]
        towers = [abstract(shapes) for _ in range(count)]
        self.tree = self.layout.make(towers, built, [abstract(shapes) for _ in self.layout.copies])
        self.leaves = leaves_by_name(self.tree)
        has_equal_counts = self.random.random() < 0.2
        self.towers = []
        for (prefix, optimizer_prefix), optimizer in zip(self.layout.towers, built, strict=True):
            slots = self._slots(optimizer, shapes)
            assert all(optimizer_prefix + name in self.leaves for name in slots), "a slot's name"
            outside = tuple(place for pair in self.layout.towers for place in pair if place != prefix)
            others = [
                name.removeprefix(prefix)
                for name in self.leaves
                if prefix and name.startswith(prefix) and not name.startswith(tuple(filter(None, outside)))
            ]
            self.towers.append(
                Tower(
                    prefix,
                    optimizer_prefix,
                    {name: integers(self.random, shape) for name, shape in shapes.items()},
                    {name: frozenset({name}) for name in shapes},
                    {name: name for name in others if name not in shapes},
                    new_optimizer(slots, shapes, self.random, has_equal_counts),
                    list(shapes),
                )
            )
        self.copies = [
            {name: integers(self.random, shape) for name, shape in shapes.items()} for _ in self.layout.copies
        ]
        self.values = self._values()
        self.saved = {name + self.layout.suffix: value for name, value in self.values.items()}

    def _model(self) -> dict[str, Shape]:
        sizes = [int(size) for size in self.random.integers(2, 6, 3)]
        wide, inner, words = (sizes[0], sizes[1], sizes[2] + 2)
        depth = 2
        kind = self.pick(["unrolled", "unrolled", "scanned", "two towers", "equal", "odd names", "one", "flat"])
        shapes: dict[str, Shape] = {}
        layer = {"attn/q/kernel": (wide, wide), "attn/k/kernel": (wide, wide), "mlp/kernel": (wide, inner)}
        if self.random.random() < 0.5:
            layer |= {"mlp/bias": (inner,), "norm/scale": (wide,)}
        if kind in ("unrolled", "two towers"):
            for tower in ("",) if kind == "unrolled" else ("encoder/", "decoder/"):
                for number in range(depth):
                    shapes |= {f"{tower}layers_{number}/{name}": shape for name, shape in layer.items()}
            shapes |= {"embed/table": (words, wide), "head/kernel": (wide, words), "head/bias": (words,)}
        elif kind == "scanned":
            axis = 0 if self.layout.is_t5x else int(self.random.integers(2))
            for name, shape in layer.items():
                shapes[f"layers/{name}"] = (*shape[:axis], depth, *shape[axis:])
            shapes |= {"embed/table": (words, wide), "attn/out/kernel": (wide, wide)}
        elif kind == "equal":
            shapes = {f"{name}/kernel": (wide, wide) for name in ("query", "key", "attn", "mlp")}
        elif kind == "odd names":
            shapes = {"mu/kernel": (wide, wide), "nu/kernel": (wide, wide), "count/bias": (wide,)}
            shapes |= {"opt/kernel": (wide, inner), "trace/kernel": (inner, wide), "ema/scale": (wide,)}
        elif kind == "one":
            shapes = {"dense/kernel": (wide, inner)}
        else:
            shapes = {"w": (wide, inner), "b": (inner,), "mlp/w": (inner, inner), "mlp/b": (inner,)}
        if self.layout.is_nnx:
            shapes = {name: shape for name, shape in shapes.items() if name.split("/")[0] not in ("count", "ema")}
            if self.random.random() < 0.3:
                shapes |= {"batch_norm/scale": (wide,), "batch_norm/bias": (wide,)}
        self.facts["model"] = kind
        return {self.layout.inner + name: shape for name, shape in shapes.items()}

    def _slots(self, optimizer: Any, shapes: Mapping[str, Shape]) -> dict[str, Slot]:
        if not self._is_t5x_adafactor():
            return optimizer_slots(optimizer, abstract(shapes))
        state = leaves_by_name(self.layout.make([abstract(shapes)], [optimizer], []))
        slots = {}
        for name, leaf in state.items():
            if name.startswith(self.layout.towers[0][1]):
                below = name.removeprefix(self.layout.towers[0][1])
                parameter, _, kind = below.rpartition("/")
                slots[below] = Slot((), kind, parameter, tuple(leaf.shape), leaf.dtype)
        return with_views(slots, shapes, optimizers.t5x_dims)

    def _usual_optimizers(self) -> list[str]:
        # NNX keeps SM3's lists inside one variable.
        return [name for name in optimizers.OPTIMIZERS if name != "sm3" or not self.layout.is_nnx]

    def _is_t5x_adafactor(self) -> bool:
        return self.names_of_optimizers[0].startswith("t5x_")

    def _values(self) -> dict[str, Any]:
        values = {}
        for tower in self.towers:
            values |= {tower.prefix + name: array for name, array in tower.parameters.items()}
            values |= {tower.optimizer_prefix + name: tower.optimizer.value(name) for name in tower.optimizer.slots}
        for copy, tree in zip(self.layout.copies, self.copies, strict=True):
            values |= {copy.prefix + name: array for name, array in tree.items()}
        for name, leaf in self.leaves.items():
            if name not in values:
                values[name] = new_number(Slot((), "", None, tuple(leaf.shape), leaf.dtype), self.random, None)
        assert sorted(values) == sorted(self.leaves)
        return values

    # What changes.

    def _draw_rules(self) -> None:
        chance = self.random.random()
        wanted = 0 if chance < 0.1 else int(self.random.integers(1, 5))
        main = self.towers[0]
        outside = frozenset(part for name in self.leaves for part in self._front(name))
        names = rules.Names(
            main.prefix,
            self.layout.inner,
            self.layout.suffix,
            self.layout.is_nnx,
            outside,
            main.optimizer_prefix,
            tuple(copy.prefix for copy in self.layout.copies if copy.follows),
        )
        drawer = rules.Drawer(self.random, names)
        self.rules: list[rules.Rule] = []
        self.root = self.layout.root
        for number in range(wanted):
            shapes = {name: array.shape for name, array in main.parameters.items()}
            every = [tower.parameters for tower in self.towers] + self.copies
            drawer.is_uniform = all({name: array.shape for name, array in tree.items()} == shapes for tree in every)
            drawer.kinds = self._kinds(main)
            for _ in range(8):
                rule = drawer.draw(shapes, list(main.others), number == wanted - 1)
                if rule is not None and _leaves_modules(rule, main) and self._has_layers_first(rule, main):
                    self.rules.append(rule)
                    self._apply(rule)
                    break
        if self.layout.root is not None and self.random.random() < 0.07:
            self.root = "network"
            self.rules.append(rules.new_root(self.layout.root, main.prefix, self.root))
            main.prefix = f"{self.root}/"
        self.facts["rules"] = [rule.transform for rule in self.rules]

    def _has_layers_first(self, rule: rules.Rule, tower: Tower) -> bool:
        """Returns True unless T5X's factor rules would take the layers for rows."""
        if not self._is_t5x_adafactor():
            return True
        axis = getattr(rule.transform, "axis", 0)
        ranks = [len(shape.shape) for shape in tower.parameters.values()]
        is_stack = isinstance(rule.transform, ot.transforms.StackLayers)
        turns = isinstance(rule.transform, ot.transforms.Transpose)
        return not ((is_stack and axis != 0) or (turns and max(ranks) > 2))

    def _kinds(self, tower: Tower) -> dict[str, set[str]]:
        """Returns the kinds of moments, in the checkpoint's names, with the parameters that have them now."""
        kinds: dict[str, set[str]] = {}
        for slot in tower.optimizer.slots.values():
            if slot.parameter is not None and not slot.index and not self._is_t5x_adafactor():
                tree = tower.optimizer.hidden[slot.node, slot.hidden]
                kinds.setdefault(slot.kind, set()).update(tree)
        return kinds

    def _front(self, name: str) -> Iterator[str]:
        """Yields the parts of a name that are no parameter's: a rule for all names must not match one by accident."""
        for tower in self.towers:
            if name.startswith(tower.optimizer_prefix):
                slot = tower.optimizer.slots[name.removeprefix(tower.optimizer_prefix)]
                yield from tower.optimizer_prefix.split("/")
                yield from (*slot.node, slot.kind)
                return
            if name.removeprefix(tower.prefix) in tower.others:
                yield from name.split("/")
        places = [tower.prefix for tower in self.towers] + [copy.prefix for copy in self.layout.copies]
        yield from (part for prefix in places if name.startswith(prefix) for part in prefix.split("/"))

    def _apply(self, rule: rules.Rule) -> None:
        for tower in self.towers if rule.matches_all else self.towers[:1]:
            moves = rule.moves(tower.parameters)
            tower.parameters = moved(tower.parameters, moves, rule.fill)
            tower.origins = {
                name: frozenset().union(*(tower.origins[source] for source in sources))
                for name, (_, sources) in moves.items()
            }
            if not rule.keeps_moments:
                tower.optimizer.apply(moves)
            renamed = ((rule.rename(name), old) for name, old in tower.others.items())
            tower.others = {name: old for name, old in renamed if name is not None}
        for index, copy in enumerate(self.layout.copies):
            if (copy.follows and not rule.keeps_moments) or rule.matches_all or (copy.follows and rule.drops):
                self.copies[index] = moved(self.copies[index], rule.moves(self.copies[index]), rule.fill)

    def _draw_change(self) -> str:
        if self._is_t5x_adafactor() or self.random.random() < 0.35:
            return "none"
        chance = self.random.random()
        if chance < 0.12:
            return "other"
        if chance < 0.22:
            return "amsgrad"
        if chance < 0.32:
            return "schedule"
        # Nobody puts a wrapper around itself.
        changes = [name for name in optimizers.CHANGES if not any(name in own for own in self.names_of_optimizers)]
        return self.pick(("", "without ")) + self.pick(changes)

    def _before(self, name: str, shapes: Mapping[str, Shape]) -> Any:
        optimizer = optimizers.make(name, shapes)
        return self._wrapped(optimizer) if self.change.startswith("without ") else optimizer

    def _wrapped(self, optimizer: Any) -> Any:
        return optimizers.CHANGES[self.change.removeprefix("without ")].wrap(optimizer)

    def _draw_optimizers(self) -> None:
        """Makes the new optimizers, and where in the old ones their nodes were."""
        self.new_optimizers = []
        self.is_free = False
        if self.change == "amsgrad":
            pairs = {"adam": "amsgrad", "amsgrad": "adam"}
            self.is_free = "amsgrad" in self.names_of_optimizers
            names = [pairs.get(name, name) for name in self.names_of_optimizers]
        elif self.change == "other":
            self.is_free = True
            names = [self.pick(self._usual_optimizers()) for _ in self.names_of_optimizers]
        else:
            names = self.names_of_optimizers
        self.facts["new optimizer"] = names
        for tower, name in zip(self.towers, names, strict=True):
            shapes = {path: array.shape for path, array in tower.parameters.items()}
            optimizer = optimizers.make(name, shapes, is_scheduled=self.change == "schedule")
            self.new_optimizers.append(self._wrapped(optimizer) if self.change in optimizers.CHANGES else optimizer)

    def _old_node(self, node: Path) -> Path | None:
        """Returns where a node of the new optimizer was in the old one."""
        name = self.change.removeprefix("without ")
        if name not in optimizers.CHANGES:
            return node
        at = optimizers.CHANGES[name].at
        if name != self.change:
            return at + node
        return node[len(at) :] if node[: len(at)] == at else None

    def _damage(self) -> None:
        self.missing: set[str] = set()
        self.extra: set[str] = set()
        self.has_lost_kind = False
        self.facts["damage"] = "none"
        if self.random.random() > 0.2:
            return
        tower = self.pick(self.towers)
        slots = tower.optimizer.slots
        moments = [name for name, slot in slots.items() if slot.parameter is not None]
        numbers = [name for name, slot in slots.items() if slot.parameter is None]
        kinds = ["moment", "kind", "half a kind", "count", "node", "scalars", "arrays"]
        # A rule for all names acts on a second copy, too.
        kinds += [] if any(rule.matches_all for rule in self.rules) else ["backup"]
        kind = self.pick(kinds)
        self.facts["damage"] = kind
        gone: list[str] = []
        if kind == "count" and numbers:
            gone = [self.pick(numbers)]
        elif kind == "moment" and moments:
            gone = [self.pick(moments)]
        elif kind in ("kind", "half a kind", "node") and moments:
            chosen = slots[self.pick(moments)]
            gone = [name for name, slot in slots.items() if slot.node == chosen.node]
            if kind != "node":
                gone = [name for name in gone if slots[name].kind == chosen.kind]
            if kind == "half a kind":
                gone = gone[::2]
        self.missing = {tower.optimizer_prefix + name for name in gone}
        for name in self.missing:
            del self.saved[name + self.layout.suffix]
        kept = {(slots[name].node, slots[name].kind) for name in slots.keys() - set(gone)}
        self.has_lost_kind = any((slots[name].node, slots[name].kind) not in kept for name in gone)
        if kind == "scalars":
            self._put({"scale": np.float32(5), tower.optimizer_prefix + "extra_count": np.int32(7)})
        elif kind == "arrays":
            shape = next(iter(tower.parameters.values())).shape
            self._put({"stats/mean": integers(self.random, shape), "stats/w": integers(self.random, (3, 3))})
        elif kind == "backup":
            self._put({f"backup/{name}": self._other(value) for name, value in self.values.items()})

    def _other(self, value: Any) -> Any:
        return value if _is_key(value) or value.dtype == bool else value + value.dtype.type(1)

    def _put(self, values: Mapping[str, Any]) -> None:
        self.extra |= set(values)
        self.saved |= {name + self.layout.suffix: value for name, value in values.items()}

    def _save(self) -> File:
        path = self.directory / "state"
        is_whole = not self.missing and not self.extra
        tree = with_leaves(self.tree, self.values) if is_whole else nested(self.saved)
        ocp.PyTreeCheckpointer().save(path, tree)
        return path

    # What comes back.

    def _expected(self, new: dict[str, Any]) -> dict[str, Expected]:
        """Returns what each leaf of the target may hold."""
        expected = {}
        for tower, optimizer in zip(self.towers, self.new_optimizers, strict=True):
            old_prefix = self.layout.towers[self.towers.index(tower)][0]
            for name, array in tower.parameters.items():
                needs = frozenset(old_prefix + origin for origin in tower.origins[name])
                expected[tower.prefix + name] = Expected([array], needs=needs)
            for name, old in tower.others.items():
                needs = frozenset({old_prefix + old})
                expected[tower.prefix + name] = Expected([self.values[old_prefix + old]], needs=needs)
            shapes = {name: array.shape for name, array in tower.parameters.items()}
            slots = self._slots(optimizer, shapes)
            for name, slot in slots.items():
                leaf = self._expected_slot(tower, slots, slot)
                leaf.group = (tower.prefix, slot.node, slot.hidden, slot.parameter)
                leaf.alike = self._alike(tower, slot)
                expected[tower.optimizer_prefix + name] = leaf
        for copy, tree in zip(self.layout.copies, self.copies, strict=True):
            origins = self.towers[copy.tower].origins
            for name, array in tree.items():
                needs = frozenset(copy.prefix + origin for origin in origins.get(name, {name}))
                expected[copy.prefix + name] = Expected([array], needs=needs)
        for name in new:
            if name not in expected:
                expected[name] = Expected([self.values[name]], needs=frozenset({name}))
        assert expected.keys() == new.keys(), expected.keys() ^ new.keys()
        return expected

    def _expected_slot(self, tower: Tower, slots: dict[str, Slot], slot: Slot) -> Expected:
        optimizer = tower.optimizer
        if self.is_free:
            return self._expected_of_another(tower, slots, slot)
        node = self._old_node(slot.node)
        if node is None:
            return Expected([], is_moment=slot.parameter is not None)
        if slot.parameter is None:
            return self._expected_number(tower, slots, slot, node)
        for place in (node, *self._siblings(optimizer, node)):
            tree = optimizer.hidden.get((place, slot.hidden), {})
            if slot.parameter not in tree:
                continue
            needs = self._names(tower, place, slot)
            if not needs or not needs <= self.leaves.keys():
                break
            if slot.is_odd and tree[slot.parameter].shape != slot.shape:
                break
            if not slot.has_shape_of(tree[slot.parameter], tower.parameters[slot.parameter]):
                # The rule left the moments as they were: those of the same shape may be taken.
                values = [value for value in [self._old_value(tower, place, slot)] if value is not None]
                return Expected(values, True, needs, is_moment=True)
            value = slot.view(tree[slot.parameter])
            may_be_new = bool(needs & self.missing) or place != node or not value.any() or slot.is_odd
            if slot.hidden == WHOLE or slot.shape != tree[slot.parameter].shape:
                may_be_new = may_be_new or self._has_other_elements(tower, slot.parameter)
            return Expected([value], may_be_new, needs, is_moment=True)
        if slot.is_odd and self._is_as_it_was(tower, slot.parameter):
            value = self._old_value(tower, node, slot)
            return Expected([] if value is None else [value], True, is_moment=True)
        return Expected([], is_moment=True)

    def _is_as_it_was(self, tower: Tower, parameter: str) -> bool:
        """Returns True if the rules cancelled each other."""
        old_prefix = self.layout.towers[self.towers.index(tower)][0]
        old = [self.values[old_prefix + name] for name in tower.origins[parameter]]
        return any(_is_equal(value, tower.parameters[parameter]) for value in old)

    def _old_value(self, tower: Tower, node: Path, slot: Slot) -> np.ndarray | None:
        """Returns the value of the slot of this kind and parameter in the checkpoint, if it has this one's shape."""
        names = _names_by_place(tower.optimizer.slots)
        for origin in tower.origins[slot.parameter]:
            value = self.values.get(f"{tower.optimizer_prefix}{names.get((node, slot.kind, origin))}")
            if value is not None and value.shape == slot.shape:
                return value
        return None

    def _has_other_elements(self, tower: Tower, parameter: str) -> bool:
        """Returns True if no means of the old parameter need to give the means of this one."""
        origins = tower.origins[parameter]
        old_prefix = self.layout.towers[self.towers.index(tower)][0]
        return sum(self.values[old_prefix + name].size for name in origins) != tower.parameters[parameter].size or (
            len(origins) > 1
        )

    def _names(self, tower: Tower, node: Path, slot: Slot) -> frozenset[str]:
        """Returns the checkpoint's leaves that a slot may be made of."""
        kinds = {
            other.kind for other in tower.optimizer.slots.values() if other.node == node and other.hidden == slot.hidden
        }
        origins = tower.origins.get(slot.parameter or "", frozenset())
        names = _names_by_place(tower.optimizer.slots)
        return frozenset(tower.optimizer_prefix + names[node, kind, origin] for kind in kinds for origin in origins)

    def _siblings(self, optimizer: Optimizer, node: Path) -> list[Path]:
        """Returns the same node under other labels."""
        if "inner_states" not in node:
            return []
        at = node.index("inner_states") + 1
        nodes = {other for other, _ in optimizer.hidden} | {other for other, _ in optimizer.numbers}
        return sorted(
            other
            for other in nodes
            if len(other) == len(node)
            and other != node
            and other[:at] == node[:at]
            and other[at + 1 :] == node[at + 1 :]
        )

    def _expected_number(self, tower: Tower, slots: dict[str, Slot], slot: Slot, node: Path) -> Expected:
        optimizer = tower.optimizer
        if (node, slot.kind) not in optimizer.numbers:
            return Expected([])
        name = tower.optimizer_prefix + "/".join((*node, slot.kind))
        value = optimizer.numbers[node, slot.kind]
        is_lost = name in self.missing
        if not self._siblings(optimizer, node):
            return Expected([value], is_lost, frozenset({name}))
        # Moments may come from another label, and their count with them.
        wanted: dict[str, set[str]] = {}
        for other in slots.values():
            if other.node == slot.node and other.parameter is not None:
                wanted.setdefault(other.parameter, set()).add(other.hidden)
        counts = []
        for below, other in slots.items():
            if other.node != slot.node or other.parameter is None:
                continue
            for place in (node, *self._siblings(optimizer, node)):
                trees = {own for (at, own), tree in optimizer.hidden.items() if at == place and other.parameter in tree}
                # A node with other kinds of moments is none of its moments' nodes.
                if (trees == wanted[other.parameter] or (place == node and trees)) and (
                    (place, slot.kind) in optimizer.numbers
                ):
                    counts.append((tower.optimizer_prefix + below, optimizer.numbers[place, slot.kind]))
                    break
        may_be_new = is_lost or not counts or any(not _is_equal(count, value) for _, count in counts)
        return Expected([value], may_be_new, frozenset({name}), counts=counts)

    def _expected_of_another(self, tower: Tower, slots: dict[str, Slot], slot: Slot) -> Expected:
        """Another optimizer: what is of the same kind may be taken, and may be new."""
        values = self._alike(tower, slot)
        return Expected(values, True, is_moment=slot.parameter is not None)

    def _alike(self, tower: Tower, slot: Slot) -> list[Any]:
        """Returns the values of all leaves of this kind and parameter."""
        optimizer = tower.optimizer
        if slot.parameter is None:
            return [value for (_, kind), value in optimizer.numbers.items() if kind == slot.kind]
        trees = (tree for (_, hidden), tree in optimizer.hidden.items() if hidden == slot.hidden)
        arrays = [tree[slot.parameter] for tree in trees if slot.parameter in tree]
        parameter = tower.parameters[slot.parameter]
        arrays = [array for array in arrays if slot.has_shape_of(array, parameter)]
        return [slot.view(array) for array in arrays if slot.shape in ((), array.shape) or slot.hidden == WHOLE]

    def _new_tree(self) -> Any:
        towers = [abstract({name: array.shape for name, array in tower.parameters.items()}) for tower in self.towers]
        copies = [abstract({name: array.shape for name, array in tree.items()}) for tree in self.copies]
        layout = self.layout
        if self.root != layout.root:
            tree = layout.make(towers, self.new_optimizers, copies)
            tree[self.root] = tree.pop(layout.root)
            return tree
        return layout.make(towers, self.new_optimizers, copies)

    def _restore_target(self, path: File) -> Outcome:
        new_tree = self._new_tree()
        new = leaves_by_name(new_tree)
        expected = self._expected(new)
        target = with_leaves(new_tree, {name: _blank(leaf) for name, leaf in new.items()})
        truly_new = sorted(name for name, leaf in expected.items() if not leaf.values)
        needs = frozenset().union(*(leaf.needs for leaf in expected.values()))
        left = (self.leaves.keys() - self.missing - needs) | self.extra
        # Most refusals that cannot be otherwise are not drawn.
        options: dict[str, Any] = {"strict": bool(self.random.random() < (0.1 if left else 0.8))}
        fallback = {}
        how = self.pick(["none", "all", "named", "named", "named"])
        if how == "none" and truly_new and self.random.random() < 0.7:
            how = "named"
        if how != "none":
            fallback = {name: _fallback(leaf, number) for number, (name, leaf) in enumerate(new.items())}
            options["fallback"] = with_leaves(new_tree, fallback)
        if how == "named":
            fillable = [name for name, leaf in expected.items() if not leaf.values or leaf.may_be_new]
            options["fallback_for"] = [re.escape(name) for name in fillable]
        self.facts |= {"strict": options["strict"], "fallback": how, "new": truly_new}
        may_be_new = any(leaf.may_be_new or not leaf.values for leaf in expected.values())
        # A slot that cannot follow is a question also where a fallback may fill it.
        cannot_follow = any(leaf.may_be_new and leaf.is_moment for leaf in expected.values())
        is_refusable = (how == "none" and may_be_new) or bool(options["strict"] and left) or cannot_follow
        try:
            plan = ot.plan_restore(path, target, [rule.transform for rule in self.rules], **options)
            state = plan.execute()
        except ot.RestorePlanError as error:
            return self._refused(error, is_refusable)
        except ot.errors.LeafMismatchError as error:
            # Several counts become one, which is right if they are equal: that is seen when they are read.
            if "must equal" not in str(error):
                raise
            return Outcome("refused", self.facts, ["counts differ"])
        if jax.tree.structure(state) != jax.tree.structure(target):
            return Outcome("wrong", self.facts, ["another structure"])
        return self._compared(plan, leaves_by_name(state), expected, fallback)

    def _refused(self, error: ot.RestorePlanError, is_refusable: bool) -> Outcome:
        kinds = collections.Counter(problem.kind for problem in error.problems)
        self.facts["text"] = str(error)
        return Outcome("refused" if is_refusable else "refused needlessly", self.facts, [" ".join(sorted(kinds))])

    def _compared(
        self, plan: Any, state: dict[str, Any], expected: dict[str, Expected], fallback: dict[str, Any]
    ) -> Outcome:
        wrong, named, approximate, unknowable = [], [], [], []
        filled = set(plan.filled)
        marked = {entry.name for entry in plan.entries if entry.fidelity == "approximate"}
        groups = {expected[name].group for name in marked}
        for name, leaf in expected.items():
            value = state[name]
            taken = [count for moment, count in leaf.counts if moment not in filled]
            if taken:  # The count of the moments that came, if they have one.
                leaf.values = taken[:1] if all(_is_equal(count, taken[0]) for count in taken) else []
            if name in filled:
                if not _is_equal(value, fallback[name]):
                    wrong.append(f"{name}: listed as filled, and holds {_short(value)}")
                elif leaf.values and not leaf.may_be_new:
                    named.append(name)
            elif not any(_is_equal(value, right) for right in leaf.values):
                wanted = " or ".join(map(_short, leaf.values)) or "a new value"
                text = f"{name}: holds {self._whose(value)}, and is to hold {wanted}"
                is_alike = any(_is_equal(value, right) for right in leaf.alike)
                if leaf.group is not None and leaf.group in groups:
                    approximate.append(text)
                elif is_alike and self.has_lost_kind:
                    unknowable.append(text)
                else:
                    wrong.append(text)
        if wrong:
            return Outcome("wrong", self.facts, wrong)
        if any(expected[name].is_moment for name in named) and not plan.warnings:
            return Outcome("wrong", self.facts, [f"{name}: new without a warning" for name in named])
        if approximate or unknowable:
            return Outcome("approximate" if approximate else "unknowable", self.facts, approximate or unknowable)
        return Outcome("named new" if named else "right", self.facts, named)

    def _whose(self, value: Any) -> str:
        """Names the checkpoint's leaf that holds this value."""
        owners = [name for name, saved in self.saved.items() if _is_equal(value, saved)]
        return f"{_short(value)}{' of ' + owners[0] if owners else ''}"

    def _restore_all(self, path: File) -> Outcome:
        """Without a target all names are kept in the checkpoint's own form."""
        expected: dict[str, Any] = {}
        unknown: set[str] = set()
        groups: dict[str, Any] = {}
        for tower, optimizer in zip(self.towers, self.names_of_optimizers, strict=True):
            expected |= {tower.prefix + name: array for name, array in tower.parameters.items()}
            old_prefix = self.layout.towers[self.towers.index(tower)][0]
            expected |= {tower.prefix + name: self.values[old_prefix + old] for name, old in tower.others.items()}
            shapes = {name: array.shape for name, array in tower.parameters.items()}
            slots = self._slots(self._before(optimizer, shapes), shapes)
            new = {(slot.node, slot.kind, slot.parameter): slot for slot in slots.values()}
            values, tower_groups = self._all_slots(tower, new)
            groups |= tower_groups
            for name, value in values.items():
                if value is None:
                    unknown.add(name)
                else:
                    expected[name] = value
        for copy, tree in zip(self.layout.copies, self.copies, strict=True):
            expected |= {copy.prefix + name: array for name, array in tree.items()}
        places = [copy.prefix for copy in self.layout.copies]
        places += [place for pair in self.layout.towers for place in pair if place]
        rootless = {name for name in self.towers[0].old if not self.layout.towers[0][0]}
        expected |= {
            name: value
            for name, value in self.values.items()
            if not name.startswith(tuple(places)) and name not in rootless
        }
        expected |= {name: self.saved[name + self.layout.suffix] for name in self.extra}
        try:
            plan = ot.plan_restore(path, None, [rule.transform for rule in self.rules])
            state = plan.execute()
        except ot.RestorePlanError as error:
            return self._refused(error, is_refusable=False)
        return self._compared_all(plan, state, expected, unknown, groups)

    def _all_slots(self, tower: Tower, slots: dict[Any, Slot]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the values of all slots by name, None if not known, and the groups of the moments."""
        optimizer = tower.optimizer
        values: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        names = _names_by_place(optimizer.slots)
        for (node, kind, parameter), name in names.items():
            if parameter is None and tower.optimizer_prefix + name not in self.missing:
                values[tower.optimizer_prefix + name] = optimizer.numbers[node, kind]
        for (node, hidden), tree in optimizer.hidden.items():
            old = [slot for slot in optimizer.slots.values() if (slot.node, slot.hidden) == (node, hidden)]
            for parameter, array in tree.items():
                for kind in sorted({slot.kind for slot in old}):
                    like = next(slot for slot in old if slot.kind == kind)
                    below = f"{parameter}/{kind}" if self._is_t5x_adafactor() else like.name_of(parameter)
                    name = tower.optimizer_prefix + below
                    slot = slots.get((node, kind, parameter))
                    groups[name] = (tower.prefix, node, hidden, parameter)
                    if hidden == WHOLE and not self._was_factored(tower, node, parameter):
                        # Nobody says that the new shape is factored: all of the moment may stay.
                        values[name] = [array] if kind == "v" else [np.zeros(1, np.float32)]
                        if slot is not None and slot.has_shape_of(array, tower.parameters[parameter]):
                            values[name].append(slot.view(array))
                    elif slot is not None and not slot.is_odd and slot.has_shape_of(array, tower.parameters[parameter]):
                        values[name] = slot.view(array)
                    elif hidden == WHOLE:
                        values[name] = None
                    elif all(slot.is_placeholder for slot in old):
                        values[name] = np.zeros(1, np.float32)
                    else:
                        values[name] = array.sum() if old[0].shape == () else array
        return values, groups

    def _was_factored(self, tower: Tower, node: Path, parameter: str) -> bool:
        """Returns True if a slot of the checkpoint's parameters that this one is made of was factored."""
        origins = tower.origins.get(parameter, frozenset({parameter}))
        slots = tower.optimizer.slots.values()
        return any(slot.averaged is not None for slot in slots if slot.node == node and slot.parameter in origins)

    def _compared_all(
        self, plan: Any, state: Any, expected: dict[str, Any], unknown: set[str], groups: dict[str, Any]
    ) -> Outcome:
        suffix = self.layout.suffix
        flat = {_bare(name, suffix): value for name, value in leaves_by_name(state).items()}
        dropped = {_bare(name, suffix) for name in plan.dropped}
        # Arrays of a form that nobody knows may be taken for moments where they have the parameter's shape.
        odd = {
            tower.optimizer_prefix + slot.name_of("").removesuffix(slot.index)
            for tower in self.towers
            for slot in tower.optimizer.slots.values()
            if slot.index
        }
        surplus = {name for name in flat.keys() - expected.keys() - unknown if not name.startswith(tuple(odd))}
        wrong = [f"{name}: is there, and should not be" for name in surplus]
        named, approximate = [], []
        marked = {_bare(entry.name, suffix) for entry in plan.entries if entry.fidelity == "approximate"}
        marked_groups = {groups[name] for name in marked if name in groups}
        for name, value in expected.items():
            rights = value if isinstance(value, list) else [value]
            if name in flat and not any(_is_equal(flat[name], right) for right in rights):
                is_marked = groups.get(name) in marked_groups
                texts = approximate if is_marked else wrong
                texts.append(f"{name}: holds {self._whose(flat[name])}, and is to hold {_short(rights[-1])}")
            elif name not in flat and name not in self.missing:
                named.append(name)
        lost_parameters = [
            tower.prefix + name for tower in self.towers for name in tower.parameters if tower.prefix + name in named
        ]
        wrong += [f"{name}: not there" for name in lost_parameters]
        if named and not self.missing and not (dropped and plan.warnings):
            wrong += [f"{name}: gone without a warning" for name in named]
        if wrong:
            return Outcome("wrong", self.facts, wrong)
        if approximate:
            return Outcome("approximate", self.facts, approximate)
        return Outcome("named new" if named and not self.missing else "right", self.facts, named)


def _leaves_modules(rule: rules.Rule, tower: Tower) -> bool:
    """Returns True if each module with a Dropout keeps a parameter: else it is no module of the new model."""
    others = [rule.rename(name) for name in tower.others]
    owners = {name.split("/drop/")[0] for name in others if name is not None and "/drop/" in name}
    names = rule.moves(tower.parameters)
    return all(any(name.startswith(f"{owner}/") for name in names) for owner in owners)


def _names_by_place(slots: Mapping[str, Slot]) -> dict[tuple[Path, str, str | None], str]:
    return {(slot.node, slot.kind, slot.parameter): name for name, slot in slots.items()}


def _bare(name: str, suffix: str) -> str:
    return name.removesuffix(suffix) if suffix else name


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _blank(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(np.zeros(2, np.uint32))
    return np.zeros(leaf.shape, leaf.dtype)


def _fallback(leaf: Any, number: int) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(np.full(2, number, np.uint32))
    if leaf.dtype.kind == "u":
        return np.full(leaf.shape, 4_000_000_000 - number, leaf.dtype)
    return np.full(leaf.shape, -100_000 - number, leaf.dtype)


def _is_equal(one: Any, two: Any) -> bool:
    if one is None or two is None or not hasattr(one, "dtype"):
        return False
    # Without a target a key comes back as its data.
    one, two = (jax.random.key_data(value) if _is_key(value) else value for value in (one, two))
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return np.array_equal(np.asarray(one), np.asarray(two))


def _short(value: Any) -> str:
    if _is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {array.ravel()[:3].tolist()}"


def run_case(seed: int, number: int, directory: File) -> Outcome:
    """Runs one case; whatever is no RestorePlanError is the outcome "raised"."""
    case = Case(np.random.default_rng([seed, number]), directory)
    try:
        return case.run()
    except Exception as error:
        text = traceback.format_exc().splitlines()
        place = [line.strip() for line in text if "File " in line][-1]
        return Outcome("raised", case.facts, [f"{type(error).__name__}: {error}"[:600], place])


def run_cases(seed: int, numbers: Any) -> Iterator[tuple[int, Outcome]]:
    """Runs cases in a directory in memory, where there is one."""
    memory = "/dev/shm" if File("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        for number in numbers:
            place = File(directory) / str(number)
            yield number, run_case(seed, number, place)
            shutil.rmtree(place, ignore_errors=True)


def table(outcomes: Mapping[int, Outcome], by: str) -> str:
    """Returns the counts of outcomes by one fact of the cases."""
    rows: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes.values():
        value = outcome.case.get(by, "?")
        for text in {str(item) for item in value} if isinstance(value, list) else {str(value)}:
            rows.setdefault(text, collections.Counter())[outcome.kind] += 1
    lines = [f"| {by} | cases | " + " | ".join(OUTCOMES) + " |", "|---|" + "---|" * (len(OUTCOMES) + 1)]
    for text, counts in sorted(rows.items()):
        figures = [counts.total(), *(counts[kind] for kind in OUTCOMES)]
        lines.append(f"| {text} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--shown", type=int, default=10, help="how many wrong or raised cases are printed")
    parser.add_argument("--by", nargs="*", default=["layout", "optimizer", "change", "damage"])
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    if options.only is not None:
        ((_, outcome),) = run_cases(options.seed, [options.only])
        for name, value in outcome.case.items():
            print(f"{name}: {value}")
        print(outcome.kind, *outcome.details, sep="\n  ")
        return int(outcome.kind in ("wrong", "raised"))
    started = time.perf_counter()
    outcomes = dict(run_cases(options.seed, range(options.cases)))
    seconds = time.perf_counter() - started
    for by in options.by:
        print(table(outcomes, by), end="\n\n")
    counts = collections.Counter(outcome.kind for outcome in outcomes.values())
    refusals = collections.Counter(
        f"{outcome.kind}: {outcome.details[0]}" for outcome in outcomes.values() if outcome.kind.startswith("refused")
    )
    print("Problems of refused cases:", *(f"{count:5} {text}" for text, count in refusals.most_common()), sep="\n  ")
    bad = [(number, outcome) for number, outcome in outcomes.items() if outcome.kind in ("wrong", "raised")]
    for number, outcome in bad[: options.shown]:
        facts = {name: value for name, value in outcome.case.items() if name not in ("text", "new")}
        print(f"\n--seed {options.seed} --only {number}: {outcome.kind} {facts}", *outcome.details[:5], sep="\n    ")
    print("\nwrong or raised:", " ".join(str(number) for number, _ in bad))
    print(f"{options.cases} cases in {seconds:.0f} s:", ", ".join(f"{kind} {counts[kind]}" for kind in OUTCOMES))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
