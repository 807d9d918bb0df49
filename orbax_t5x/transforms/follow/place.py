"""Places the leaves of an optimizer in the chain of the target's.

Both sides are read as structure, each alone. Moments go to the node of the target that keeps the same kinds for their
parameters: to the only one; else where one whole chain stands inside the other (a wrapper, a transform put before);
else, with equal numbers, in the order of the chains. Counts go with the moments of their node, and to no node whose
moments did not move. Nodes without moments (schedules, wrappers) are told by their fields and by their place beside
nodes that were paired. A leaf that has no place is not moved by its name: it is left over, and what the target has
instead is new.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix
from orbax_t5x.lazy.several import all_equal
from orbax_t5x.optim.moments import OptimizerStructure, find_optimizer, is_below, path_words, plain_name
from orbax_t5x.optim.optimizer_names import is_step, may_be_optimizer, optimizer_path
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState, prefixed

_COUNTS_ADVICE = "the counts of several nodes become one count of the target's optimizer"


class _ChainNode(NamedTuple):
    """Kinds and fields of a node, and the names of directories in it that are no moments."""

    kinds: frozenset[str]
    fields: frozenset[str]
    children: frozenset[str]


class _OptimizerChain(NamedTuple):
    """Nodes of an optimizer by their directories, and the nodes with moments of each parameter."""

    nodes: dict[str, _ChainNode]
    nodes_of: dict[str, list[str]]
    slots: dict[tuple[str, str, str], str]


def place_optimizer(
    state: FlatState, target: FlatState, diagnostics: Diagnostics, source: OptimizerStructure | None = None
) -> dict[str, Any]:
    """Returns the state with the optimizer's leaves, counts and step under the target's names.

    Args:
      state: Leaves by name.
      target: The target's leaves.
      diagnostics: Takes places that are not clear, and leaves without a place.
      source: Structure of the state's optimizers, if it is known.
    """
    names = {plain_name(name): name for name, value in state.items() if value is not None}
    wanted_names = {plain_name(name): name for name, leaf in target.items() if leaf is not None}
    if not target or state.keys() == wanted_names.keys():
        return dict(state)
    changed = [name for name in names.keys() ^ wanted_names.keys() if is_step(name) or may_be_optimizer(name)]
    if not changed:
        return _with_endings(state, wanted_names, diagnostics)
    old, new = source or find_optimizer(state), find_optimizer(target)
    # An optimizer without moments is told by its name, or by the other side's.
    named = (box for name in changed if (box := optimizer_path(name)))
    for box in [*old.boxes, *new.boxes, *named]:
        old.add_box(box, state)
        new.add_box(box, target)
    placing = _Placing(old, new, set(names.values()), set(wanted_names.values()), diagnostics)
    placing.pair()
    return placing.placed(state, target)


def _with_endings(state: FlatState, wanted_names: Mapping[str, str], diagnostics: Diagnostics) -> dict[str, Any]:
    """Returns the state with the target's endings of variables of Flax NNX."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        new = wanted_names.get(plain_name(name), name) if is_step(name) or may_be_optimizer(name) else name
        result[new] = value
        if new != name and name in diagnostics.fidelity:
            diagnostics.fidelity[new] = diagnostics.fidelity[name]
    return result


def _chain_of(optimizer: OptimizerStructure, names: set[str]) -> _OptimizerChain:
    """Returns the nodes of an optimizer that hold any of the leaves of these names."""
    kinds: dict[str, set[str]] = collections.defaultdict(set)
    parameters: dict[str, dict[str, None]] = collections.defaultdict(dict)
    slots: dict[tuple[str, str, str], str] = {}
    for moments in optimizer.moments:
        if moments.is_copy or moments.form == "glued" or names.isdisjoint(moments.slots.values()):
            continue
        kinds[moments.node].add(moments.kind)
        for parameter, slot in moments.slots.items():
            parameters[parameter][moments.node] = None
            slots[moments.node, moments.kind, parameter] = slot
    fields = {
        directory: frozenset(field for field, name in held.items() if name in names)
        for directory, held in optimizer.fields.items()
    }
    directories = {*kinds, *(directory for directory, held in fields.items() if held)}
    children: dict[str, set[str]] = collections.defaultdict(set)
    for directory in directories:
        path = directory
        while "/" in path:
            path, _, child = path.rpartition("/")
            if not child.isdecimal():
                children[path].add(child)
    nodes = {
        directory: _ChainNode(
            frozenset(kinds[directory]), fields.get(directory, frozenset()), frozenset(children[directory])
        )
        for directory in sorted(directories, key=_in_order)
    }
    return _OptimizerChain(nodes, {name: sorted(origins, key=_in_order) for name, origins in parameters.items()}, slots)


def _in_order(path: str) -> list[tuple[int, str]]:
    """Sorts the entries of a chain by number."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split("/")]


class _Placing:
    """Pairs of nodes of a state's optimizers and of the target's.

    Attributes:
      sources: Names of the state's leaves by the target's leaf that they become.
    """

    def __init__(
        self,
        source: OptimizerStructure,
        target: OptimizerStructure,
        names: set[str],
        wanted_names: set[str],
        diagnostics: Diagnostics,
    ):
        self._source = source
        self._target = target
        self._old = _chain_of(source, names)
        self._new = _chain_of(target, wanted_names)
        self._diagnostics = diagnostics
        self._pairs: dict[tuple[str, str], None] = {}
        self.sources: dict[str, list[str]] = {}

    def pair(self) -> None:
        """Finds the target's place of each moment and field."""
        embedded = self._embedded()
        groups: dict[tuple[frozenset[str], tuple[str, ...], tuple[str, ...]], list[str]] = collections.defaultdict(list)
        for parameter, nodes in self._new.nodes_of.items():
            for kinds in dict.fromkeys(self._new.nodes[node].kinds for node in nodes):
                places = tuple(node for node in nodes if self._new.nodes[node].kinds == kinds)
                groups[kinds, self._having(parameter, kinds, places), places].append(parameter)
        for (kinds, origins, places), parameters in groups.items():
            for origin, place in self._matched(origins, places, embedded, kinds):
                self._pairs[origin, place] = None
                for parameter in parameters:
                    for kind in kinds:
                        slot = self._old.slots.get((origin, kind, parameter))
                        name = self._new.slots.get((place, kind, parameter))
                        if slot is not None and name is not None:
                            self.sources[name] = [slot]
        for origin, place in self._pairs:
            self._pair_fields(origin, place)
        for origin, place in self._nodes_of_fields(embedded):
            self._pair_fields(origin, place)

    def _having(self, parameter: str, kinds: frozenset[str], places: Sequence[str]) -> tuple[str, ...]:
        """Returns the state's nodes of these kinds for a parameter; fewer kinds only at the same place."""
        nodes = self._old.nodes_of.get(parameter, [])
        same = tuple(node for node in nodes if self._old.nodes[node].kinds == kinds)
        if same:
            return same
        return tuple(node for node in nodes if node in places and self._old.nodes[node].kinds < kinds)

    def _matched(
        self, origins: Sequence[str], places: Sequence[str], embedded: Mapping[str, str], kinds: Iterable[str]
    ) -> Iterable[tuple[str, str]]:
        if not origins:
            return []
        if len(origins) == len(places) == 1:
            return [(origins[0], places[0])]
        if all(embedded.get(origin) in places for origin in origins):
            return [(origin, embedded[origin]) for origin in origins]
        if len(origins) == len(places):
            return list(zip(origins, places, strict=True))
        message = (
            f"the checkpoint keeps {listed(sorted(kinds), 4)} in {listed(map(repr, origins), 4)}, and the target in "
            f"{listed(map(repr, places), 4)}: which of them become which is not clear"
        )
        fix = Fix("restore them under names of their own by a Rename, or begin those moments anew with fallback_for=")
        self._diagnostics.problem("optimizer", None, message, fix)
        return []

    def _embedded(self) -> dict[str, str]:
        """Returns the target's node of each node, where one whole chain stands inside the other at one place."""
        old, new = (
            {path: node for path, node in chain.nodes.items() if node.kinds or node.fields != {"step"}}
            for chain in (self._old, self._new)
        )
        places = _inside(old, new)
        if places is None:
            places = {origin: place for place, origin in (_inside(new, old) or {}).items()}
        return places

    def _pair_fields(self, origin: str, place: str) -> None:
        old = self._source.fields.get(origin, {})
        for field, name in self._target.fields.get(place, {}).items():
            if field in old and old[field] not in self.sources.setdefault(name, []):
                self.sources[name].append(old[field])

    def _nodes_of_fields(self, embedded: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yields pairs of nodes without moments."""
        old, new = (
            {path: node for path, node in chain.nodes.items() if not node.kinds and node.fields}
            for chain in (self._old, self._new)
        )
        taken: set[str] = set()
        remaining: list[str] = []
        for origin, node in old.items():
            likely = [embedded[origin]] if origin in embedded else []
            likely += [place for pair in self._pairs for place in _places_beside(origin, *pair)]
            # What stands in no chain has its own place, whatever stands below it.
            if origin in new and new[origin].fields == node.fields and not _is_in_chain(origin):
                likely, node = [origin], new[origin]
            place = next((place for place in likely if new.get(place) == node and place not in taken), None)
            if place is not None:
                taken.add(place)
                yield origin, place
            elif not any(place in self._new.nodes and place not in new for place in likely):
                remaining.append(origin)
        groups = {origin: (old[origin], _words_of_box(self._source, origin)) for origin in remaining}
        for group in dict.fromkeys(groups.values()):
            origins = [origin for origin in remaining if groups[origin] == group]
            free = [place for place, node in new.items() if node == group[0] and place not in taken]
            places = [place for place in free if _words_of_box(self._target, place) == group[1]]
            if len(origins) == len(places):
                yield from zip(origins, places, strict=True)

    # -- the state

    def placed(self, state: FlatState, target: FlatState) -> dict[str, Any]:
        """Returns the state under the target's names."""
        sources = {name: origins for name, origins in self.sources.items() if origins}
        inside = {slot for moments in self._source.moments if not moments.is_copy for slot in moments.slots.values()}
        inside |= {name for fields in self._source.fields.values() for name in fields.values()}
        if not all(origin == place for origin, place in self._pairs):
            inside |= self._source.unknown.keys()
        self._diagnostics.lost = self._renamed_lost(sources)
        result = {name: value for name, value in state.items() if name not in inside}
        used = {origin for origins in sources.values() for origin in origins}
        wanted_names = {plain_name(name) for name in target}
        for name in state:
            if name in inside and name not in used:
                has_place = plain_name(name) in wanted_names and self._target.has(plain_name(name))
                (self._diagnostics.unplaced if has_place else result)[name] = state[name]
        for name, origins in sources.items():
            values = [state[origin] for origin in origins if origin in state]
            if values:
                value = values[0] if len(values) == 1 else all_equal(values, advice=_COUNTS_ADVICE)
                result[name] = value
                if plain_name(name) != plain_name(origins[0]):
                    rule = "into the target's optimizer"
                    self._diagnostics.record_origins({name: (origins[0], rule)})
                elif (fidelity := self._diagnostics.fidelity.get(origins[0])) is not None:
                    self._diagnostics.fidelity[name] = fidelity
        return self._with_step(result, target)

    def _renamed_lost(self, sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Returns slots that cannot follow by the target's names."""
        places = {origin: name for name, origins in sources.items() for origin in origins}
        return {places.get(name, name): reason for name, reason in self._diagnostics.lost.items()}

    def _with_step(self, state: dict[str, Any], target: FlatState) -> dict[str, Any]:
        """Renames the only step as the target names it."""
        steps = [name for name in state if is_step(name)]
        places = [name for name in target if is_step(name)]
        if len(steps) != 1 or len(places) != 1 or steps == places or places[0] in self._diagnostics.new_leaves:
            return state
        words, target_words = path_words(steps[0]), path_words(places[0])
        if not (words <= target_words or target_words <= words):
            return state
        self._diagnostics.record_origins({places[0]: (steps[0], "as the target names it")})
        return {places[0] if name == steps[0] else name: value for name, value in state.items()}


def _words_of_box(optimizer: OptimizerStructure, directory: str) -> frozenset[str]:
    """Returns the words that tell whose optimizer a directory is in."""
    return frozenset(path_words(next((box for box in optimizer.boxes if is_below(directory, box)), directory)))


def _is_in_chain(directory: str) -> bool:
    return any(part.isdecimal() for part in directory.split("/"))


def _inside(inner: Mapping[str, _ChainNode], outer: Mapping[str, _ChainNode]) -> dict[str, str] | None:
    """Returns the place of each node of a chain that stands inside another, or None unless there is one place."""
    if not inner:
        return None
    first = next(iter(inner))
    above = os.path.commonpath(inner) if len(inner) > 1 else first.rpartition("/")[0]
    tails = {path: path.removeprefix(above).strip("/") for path in inner}
    tail = tails[first]
    places = [path.removesuffix(tail).rstrip("/") for path in outer if _ends_with(path, tail)]
    fitting = [
        place
        for place in places
        if all(_is_same(outer.get(prefixed(place, tails[path])), node) for path, node in inner.items())
    ]
    return {path: prefixed(fitting[0], tails[path]) for path in inner} if len(fitting) == 1 else None


def _ends_with(path: str, tail: str) -> bool:
    return path == tail or path.endswith(f"/{tail}")


def _is_same(outer: _ChainNode | None, inner: _ChainNode) -> bool:
    return outer is not None and (outer.kinds, outer.fields) == (inner.kinds, inner.fields)


def _places_beside(directory: str, origin: str, place: str) -> Iterator[str]:
    """Yields the directories that stand to a node's place as a directory stands to the node."""
    common = os.path.commonpath((directory, origin)) if directory.split("/")[0] == origin.split("/")[0] else ""
    tail = origin.removeprefix(common).strip("/")
    own_tail = directory.removeprefix(common).strip("/")
    if not tail:
        yield prefixed(place, own_tail)
    elif _ends_with(place, tail):
        yield prefixed(place.removesuffix(tail).rstrip("/"), own_tail)
    if tail.isdecimal() and own_tail.isdecimal():
        above, _, last = place.rpartition("/")
        if last.isdecimal():
            yield prefixed(above, str(int(last) + int(own_tail) - int(tail)))
