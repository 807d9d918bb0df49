"""Hypothesis: the checkpoint has the missing leaves under other names.

Many leaves are paired by an alignment: if all pairs differ in a prefix, or in the same parts of names, that is one
mistake. If the words show what is meant it is a rule, else advice: equal shapes make no two modules one.

A single leaf gets a rule only where names differ in next to nothing, since a wrong rule that runs gives wrong weights:
shape, dtype, numbers and the last part are equal, and one word is missing, additional or misspelt by one letter. A
leaf that could mean two others, or two that could mean the same, get no rule.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.optimizer_names import KINDS, may_be_moment
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Remedy, UnmatchedLeaves, as_template, model_leaves
from orbax_t5x.restoring.fitting import is_layer_word
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms import AssignmentMap, Rename

# A single leaf shows no consistent renaming.
_LEAST_ALIKE = 2
# Abbreviations of fewer letters stand for too many words: `k` is a key's or a kernel's.
_LEAST_LETTERS = 3
# Shorter words that differ in one letter are other words: `mu` and `nu`, `row` and `rot`.
_LEAST_MISSPELT = 4
# Leaves with equal shape, dtype, numbers and last part that are compared; a model with more has no telling names.
_MOST_COMPARED = 256
# Missing leaves that are looked up, and renamed parts that are shown.
_LOOKUPS = 20
_SHOWN_PARTS = 3
# A run of capitals or small letters, one capital before small ones, or a number: `mlpBlock_03` is mlp, block, 03.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
# Words for one of several layers, of which a model has one kind.
_LAYER_WORDS = frozenset({"layer", "layers", "block", "blocks", "h"})
# Parts that hold a whole model.
_ROOTS = frozenset({"target", "params", "model", "module", "transformer", "state", "variables", "base", "base_model"})
# In place of a number that is the same on both sides.
_NUMBER = "#"
_ADVICE = "if the two are the same module, map the names with a rule of AssignmentMap or Rename"
_moves_between = on_demand.function("orbax_t5x.rules.alignment.moves", "moves_between")

Words = tuple[str, ...]
Pair = tuple[str, str]
"""A name in a checkpoint, and one in a target; or parts of them, with `#` for a number that both have."""


def other_names(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes rules for another prefix, or for other parts of names."""
    shapes = unmatched.unfilled_shapes
    missing = model_leaves(shapes)
    is_moment = may_be_moment(missing[0])
    free = {name: value for name, value in unmatched.free.items() if may_be_moment(name) == is_moment}
    # A leaf of a shape that the other side lacks would leave its neighbours open.
    common = {shapes[name] for name in missing}.intersection(tuple(value.shape) for value in free.values())
    wanted = {name: unmatched.target.leaves[name] for name in missing if shapes[name] in common}
    if len(wanted) < _LEAST_ALIKE:
        return
    free = {name: value for name, value in free.items() if tuple(value.shape) in common}
    moves = _moves_between(free, wanted, may_contradict=True)
    pairs = [(move.sources[0], ours) for ours, move in moves.items() if move.axis is None and len(move.sources) == 1]
    yield from _of_prefix(pairs)
    if unmatched.missing and len(pairs) == len(missing):
        yield from _of_parts(pairs)


def similar_names(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains missing leaves by another word in their names."""
    if not unmatched.takes_rules:
        return
    names = SimilarNames({name: one.leaf for name, one in unmatched.wanted.items()}, unmatched.free)
    for name in itertools.islice(unmatched.wanted, _LOOKUPS):
        same = names.to(name)
        if same is not None:
            fix = Fix.adding(AssignmentMap(((re.escape(name), as_template(same)),)))
            message = f"the checkpoint has no such leaf; {same!r} has its shape and dtype"
            yield Explanation(Problem("missing", name, message, fix), (name,))


# -- another prefix


def _of_prefix(pairs: list[Pair]) -> Iterator[Remedy]:
    counts = collections.Counter(map(_prefixes, pairs))
    (found, most), *others = [*counts.most_common(2), (("", ""), 0)][:2]
    if most < _LEAST_ALIKE or found[0] == found[1] or (others and others[0][1] == most):
        return
    theirs, ours = found
    reason = f"names begin with {theirs!r} in the checkpoint, and with {ours!r} in the target"
    if not theirs or not ours:
        reason = f"only in the {'checkpoint' if theirs else 'target'} do names begin with {theirs or ours!r}"
    advice = None if _is_nesting(theirs, ours) else _ADVICE
    for kind, old, new in ((AssignmentMap, ours, theirs), (Rename, theirs, ours)):
        yield Remedy((kind(((f"{re.escape(old)}(.*)", f"{as_template(new)}\\1"),)),), reason, advice)


def _prefixes(pair: Pair) -> Pair:
    """Cuts the common parts at the end of two names."""
    parts = [name.split("/")[::-1] for name in pair]
    shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*parts, strict=False)))
    if not shared:
        return "", ""
    theirs, ours = ("".join(f"{part}/" for part in reversed(side[shared:])) for side in parts)
    return theirs, ours


def _is_nesting(theirs: str, ours: str) -> bool:
    """Tests if a prefix only adds levels around the model."""
    one, other = ([part for part in prefix.split("/") if part and part not in _ROOTS] for prefix in (theirs, ours))
    more, fewer = (one, other) if len(one) > len(other) else (other, one)
    return more[len(more) - len(fewer) :] == fewer and not any(map(_is_one_layer, more))


def _is_one_layer(part: str) -> bool:
    word = part.rstrip("0123456789")
    return word != part and (not word or is_layer_word(word.rstrip("_")))


# -- other parts


def _of_parts(pairs: list[Pair]) -> Iterator[Remedy]:
    differing = [_differing_parts(*pair) for pair in pairs]
    renamed = () if None in differing else tuple(dict.fromkeys(pair for found in differing for pair in found or ()))
    is_known = all(_is_abbreviated(*pair) for pair in renamed)
    if not renamed or not (is_known or len(renamed) == 1):
        return
    theirs, ours = (
        listed([repr(pair[side].replace(_NUMBER, "i")) for pair in renamed], _SHOWN_PARTS) for side in (0, 1)
    )
    reason = f"where the target's names have {ours}, the checkpoint's have {theirs}"
    advice = None if is_known else _ADVICE
    yield Remedy(tuple([Rename((_rule(old, new),)) for old, new in renamed]), reason, advice)
    if len(renamed) == 1:
        yield Remedy((AssignmentMap((_rule(*reversed(renamed[0])),)),), reason, advice)


def _differing_parts(theirs: str, ours: str) -> list[Pair] | None:
    """Returns the parts in which names differ, or None."""
    if theirs.count("/") != ours.count("/"):
        return None
    found: list[Pair] = []
    for pair in zip(theirs.split("/"), ours.split("/"), strict=True):
        one, another = (list(map(int, re.findall(r"\d+", part))) for part in pair)
        if pair[0] == pair[1]:
            continue
        if not KINDS.isdisjoint(pair) or _NUMBER in "".join(pair) or (one and another and one != another):
            return None
        is_numbered = one == another and len(one) == 1
        found.append((re.sub(r"\d+", _NUMBER, pair[0]), re.sub(r"\d+", _NUMBER, pair[1])) if is_numbered else pair)
    return found


def _rule(old: str, new: str) -> tuple[str, str]:
    """Returns the rule for a part of a whole name."""
    pattern = re.escape(old).replace(re.escape(_NUMBER), r"(\d+)")
    if _NUMBER in old:
        return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new).replace(_NUMBER, chr(92) + 'g<2>')}\\3"
    return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new)}\\2"


def _is_abbreviated(one: str, other: str) -> bool:
    """Tests if words are equal, or abbreviate each other."""
    words = [_words(part) for part in (one, other)]
    if _LAYER_WORDS.issuperset(word for part in words for word in part if not word.isdecimal()):
        return True
    if re.sub(r"[_\d]+", "", one) == re.sub(r"[_\d]+", "", other):  # `wi` and `wi_0`
        return True
    return len(words[0]) == len(words[1]) and all(
        _is_short_for(*sorted(pair, key=len)) for pair in zip(*words, strict=True)
    )


def _is_short_for(short: str, long: str) -> bool:
    letters = iter(long)
    return short == long or (
        len(short) >= _LEAST_LETTERS and short[0] == long[0] and all(letter in letters for letter in short)
    )


# -- a word in one name


class SimilarNames:
    """Look-up of free leaves by missing leaves."""

    def __init__(self, missing: Mapping[str, Any], free: Mapping[str, Any]):
        self._leaves = missing
        self._missing = _by_key(missing)
        self._free = _by_key(free)

    def to(self, name: str) -> str | None:
        """Returns the unambiguous match of a missing leaf, or None."""
        words = _words(name)
        key = _key(name, self._leaves[name], words)
        found = _related(words, self._free.get(key, {}))
        if len(found) != 1:
            return None
        (other,) = found
        return other if _related(found[other], self._missing.get(key, {})).keys() == {name} else None


def _related(words: Words, others: Mapping[str, Words]) -> dict[str, Words]:
    if len(others) > _MOST_COMPARED:
        return {}
    return {name: other for name, other in others.items() if _nearly_equal(words, other)}


def _by_key(leaves: Mapping[str, Any]) -> dict[Hashable, dict[str, Words]]:
    found: dict[Hashable, dict[str, Words]] = {}
    for name, leaf in leaves.items():
        words = _words(name)
        found.setdefault(_key(name, leaf, words), {})[name] = words
    return found


def _words(name: str) -> Words:
    """Returns a name's words in small letters, numbers normalized."""
    found = _WORD.findall(name)
    return tuple([str(int(word)) if word.isdecimal() else word.lower() for word in found])


def _key(name: str, leaf: Any, words: Words) -> Hashable:
    """Returns the common key of leaves that may correspond."""
    numbers = tuple([word for word in words if word.isdecimal()])
    return tuple(leaf.shape), str(leaf.dtype), numbers, _words(name.rpartition("/")[2])


def _nearly_equal(one: Words, other: Words) -> bool:
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    start = _first_difference(short, long)
    if len(long) - len(short) == 1:
        # A single word, such as `kernel`, is the end of too many names.
        return len(short) > 1 and short[start:] == long[start + 1 :] and long[start] not in KINDS
    return (
        len(long) == len(short) and short[start + 1 :] == long[start + 1 :] and _is_misspelt(short[start], long[start])
    )


def _is_misspelt(one: str, other: str) -> bool:
    """Tests for a wrong letter, or two swapped neighbours."""
    if one.isdecimal() or min(len(one), len(other)) < _LEAST_MISSPELT or abs(len(one) - len(other)) > 1:
        return False
    short, long = sorted((one, other), key=len)
    start = _first_difference(short, long)
    if len(long) > len(short):
        return short[start:] == long[start + 1 :]
    if short[start + 1 :] == long[start + 1 :]:
        return True
    return short[start : start + 2] == long[start : start + 2][::-1] and short[start + 2 :] == long[start + 2 :]


def _first_difference(short: Words | str, long: Words | str) -> int:
    return next((at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
