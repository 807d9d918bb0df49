"""Roots of parameters and of their optimizer's state, found by structure.

A state's container is known by a word in its path, or by the two moments of Adam side by side. Its parameters are the
tree that most of its leaves repeat: name by name, with the shape or with some of the dimensions.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

STANDARD_ROOTS = (("target", "state/param_states"), ("params", "opt_state"))
"""Pairs of roots, of the parameters and of their optimizer's state, in T5X's and in Flax's train states."""

_CONTAINER = re.compile(
    r"(?:.*?/)??(?:(?:.*_)?opt_states?|(?:.*/)?state/param_states|param_states|(?:.*_)?(?:optimizer|optim)_states?)(?=/)"
)
# As attributes of a trainer. Below `target` and `params` they are modules.
_WRAPPER = re.compile(r"(?!(?:[^/]+/)?(?:target|params)/)(?:.*?/)??(?:.*_)?(?:optimizer|optim|opt)(?=/)")
_MOMENTS = (("mu", "nu"), ("exp_avg", "exp_avg_sq"))
_MOMENT = re.compile(r"(.*?)/?\b(mu|nu|exp_avg|exp_avg_sq)/.*")
# A container of which fewer leaves (one of so many) are like parameters is no optimizer's.
_LEAST_SHARE = 4
_USUAL = ("target", "params", "model")


class FoundRoots(NamedTuple):
    """Pairs of roots, and the containers whose parameters may be several trees, with these."""

    pairs: tuple[tuple[str, str], ...]
    unclear: Mapping[str, tuple[str, ...]]


def container_of(name: str) -> str | None:
    """Returns the path of the optimizer's state that a leaf is in; None for a leaf of no such path."""
    if "opt" not in name and "param_states" not in name:
        return None
    found = _CONTAINER.match(name) or _WRAPPER.match(name)
    return None if found is None else found[0]


def find_roots(leaves: Mapping[str, Any]) -> FoundRoots:
    """Finds the parameters of each optimizer's state; of leaves that are None only the names count."""
    containers: dict[str, list[str]] = collections.defaultdict(list)
    bare: list[str] = []
    for name in leaves:
        container = container_of(name)
        if container is None:
            bare.append(name)
        else:
            containers[container].append(name)
    for container in _of_moments(bare):
        containers[container] = [name for name in bare if name.startswith(f"{container}/" if container else "")]
    if not containers:
        return FoundRoots((), {})
    inside = {name for found in containers.values() for name in found}
    # A container is not a container where parameters are in it, as in Flax's old train states.
    params = [name for name in leaves if name not in inside or _is_standard_parameter(name)]
    by_ending = _by_ending(params)
    states: dict[str, list[str]] = {}
    unclear: dict[str, tuple[str, ...]] = {}
    for container, names in containers.items():
        found = _parameters_of(container, names, leaves, by_ending)
        if len(found) == 1:
            states.setdefault(found[0], []).append(container)
        elif found:
            unclear[container] = tuple(found)
    pairs = [(root, os.path.commonpath(found) if len(found) > 1 else found[0]) for root, found in states.items()]
    # The longest root of parameters is the nearest to a name.
    return FoundRoots(tuple(sorted(pairs, key=lambda pair: -len(pair[0]))), unclear)


def _is_standard_parameter(name: str) -> bool:
    """Reports whether a name is below a usual root of parameters, or below a state's name and this."""
    return any(part in ("target", "params") for part in name.split("/", 2)[:2])


def _of_moments(names: Iterable[str]) -> list[str]:
    """Lists the directories that hold both moments of Adam."""
    kinds: dict[str, set[str]] = collections.defaultdict(set)
    for name in names:
        found = _MOMENT.fullmatch(name) if "mu/" in name or "exp_avg" in name else None
        if found is not None and not _is_standard_parameter(name):
            kinds[found[1]].add(found[2])
        elif "nu/" in name and (found := _MOMENT.fullmatch(name)) and not _is_standard_parameter(name):
            kinds[found[1]].add(found[2])
    return [path for path, seen in kinds.items() if any(seen.issuperset(pair) for pair in _MOMENTS)]


def _by_ending(params: Iterable[str]) -> dict[str, list[str]]:
    """Maps each ending of the parameters' names to the roots before it."""
    endings: dict[str, list[str]] = collections.defaultdict(list)
    for name in params:
        at = 0
        while at >= 0:
            endings[name[at:]].append(name[: max(at - 1, 0)])
            at = name.find("/", at) + 1 or -1
    return endings


def _parameters_of(
    container: str, names: Iterable[str], leaves: Mapping[str, Any], by_ending: Mapping[str, list[str]]
) -> list[str]:
    """Lists the roots of the trees that most leaves of a container repeat."""
    votes: collections.Counter[str] = collections.Counter()
    rests = {name: name[len(container) :].strip("/").split("/") for name in names}
    for name, rest in rests.items():
        shape = getattr(leaves[name], "shape", None)
        votes.update(
            root for stop in (len(rest), len(rest) - 1) for root in _longest(rest[:stop], shape, leaves, by_ending)
        )
    best = max(votes.values(), default=0)
    if _LEAST_SHARE * best < len(rests):
        return []
    found = [root for root, count in votes.items() if count == best]
    # What is inside a root is found as well, below a longer root.
    found = [one for one in found if not any(_is_below(one, other) for other in found)]

    def nearness(root: str) -> tuple[int, bool]:
        pairs = enumerate(zip(root, container, strict=False))
        shared = next((at for at, pair in pairs if len(set(pair)) > 1), len(root))
        return shared, root.rpartition("/")[2] in _USUAL

    nearest = max(map(nearness, found), default=None)
    return sorted(root for root in found if nearness(root) == nearest)


def _longest(parts: list[str], shape: Any, leaves: Mapping[str, Any], by_ending: Mapping[str, list[str]]) -> set[str]:
    """Returns the roots of the parameters of the longest ending that has some."""
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        roots = {root for root in by_ending.get(end, ()) if _fits(shape, leaves, f"{root}/{end}".strip("/"))}
        if roots:
            return roots
    return set()


def _is_below(root: str, other: str) -> bool:
    return root != other and (not other or root.startswith(f"{other}/"))


def _fits(shape: Any, leaves: Mapping[str, Any], param: str) -> bool:
    """Reports whether an optimizer's leaf may be of a parameter: its dimensions are some of the parameter's.

    A number shows nothing beside an array: counts and hyperparameters may have a parameter's name.
    """
    of_param = getattr(leaves[param], "shape", None)
    if shape is None or of_param is None:
        return True
    return bool(shape or not of_param) and not collections.Counter(shape) - collections.Counter((*of_param, 1))
