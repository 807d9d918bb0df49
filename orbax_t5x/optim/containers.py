"""Finds the containers of optimizers' states, and their parameters.

A container is known by a word in its path, or by names of moments above copies of a tree. Its parameters are the tree
that most of its leaves repeat: name by name, with the shape or with some of the dimensions.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STANDARD_ROOTS = (("target", "state/param_states"), ("params", "opt_state"))
"""Pairs of roots, of parameters and optimizer, in T5X's and Flax's train states, for names that are new."""
SLOT_MAP: dict[str, str] = {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
"""Adafactor's slots in T5X by the ends of their names in Mesh TensorFlow."""

_CONTAINER = re.compile(
    r"(?:.*?/)??(?:(?:.*_)?opt_states?|(?:.*/)?state/param_states|param_states|(?:.*_)?(?:optimizer|optim)_states?)(?=/)"
)
# As attributes of a trainer. Below `target` and `params` they are modules.
_WRAPPER = re.compile(r"(?!(?:[^/]+/)?(?:target|params)/)(?:.*?/)??(?:.*_)?(?:optimizer|optim|opt)(?=/)")
_GLUED_NAME = re.compile(rf"(.+)({'|'.join(SLOT_MAP)})")
# Kinds of a state that is in no container: several side by side, or one beside a count.
_KINDS = (("mu", "nu"), ("exp_avg", "exp_avg_sq"), ("v_row", "v_col"))
_LONE_KINDS = ("mu", "trace", "momentum", "ema")
_UNCOUNTED_KINDS = ("trace", "momentum")
MOMENT_WORDS = frozenset({"m", "v", "mu", "nu", "ema", "trace", "momentum", "grad", "acc"})
_KIND_HINT = re.compile("mu/|nu/|exp_avg|v_row/|v_col/|trace/|momentum/|ema/")
_KIND_WORD = re.compile(r"(.*?)/?\b(mu|nu|exp_avg|exp_avg_sq|v_row|v_col|trace|momentum|ema)/.*")
_IN_CHAIN = re.compile(r"(/?(\d+|inner_state|inner_states/[^/]+))+$")
# A container of which fewer leaves (one of so many) are like parameters is no optimizer's.
_LEAST_SHARE = 4
_USUAL = ("target", "params", "model")

Roots = tuple[tuple[str, str], ...]


class FoundRoots(NamedTuple):
    """Pairs of roots, and the candidates of containers with several."""

    pairs: Roots
    unclear: Mapping[str, tuple[str, ...]]


def is_step(name: str) -> bool:
    """Reports whether a name is that of the step."""
    return name.rpartition("/")[2] == "step"


def is_in_optimizer(name: str) -> bool:
    """Reports whether a name alone shows a leaf of an optimizer's state."""
    # Most names have neither word, which costs less to see than a regex.
    return ("_state" in name and _CONTAINER.match(name) is not None) or (
        "_slot_" in name and _GLUED_NAME.fullmatch(name) is not None
    )


def may_be_moment(name: str) -> bool:
    """Reports whether a name has a moment's word in it."""
    return is_in_optimizer(name) or not MOMENT_WORDS.isdisjoint(name.split("/"))


def _container_of(name: str) -> str | None:
    if "opt" not in name and "param_states" not in name:
        return None
    found = _CONTAINER.match(name) or _WRAPPER.match(name)
    return None if found is None else found[0]


def find_roots(leaves: Mapping[str, Any]) -> FoundRoots:
    """Finds the parameters of each optimizer's state."""
    named, bare = _by_container(leaves)
    found = _roots_of(named, leaves)
    if found.pairs:
        return found
    # Modules may be called as moments are: what is a tree of parameters itself is no container.
    roots: set[str] = set()
    moments = _of_moments(bare)
    for path, names in sorted(moments.items(), key=lambda item: -sum(map(_has_kind, item[1]))):
        if not any(path == root or _is_below(path, root) or _is_below(root, path) for root in roots):
            found = _roots_of({path: names}, leaves, moments)
            if found.pairs or found.unclear:
                named[path] = names
                roots.update(root for root, _ in found.pairs)
    return _roots_of(named, leaves)


def _has_kind(name: str) -> bool:
    return _KIND_HINT.search(name) is not None and _KIND_WORD.fullmatch(name) is not None


def find_containers(leaves: Mapping[str, Any]) -> list[str]:
    """Lists the innermost containers of optimizers' states."""
    named, bare = _by_container(leaves)
    paths = list(named or _of_moments(bare))
    return [path for path in paths if not any(_is_below(other, path) for other in paths)]


def _by_container(leaves: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Separates the leaves of containers by their paths' words."""
    containers: dict[str, list[str]] = collections.defaultdict(list)
    bare: list[str] = []
    for name in leaves:
        container = _container_of(name)
        (bare if container is None else containers[container]).append(name)
    # Modules may be called as containers are.
    for module in [path for path in containers if _is_repeated(path, containers)]:
        bare += containers.pop(module)
    return containers, bare


def _is_repeated(path: str, containers: Mapping[str, list[str]]) -> bool:
    """Tests if another container has moments of the leaves."""
    last = path.rpartition("/")[2]
    ends = {name[len(path) - len(last) :] for name in containers[path]}
    rests = (name[len(other) :] for other, names in containers.items() if other != path for name in names)
    return any(rest[found.end() :] in ends for rest in rests for found in re.finditer(f"/(?={re.escape(last)}/)", rest))


def _roots_of(
    containers: Mapping[str, list[str]], leaves: Mapping[str, Any], doubtful: Iterable[str] = ()
) -> FoundRoots:
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
        # Another moment has the parameters' tree, too.
        clear = [root for root in found if not any(root == path or _is_below(root, path) for path in doubtful)]
        found = _nearest(container, clear or found)
        if len(found) == 1:
            states.setdefault(found[0], []).append(container)
        elif found:
            unclear[container] = tuple(found)
    pairs = [(root, os.path.commonpath(found) if len(found) > 1 else found[0]) for root, found in states.items()]
    # The longest root of parameters is the nearest to a name.
    return FoundRoots(tuple(sorted(pairs, key=lambda pair: -len(pair[0]))), unclear)


def _is_standard_parameter(name: str) -> bool:
    """Reports whether a name is below a usual root."""
    return any(part in ("target", "params") for part in name.split("/", 2)[:2])


def _of_moments(names: Sequence[str]) -> dict[str, list[str]]:
    """Lists the leaves of directories with moments by their names."""
    kinds: dict[str, set[str]] = collections.defaultdict(set)
    for name in names:
        # The words cost less to find than the pattern.
        if _KIND_HINT.search(name) and not _is_standard_parameter(name) and (found := _KIND_WORD.fullmatch(name)):
            kinds[found[1]].add(found[2])
    every = set(names)
    kind_first = [
        path
        for path, seen in kinds.items()
        if any(seen.issuperset(pair) for pair in _KINDS)
        or (path and f"{path}/count" in every and not seen.isdisjoint(_LONE_KINDS))
        or (path and any(_is_copy(f"{path}/{kind}/", every) for kind in seen.intersection(_UNCOUNTED_KINDS)))
    ]
    factored = [name.removesuffix("/v_row") for name in names if name.endswith("/v_row")]
    factored = [path for path in factored if f"{path}/v_col" in every and not _is_standard_parameter(path)]
    by_ending = _by_ending(names) if factored else {}
    above: dict[str, None] = {}
    for path in factored:
        starts = [0, *(at + 1 for at, sign in enumerate(path) if sign == "/")]
        above |= dict.fromkeys([path[: max(at - 1, 0)] for at in starts if path[at:] in by_ending][:1])
    # The other states of a chain belong to the same container.
    paths = dict.fromkeys(_IN_CHAIN.sub("", path) or path for path in (*kind_first, *filter(None, above)))
    return {path: [name for name in names if name.startswith(f"{path}/" if path else "")] for path in paths}


def _is_copy(start: str, names: Collection[str]) -> bool:
    """Reports whether names below a path are all names below another path."""
    rests = [name.removeprefix(start) for name in names if name.startswith(start)]
    first, others = rests[0], rests[1:]
    roots = [name.removesuffix(first) for name in names if name.endswith(f"/{first}") and not name.startswith(start)]
    return bool(others) and any(all(f"{root}{other}" in names for other in others) for root in roots)


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
    """Lists the roots of the trees repeated in a container."""
    votes: collections.Counter[str] = collections.Counter()
    arrays = 0
    for name in names:
        rest, leaf = name[len(container) :].strip("/").split("/"), leaves[name]
        arrays += getattr(leaf, "shape", None) != ()
        votes.update(
            root for stop in (len(rest), len(rest) - 1) for root in _longest(rest[:stop], leaf, leaves, by_ending)
        )
    best = max(votes.values(), default=0)
    if _LEAST_SHARE * best < arrays:
        return []
    found = [root for root, count in votes.items() if count == best]
    # What is inside a root is found as well, below a longer root.
    return [one for one in found if not any(_is_below(one, other) for other in found)]


def _nearest(container: str, roots: Sequence[str]) -> list[str]:
    """Returns the roots with the longest common path with a container."""

    def nearness(root: str) -> tuple[int, bool]:
        pairs = enumerate(zip(root, container, strict=False))
        shared = next((at for at, pair in pairs if len(set(pair)) > 1), len(root))
        return shared, root.rpartition("/")[2] in _USUAL

    nearest = max(map(nearness, roots), default=None)
    return sorted(root for root in roots if nearness(root) == nearest)


def _longest(parts: list[str], leaf: Any, leaves: Mapping[str, Any], by_ending: Mapping[str, list[str]]) -> set[str]:
    """Returns the roots of parameters with the longest ending."""
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        roots = {root for root in by_ending.get(end, ()) if _fits(leaf, leaves[f"{root}/{end}".strip("/")])}
        if roots:
            return roots
    return set()


def _is_below(root: str, other: str) -> bool:
    return root != other and (not other or root.startswith(f"{other}/"))


def _fits(leaf: Any, param: Any) -> bool:
    """Reports whether an optimizer's leaf has dimensions of a parameter.

    A number shows nothing beside an array: counts and hyperparameters may have a parameter's name.
    """
    shape, of_param = getattr(leaf, "shape", None), getattr(param, "shape", None)
    if shape is None or of_param is None:
        return True
    if not shape and is_counted(leaf) and not is_counted(param):
        return False
    return bool(shape or not of_param) and not collections.Counter(shape) - collections.Counter((*of_param, 1))


def is_counted(leaf: Any) -> bool:
    """Reports whether a leaf has integers."""
    return getattr(getattr(leaf, "dtype", None), "kind", "") in tuple("biu")


def base_of(name: str) -> str:
    """Returns the parameter of a bundle's slot, or an empty text."""
    found = _GLUED_NAME.fullmatch(name) if "_slot_" in name else None
    return "" if found is None else found[1]


def checked_roots(roots: Iterable[Sequence[str]]) -> Roots:
    """Pairs of names without slashes at their ends."""
    return tuple((re.sub("/+$", "", params), re.sub("/+$", "", state)) for params, state in roots)


def rename_counts(
    state: Mapping[str, Any], target: Mapping[str, Any], directories: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Maps step and counts to the target's names, by their roles.

    `directories` of the optimizer's state and their new names; None if each side has a single container.
    """
    if directories is None:
        found, wanted_containers = (find_containers(side) for side in (state, target))
        # Moments that followed are in the target's container already.
        found = [path for path in found if path not in wanted_containers]
        directories = {found[0]: wanted_containers[0]} if len(found) == len(wanted_containers) == 1 else {}
    wanted = {_plain(name): name for name in target}
    have = {_plain(name) for name in state}
    # Variables of one side only, as of NNX and Optax.
    renames = {
        name: new
        for name in state
        if (new := wanted.get(_plain(name), name)) != name and new not in state and _is_of_optimizer(name)
    }

    def rename(name: str, new: str) -> None:
        if _plain(name) not in wanted and new in wanted and new not in have:
            renames[name] = wanted[new]
            have.add(new)

    chains = dict(map(_above_chain, directories.items()))
    for before, after in {**directories, **chains}.items():
        for name in state if before and after and before != after else ():
            if name.startswith(f"{before}/") and name not in renames:
                rename(name, after + _plain(name).removeprefix(before))
    steps = [[name for name in side if _plain(name).rpartition("/")[2] == "step"] for side in (state, target)]
    if all(len(names) == 1 for names in steps):
        rename(steps[0][0], _plain(steps[1][0]))
    return renames


def _above_chain(directories: tuple[str, str]) -> tuple[str, str]:
    """Removes the places in a chain that two directories share."""
    before, after = directories
    container = _container_of(f"{before}/")
    while before != container and before.rpartition("/")[2] == after.rpartition("/")[2]:
        if container is None and not _IN_CHAIN.search(before):
            break
        before, after = before.rpartition("/")[0], after.rpartition("/")[0]
    return before, after


def _is_of_optimizer(name: str) -> bool:
    """Reports whether a name is of an optimizer's state, or a step's."""
    return _container_of(name) is not None or _plain(name).rpartition("/")[2] == "step"


def _plain(name: str) -> str:
    """Removes stock Orbax' ending of NNX variables."""
    return name.removesuffix("/value")
