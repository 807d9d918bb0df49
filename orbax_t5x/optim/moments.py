"""Finds the moments of optimizers among a state's leaves, by names and shapes alone.

Names answer one question: which of several equal trees the parameters are. All else is structure. A directory whose
leaves repeat the parameters, name by name and with fitting shapes, is a moment; the directory above it is its node,
and the leaves that stand beside the moment in it (counts) belong to it. Scalars, PRNG keys and integers never decide
what a moment is. The ending `/value`, which Orbax gives variables of Flax NNX, is left out of all comparisons: a leaf
is never also a directory.

What is not understood is never moved by its name: an array of an optimizer that repeats a parameter's name in an
unknown form is listed in `OptimizerStructure.unknown`, and parameters that could be either of several trees in
`unclear`.
The cost is linear in the leaves, since endings that many leaves share are not compared.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from orbax_t5x.optim.optimizer_names import (
    KINDS,
    SLOT_MAP,
    glued_parameter,
    has_copy_word,
    is_container,
    is_state,
    may_tell_optimizer,
)
from orbax_t5x.trees.flat import parents, prefixed

Shape = tuple[int, ...]
Form = Literal["kind first", "kind last", "glued"]
"""Order of a moment's names: Optax's `mu/<path>`, T5X's `<path>/v_row`, Mesh TensorFlow's `<path>_slot_vr`."""

# Parameters in a train state; below them the words of optimizers are modules.
_PARAMETER_ROOTS = frozenset({"params", "target"})
_USUAL_ROOTS = frozenset({"params", "model", "target"})
_OPTIMIZER_WORDS = frozenset({"opt", "optim", "optimizer", "state", "states", "param", "step", "value"})
# Flax puts this between a kind and the paths where an optimizer was made for `{"params": …}`.
_INNER_ROOT = "params"
# An ending that more leaves share, such as `kernel`, tells nothing, and comparing it would cost the square.
_MOST_PLACES = 64


def plain_name(name: str) -> str:
    """Returns a leaf's name without the ending that Orbax gives variables of Flax NNX."""
    return name.removesuffix("/value")


@dataclasses.dataclass
class Moments:
    """Leaves of one kind that an optimizer keeps for its parameters, or a copy of the parameters.

    Attributes:
      root: Root of the parameters' names.
      node: Directory of the moments, in which their counts are.
      kind: Name of the moment, such as `mu`; the name of the directory for a copy.
      form: Order of kind and path in the names.
      slots: Names of the leaves by their parameters' plain names.
      inner: Directory between the kind and the paths, or empty.
      is_copy: True for a copy of the parameters, such as an average, outside the optimizer.
    """

    root: str
    node: str
    kind: str
    form: Form
    slots: dict[str, str]
    inner: str = ""
    is_copy: bool = False

    def name_for(self, parameter: str, root: str, like: str) -> str:
        """Returns the name of the leaf for a new parameter below a root, with the ending of an old leaf."""
        path = parameter.removeprefix(f"{root}/") if root else parameter
        if self.form == "glued":
            return parameter + next(ending for ending, kind in SLOT_MAP.items() if kind == self.kind)
        parts = (self.node, path, self.kind) if self.form == "kind last" else (self.node, self.kind, self.inner, path)
        return "/".join(filter(None, parts)) + ("/value" if like.endswith("/value") else "")


@dataclasses.dataclass
class OptimizerStructure:
    """Moments among leaves, and the other leaves of their optimizers.

    Attributes:
      moments: Moments and copies.
      boxes: Directories of the optimizers' states.
      fields: Names of the boxes' other leaves, by their directory and then by the last part of their plain names.
      unknown: Parameters of arrays in a box that repeat their names in an unknown form, by the arrays' names.
      unclear: Roots that may be the parameters of a directory of moments.
    """

    moments: list[Moments] = dataclasses.field(default_factory=list[Moments])
    boxes: list[str] = dataclasses.field(default_factory=list[str])
    fields: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict[str, dict[str, str]])
    unknown: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    unclear: dict[str, list[str]] = dataclasses.field(default_factory=dict[str, list[str]])

    def parameters_of_slots(self) -> dict[str, str]:
        """Returns the plain names of the parameters, by the names of their slots; copies are no slots."""
        return {
            slot: parameter
            for moments in self.moments
            if not moments.is_copy
            for parameter, slot in moments.slots.items()
        }

    def add_box(self, box: str, leaves: Iterable[str]) -> None:
        """Adds an optimizer without moments; a box inside or around a known one is left out."""
        if any(is_below(box, existing) or is_below(existing, box) for existing in self.boxes):
            return
        inside = [name for name in leaves if is_below(plain_name(name), box)]
        self.boxes += [box] if inside else []
        for name in inside:
            directory, _, field = plain_name(name).rpartition("/")
            self.fields.setdefault(directory, {})[field] = name

    def has(self, name: str) -> bool:
        """Returns True if a leaf belongs to an optimizer."""
        return any(is_below(name, box) for box in self.boxes)


def is_below(name: str, directory: str) -> bool:
    """Returns True if a name is a directory's or below it; all names are below an empty directory."""
    return not directory or name == directory or name.startswith(f"{directory}/")


def find_optimizer(leaves: Mapping[str, Any], roots: Iterable[tuple[str, str]] | None = None) -> OptimizerStructure:
    """Finds the moments of optimizers among leaves.

    Args:
      leaves: Leaves by name; anything with `shape` and `dtype`, or Python scalars.
      roots: Pairs (root of the parameters, directory of their optimizer's state); None finds them.
    """
    if roots is None and not any(map(may_tell_optimizer, leaves)):
        return OptimizerStructure()
    search = _Search(leaves)
    if roots is None:
        pairs = search.pairs()
    else:
        pairs = {state.strip("/"): parameters.strip("/") for parameters, state in roots}
    for box, root in pairs.items():
        search.add_box(box, root)
    if roots is None:
        search.add_states()
        search.add_glued()
        search.add_copies()
    return search.result


class _Search:
    """Search for moments; `result` grows by what is found.

    Attributes:
      names: Names of the leaves by their plain names.
      marks: Position of the first optimizer's word in the parts of each plain name.
    """

    def __init__(self, leaves: Mapping[str, Any]):
        self.result = OptimizerStructure()
        # A field may be called `value`, too.
        siblings = collections.Counter(name.rpartition("/")[0] for name in leaves)
        plains = {name: plain_name(name) if siblings[name[: -len("/value")]] == 1 else name for name in leaves}
        self.names = {plain: name for name, plain in plains.items()}
        self._empty = {plains[name] for name, leaf in leaves.items() if leaf is None}
        self._shapes = {plain: _array_shape(leaves[name]) for plain, name in self.names.items()}
        self._counts = {plain for plain, name in self.names.items() if _is_count_or_key(leaves[name])}
        self._parts = {plain: plain.split("/") for plain in self.names}
        self.marks = {plain: mark for plain, parts in self._parts.items() if (mark := _mark(parts)) is not None}
        # Roots of parameters that were accepted, and the directories that have their parameters in them.
        self._roots: dict[str, set[str]] = {}
        self._directories: set[str] = set()
        # Directories that most evidence says are moments, though not all of their leaves repeat parameters.
        self._voted: set[str] = set()

    # -- which tree the parameters are

    def pairs(self) -> dict[str, str]:
        """Returns the roots of the parameters by the box of their optimizer."""
        if not self.marks:
            return {}
        endings = self._endings(self.marks)
        votes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for plain, mark in self.marks.items():
            if self._is_array(plain):
                for directory, root, parameter in self._repeated(plain, mark, endings):
                    votes[directory, root].add(parameter)
        by_directory: dict[str, list[str]] = collections.defaultdict(list)
        for directory, root in votes:
            if self._is_told(directory, root, votes) and not self._is_of_another(directory, root):
                by_directory[directory].append(root)
        best = {directory: _best_roots(directory, roots, votes) for directory, roots in by_directory.items()}
        accepted: dict[str, str] = {}
        for directory in sorted(best, key=lambda path: (-len(votes[path, best[path][0]]), not best[path][0])):
            names = votes[directory, best[directory][0]]
            if directory in self._directories or not self._may_be_root(best[directory], names, accepted):
                continue
            if len(best[directory]) > 1:
                self.result.unclear[directory] = best[directory]
                continue
            root = best[directory][0]
            accepted[directory] = root
            self._voted.add(directory)
            self._roots.setdefault(root, set()).update(names)
            self._directories.update(parent for name in names for parent in parents(name))
        return {self._box(directory, accepted): root for directory, root in accepted.items()}

    def _is_told(self, directory: str, root: str, votes: Mapping[tuple[str, str], set[str]]) -> bool:
        """Returns True if more than a kind's name says that a directory is a moment."""
        node, _, kind = directory.rpartition("/")
        if kind not in KINDS and kind != _INNER_ROOT and not KINDS.isdisjoint(node.split("/")):
            return False  # a part of a moment whose parameters are called otherwise
        if any(map(is_container, directory.split("/"))):
            return True
        link = root.rpartition("/")[0]
        if link.isdecimal() and any(parts[0] == link and parts[1] in KINDS for parts in self._parts.values()):
            return False  # a moment in the state of a chain without its parameters
        if has_copy_word(kind) and not node.rpartition("/")[2].isdecimal():
            return False
        siblings = {
            path.rpartition("/")[2]
            for path, other_root in votes
            if other_root == root and path.rpartition("/")[0] == node
        }
        if len(siblings & KINDS) > 1 or prefixed(node, "count") in self.names:
            return True
        arrays = {plain for plain in self.names if is_below(plain, root) and self._is_array(plain)}
        return bool(root) and kind in KINDS and len(arrays) > 1 and votes[directory, root] == arrays

    def _is_of_another(self, directory: str, root: str) -> bool:
        """Returns True if a directory has another model's word, as `gen_opt` has beside `dis_params`."""
        words = path_words(root)
        node = directory.rpartition("/")[0]
        return bool(words) and not self._model_words.intersection(path_words(node)) <= words

    @functools.cached_property
    def _model_words(self) -> set[str]:
        """Words in the first two parts of the names of arrays outside optimizers."""
        # A number behind a part is a place in the chain of an optimizer without a word of its own.
        beginnings = {
            part
            for plain, parts in self._parts.items()
            if plain not in self.marks and self._is_array(plain)
            for part, following in itertools.pairwise(parts[:3])
            if not following.isdecimal()
        }
        return path_words("/".join(beginnings))

    def _endings(self, marks: Mapping[str, int]) -> dict[str, list[str]]:
        """Returns the plain names by each of their endings whose beginning has no optimizer's word."""
        endings: dict[str, list[str]] = collections.defaultdict(list)
        for plain, parts in self._parts.items():
            for start in range(min(marks.get(plain, len(parts) - 1), len(parts) - 1) + 1):
                endings["/".join(parts[start:])].append(plain)
        return endings

    def _repeated(self, plain: str, mark: int, endings: Mapping[str, list[str]]) -> Iterator[tuple[str, str, str]]:
        """Yields the directory, root and parameter of the longest ending that a parameter has, too."""
        parts = self._parts[plain]
        for end in (len(parts), len(parts) - 1):
            for start in range(mark + 1, end):
                if end < len(parts) and not (is_container(parts[start - 1]) or parts[start - 1].isdecimal()):
                    continue
                ending = "/".join(parts[start:end])
                places = endings.get(ending, ())
                fitting = [name for name in places if name != plain and self._fits(plain, name)]
                if not fitting or len(places) > _MOST_PLACES:
                    continue
                for name in fitting:
                    root = name.removesuffix(ending).rstrip("/")
                    # A whole name may begin with the root of a copy.
                    if root or not has_copy_word(parts[start]):
                        yield "/".join(parts[:start]), root, name
                # A module of the model may be called as a moment is, a moment as a module, and a kind as a root.
                if parts[start] not in KINDS and parts[start] != _INNER_ROOT:
                    return

    def _may_be_root(self, roots: Sequence[str], names: Collection[str], accepted: Iterable[str]) -> bool:
        """Returns False if a root is inside or around a root that was accepted, or beside moments in their node."""
        nodes = set(filter(None, (directory.rpartition("/")[0] for directory in accepted)))
        return not any(
            any(_overlap(root, names, existing, self._roots[existing]) for existing in self._roots if existing != root)
            or any(is_below(root, node) for node in nodes)
            for root in roots
        )

    def _box(self, directory: str, accepted: Mapping[str, str]) -> str:
        """Returns the shortest beginning of a directory with neither parameters nor other parameters' moments."""
        other_paths = [path for path, root in accepted.items() if root != accepted[directory]]
        beginnings = [*reversed(list(parents(directory))), directory]
        for box in sorted(beginnings, key=len):
            if box not in self._directories and not any(is_below(path, box) for path in other_paths):
                return box
        return directory

    # -- what is in a box

    def add_box(self, box: str, root: str) -> None:
        """Adds the moments and fields of an optimizer's state."""
        if any(is_below(box, existing) for existing in self.result.boxes):
            return
        self.result.boxes.append(box)
        inside = {plain: parts for plain, parts in self._parts.items() if is_below(plain, box)}
        paths = {plain for plain in self.names if is_below(plain, root) and plain not in inside}
        depth = len(box.split("/"))
        remaining = self._visit(list(inside), depth, self._add_kind_first, root, paths)
        remaining = self._visit(remaining, depth, self._add_kind_last, root, paths)
        for plain in self._add_numbers(remaining, root, paths):
            parameter = self._named_in(plain, depth, root, paths)
            if self._is_array(plain) and (parameter or any(is_below(plain, voted) for voted in self._voted)):
                self.result.unknown[self.names[plain]] = parameter
                continue
            directory, _, field = plain.rpartition("/")
            self.result.fields.setdefault(directory, {})[field] = self.names[plain]

    def _visit(
        self, plains: list[str], depth: int, add: Callable[..., Collection[str]], root: str, paths: set[str]
    ) -> list[str]:
        """Adds the shallowest directories whose leaves repeat parameters; returns the other leaves."""
        groups: dict[str, list[str]] = collections.defaultdict(list)
        remaining: list[str] = []
        for plain in plains:
            parts = self._parts[plain]
            if len(parts) > depth:
                groups["/".join(parts[:depth])].append(plain)
            else:
                remaining.append(plain)
        for directory, group in groups.items():
            may_be_moment = any(map(self._is_array, group)) and not self._is_of_another(directory, root)
            taken = add(directory, group, depth, root, paths) if may_be_moment else ()
            untaken = [plain for plain in group if plain not in taken]
            remaining += self._visit(untaken, depth + 1, add, root, paths) if untaken else ()
        return remaining

    def _add_kind_first(
        self, directory: str, plains: Sequence[str], depth: int, root: str, paths: set[str]
    ) -> Collection[str]:
        """Adds a moment in Optax's form; returns its leaves."""
        node, _, kind = directory.rpartition("/")
        for inner in ("", _INNER_ROOT):
            start = depth + bool(inner)
            if inner and any(self._parts[plain][depth : depth + 1] != [inner] for plain in plains):
                continue
            slots = {prefixed(root, "/".join(self._parts[plain][start:])): plain for plain in plains}
            slots = self._told(directory, slots, paths)
            if self._repeats(slots, paths):
                self._append(root, node, kind, "kind first", slots, inner)
                return slots.values()
        return ()

    def _add_kind_last(
        self, directory: str, plains: Sequence[str], depth: int, root: str, paths: set[str]
    ) -> Collection[str]:
        """Adds moments in T5X's form; returns their leaves."""
        by_kind: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for plain in plains:
            parts = self._parts[plain]
            # T5X writes None for a parameter that an optimizer of several leaves to another.
            end = len(parts) if plain in self._empty else len(parts) - 1
            by_kind["".join(parts[end:])][prefixed(root, "/".join(parts[depth:end]))] = plain
        kinds = {kind: self._told(directory, slots, paths) for kind, slots in by_kind.items()}
        if directory in self._voted:
            kinds = {kind: slots for kind, slots in kinds.items() if self._repeats(slots, paths)}
        if not all(self._repeats(slots, paths) for slots in kinds.values()):
            return ()
        for kind, slots in kinds.items():
            self._append(root, directory, kind, "kind last", slots)
        return {plain for slots in kinds.values() for plain in slots.values()}

    def _told(self, directory: str, slots: dict[str, str], paths: set[str]) -> dict[str, str]:
        """Returns the leaves of a directory that evidence says is a moment, without those of no parameter."""
        has_moments = any(voted != directory and is_below(voted, directory) for voted in self._voted)
        if directory not in self._voted or has_moments:
            return slots
        return {name: plain for name, plain in slots.items() if self._repeats({name: plain}, paths)} or slots

    def _add_numbers(self, plains: Sequence[str], root: str, paths: set[str]) -> list[str]:
        """Adds numbers for each parameter beside moments, or of their kinds; returns the other leaves."""
        nodes = {moments.node for moments in self.result.moments}
        kinds = {moments.kind for moments in self.result.moments}
        groups: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for plain in plains:
            for directory in parents(plain):
                node, _, kind = directory.rpartition("/")
                if (node in nodes or kind in kinds) and kind != "hyperparams":
                    groups[directory][prefixed(root, plain.removeprefix(f"{directory}/"))] = plain
        taken: set[str] = set()
        for directory, slots in groups.items():
            is_float = self._counts.isdisjoint(slots.values())
            if is_float and slots.keys() <= paths and not any(map(self._is_array, slots.values())):
                node, _, kind = directory.rpartition("/")
                self._append(root, node, kind, "kind first", slots)
                taken.update(slots.values())
        return [plain for plain in plains if plain not in taken]

    def _append(
        self, root: str, node: str, kind: str, form: Form, slots: Mapping[str, str], inner: str = "", **fields: Any
    ) -> None:
        named = {parameter: self.names[plain] for parameter, plain in slots.items()}
        self.result.moments.append(Moments(root, node, kind, form, named, inner, **fields))

    def _named_in(self, plain: str, depth: int, root: str, paths: set[str]) -> str:
        """Returns the parameter whose path is anywhere in a name, or an empty text."""
        parts = self._parts[plain]
        for start in range(depth, len(parts)):
            for end in range(len(parts), start, -1):
                if (parameter := prefixed(root, "/".join(parts[start:end]))) in paths:
                    return parameter
        return ""

    def add_states(self) -> None:
        """Adds the fields of optimizers without moments, whose directories are known by their words alone."""
        for plain, mark in self.marks.items():
            parts = self._parts[plain]
            end = next((at for at in range(mark, len(parts) - 1) if is_state(parts[at])), None)
            if end is not None and not self.result.has(plain):
                self.result.add_box("/".join(parts[: end + 1]), self.names.values())

    # -- slots of a bundle, and copies

    def add_glued(self) -> None:
        """Adds the slots of Mesh TensorFlow's Adafactor, which stand beside their parameters."""
        by_kind: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for plain in self.names:
            if "_slot_" in plain and (parameter := glued_parameter(plain)) in self.names:
                by_kind[SLOT_MAP[plain[len(parameter) :]]][parameter] = plain
        for kind, slots in by_kind.items():
            self._append("", "", kind, "glued", slots)

    def add_copies(self) -> None:
        """Adds copies of parameters whose root says that they are copies, such as averages."""
        marks = {}
        for plain, parts in self._parts.items():
            mark = next((at for at, part in enumerate(parts[:-1]) if has_copy_word(part)), None)
            is_parameter = any(is_below(plain, root) for root in self._roots if root)
            if mark is not None and not is_parameter and not self.result.has(plain) and self._is_array(plain):
                marks[plain] = mark
        if not marks:
            return
        endings = self._endings({**self.marks, **marks})
        slots: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
        for plain, mark in marks.items():
            parts = self._parts[plain]
            for start in range(mark + 1, len(parts)):
                ending = "/".join(parts[start:])
                for name in endings.get(ending, ()):
                    root = name.removesuffix(ending).rstrip("/")
                    is_parameter = root in self._roots if self._roots else name not in self.marks
                    if name != plain and is_parameter and self._shapes[name] == self._shapes[plain]:
                        slots["/".join(parts[:start]), root][name] = plain
        order = sorted(slots, key=lambda pair: (-len(slots[pair]), len(pair[0]), *_farness(*pair)))
        taken: set[str] = set()
        for directory, root in order:
            arrays = {plain for plain in marks if is_below(plain, directory)}
            copied = set(slots[directory, root].values())
            if copied == arrays and taken.isdisjoint(copied):
                taken |= copied
                node, _, kind = directory.rpartition("/")
                self._append(root, node, kind, "kind first", slots[directory, root], is_copy=True)

    # -- shapes

    def _is_array(self, plain: str) -> bool:
        """Returns True for floating-point arrays, and for leaves of which nothing but the name is known."""
        return self._shapes[plain] != () and plain not in self._counts

    def _repeats(self, slots: Mapping[str, str], paths: set[str]) -> bool:
        return slots.keys() <= paths and all(self._fits(plain, parameter) for parameter, plain in slots.items())

    def _fits(self, plain: str, parameter: str) -> bool:
        """Returns True if a leaf has a parameter's shape, some of its dimensions, or dimensions in front of it."""
        shape, whole = self._shapes[plain], self._shapes[parameter]
        if shape is None or whole is None:
            return plain not in self._counts
        if not shape:
            return not whole and (plain in self._counts) <= (parameter in self._counts)
        has_memory = bool(whole) and shape[-len(whole) :] == whole
        return has_memory or not collections.Counter(shape) - collections.Counter((*whole, 1))


def _overlap(root: str, names: Iterable[str], other_root: str, others: Iterable[str]) -> bool:
    """Returns True if two roots are inside one another; parameters at the root of a state are told by their names."""
    if root and other_root:
        return is_below(root, other_root) or is_below(other_root, root)
    return any(is_below(name, root or other_root) for name in (others if root else names))


def _mark(parts: Sequence[str]) -> int | None:
    """Returns the position of the first optimizer's word outside the parameters, or None."""
    for at, part in enumerate(parts[:-1]):
        if part in _PARAMETER_ROOTS:
            return None
        if is_container(part) or part in KINDS:
            return at
    return None


def _best_roots(directory: str, roots: Sequence[str], votes: Mapping[tuple[str, str], set[str]]) -> list[str]:
    """Returns the root that the most evidence is for, or several that nothing tells apart."""

    def weakness(root: str) -> tuple[Any, ...]:
        return -len(votes[directory, root]), *_farness(directory, root)

    strongest = min(map(weakness, roots))
    return sorted(root for root in roots if weakness(root) == strongest)


def _farness(directory: str, root: str) -> tuple[int, int, bool, bool]:
    """Returns how little the names of a directory and of a root of parameters say that they belong together."""
    words = path_words(root)
    shared = words & path_words(directory)
    return -len(shared), len(words - shared), has_copy_word(root), not _is_usual(root)


def path_words(path: str) -> set[str]:
    """Returns the words that tell two models apart."""
    words = {word for word in re.findall("[A-Za-z]+", path) if not has_copy_word(word)}
    return words - KINDS - _USUAL_ROOTS - _OPTIMIZER_WORDS


def _is_usual(root: str) -> bool:
    return root.rpartition("/")[2] in _USUAL_ROOTS


def _array_shape(leaf: Any) -> Shape | None:
    if isinstance(leaf, bool | int | float | complex):
        return ()
    shape = getattr(leaf, "shape", None)
    return None if shape is None else tuple(shape)


def _is_count_or_key(leaf: Any) -> bool:
    """Returns True for integer numbers, PRNG keys, truth values and texts."""
    if isinstance(leaf, bool | int):
        return True
    try:
        dtype = np.dtype(getattr(leaf, "dtype", np.float32))
    except TypeError:  # a typed PRNG key
        return True
    return dtype.kind in "bOSU" or dtype == np.uint32 or (dtype.kind in "iu" and not getattr(leaf, "shape", ()))
