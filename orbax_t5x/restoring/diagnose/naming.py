"""Hypotheses: the checkpoint has the missing leaves under other names.

Names that differ only in their beginnings show another prefix. Names of one shape that differ in one or two parts show
renamed parts, if all missing leaves agree. If the words show what is meant (an abbreviation, a wrong letter) it is a
rule that a program can follow, else a question: equal shapes make no two modules one.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from orbax_t5x.optim.optimizer_names import KINDS, is_in_optimizer, may_be_moment
from orbax_t5x.restoring.diagnose.hypothesis import Remedy, UnmatchedLeaves, as_template
from orbax_t5x.restoring.diagnose.other_shapes import is_layer_word
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms import AssignmentMap, Keep, Rename

# Fewer leaves show no prefix, unless the target has no others.
_LEAST_ALIKE = 2
# Abbreviations of fewer letters stand for too many words: `k` is a key's or a kernel's.
_LEAST_LETTERS = 3
# Shorter words that differ in one letter are other words: `mu` and `nu`, `row` and `rot`.
_LEAST_MISSPELT = 4
# Parts of one name that may be renamed at once, renamed parts that are shown, and candidates that are compared.
_MOST_PARTS = 2
_SHOWN_PARTS = 3
_MOST_CANDIDATES = 64
# Leaves that a rule names one by one.
_MOST_NAMES = 8
# A run of capitals or small letters, one capital before small ones, or a number: `mlpBlock_03` is mlp, block, 03.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
# Words for one of several layers, of which a model has one kind.
_LAYER_WORDS = frozenset({"layer", "layers", "block", "blocks", "h"})
# Parts that hold a whole model.
_ROOTS = frozenset({"target", "params", "model", "module", "transformer", "state", "variables", "base", "base_model"})
# In place of a number that is the same on both sides.
_NUMBER = "#"

_ADVICE = "if the two are the same module, map the names with a rule of Rename"

Pair = tuple[str, str]
"""A name in a checkpoint, and one in a target; or parts of them, with `#` for a number that both have."""


def other_item(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes the item whose leaves have the target's names."""
    for item in unmatched.items if len(unmatched.items) > 1 else ():
        start = f"{re.escape(item)}/"
        rules = (Keep((f"{start}.*",)), Rename(((f"{start}(.*)", r"\1"),)))
        yield Remedy(rules, f"the checkpoint's item {item!r} has leaves of these names", is_first=True, item=item)


def other_prefix(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes a rule for another beginning of names."""
    missing = _model_names(unmatched)
    named_alike = _by_ending(unmatched.free)
    counts: collections.Counter[Pair] = collections.Counter()
    for name in missing:
        shape = unmatched.target.leaves[name].shape
        parts = name.split("/")
        endings = (("/".join(parts[at:]), shape) for at in range(len(parts)))
        alike = next((named_alike[ending] for ending in endings if ending in named_alike), [])
        counts.update({_prefixes(stored, name) for stored in alike[:_MOST_CANDIDATES]})
    (prefixes, most), (_, second) = [*counts.most_common(2), (("", ""), 0), (("", ""), 0)][:2]
    theirs, ours = prefixes
    is_nesting = _is_nesting(theirs, ours)
    is_whole = is_nesting and most == len(unmatched.target.leaves)
    if most == second or theirs == ours or (most < _LEAST_ALIKE and not is_whole):
        return
    reason = f"names begin with {theirs!r} in the checkpoint, and with {ours!r} in the target"
    if not theirs or not ours:
        reason = f"only in the {'checkpoint' if theirs else 'target'} do names begin with {theirs or ours!r}"
    advice = None if is_nesting else _ADVICE
    # Optimizers follow a Rename; the command line has options for an AssignmentMap.
    for kind, old, new in ((Rename, theirs, ours), (AssignmentMap, ours, theirs)):
        yield Remedy((kind(((f"{re.escape(old)}(.*)", f"{as_template(new)}\\1"),)),), reason, advice)


def _by_ending(leaves: Mapping[str, Any]) -> dict[Hashable, list[str]]:
    """Maps each ending of a name, with the leaf's shape, to the names that have it."""
    names: dict[Hashable, list[str]] = {}
    for name, leaf in leaves.items():
        if may_be_moment(name):
            continue
        parts, shape = name.removesuffix("/value").split("/"), tuple(leaf.shape)
        for at in range(len(parts)):
            names.setdefault(("/".join(parts[at:]), shape), []).append(name)
    return names


def _model_names(unmatched: UnmatchedLeaves) -> list[str]:
    """Returns unfilled names of the model; moments follow their parameters, and no rule of names."""
    return [name for name in unmatched.unfilled_shapes if not is_in_optimizer(name)]


def _prefixes(theirs: str, ours: str) -> Pair:
    """Cuts the common parts at the end of two names."""
    parts = [name.split("/")[::-1] for name in (theirs.removesuffix("/value"), ours)]
    shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*parts, strict=False)))
    old, new = ("".join(f"{part}/" for part in reversed(side[shared:])) for side in parts)
    return old, new


def _is_nesting(theirs: str, ours: str) -> bool:
    """Returns True if a prefix only adds levels around the model."""
    old, new = ([part for part in prefix.split("/") if part and part not in _ROOTS] for prefix in (theirs, ours))
    more, fewer = (old, new) if len(old) > len(new) else (new, old)
    return more[len(more) - len(fewer) :] == fewer and not any(map(_is_one_layer, more))


def _is_one_layer(part: str) -> bool:
    word = part.rstrip("0123456789")
    return word != part and (not word or is_layer_word(word.rstrip("_")))


# -- other parts


def renamed_parts(unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
    """Proposes rules for other words in the names, if each missing leaf has one reading."""
    free = _by_masked(unmatched.free)
    known: dict[Pair, None] = {}
    unknown: collections.Counter[Pair] = collections.Counter()
    names: dict[str, str] = {}
    for name in _model_names(unmatched):
        shape = unmatched.target.leaves[name].shape
        readings = {
            pairs: stored
            for masked in _masked(name)
            for stored in free.get((masked, shape), ())[:_MOST_CANDIDATES]
            if (pairs := _differing_parts(stored, name))
        }
        plain = [pairs for pairs in readings if all(_is_same_word(*pair) for pair in pairs)]
        if len(plain) == 1:
            known.update(dict.fromkeys(plain[0]))
            names[readings[plain[0]]] = name
        elif len(readings) == 1:
            unknown.update(*readings)
    pairs = list(known or unknown)
    is_one_unknown = len(unknown) == 1 and unknown.total() >= _LEAST_ALIKE
    if not (known or is_one_unknown) or not _is_one_to_one(pairs):
        return
    olds, news = (listed([repr(pair[side].replace(_NUMBER, "i")) for pair in pairs], _SHOWN_PARTS) for side in (0, 1))
    reason = f"where the target's names have {news}, the checkpoint's have {olds}"
    advice = None if known else _ADVICE
    yield Remedy(tuple([Rename((_rule(old, new),)) for old, new in pairs]), reason, advice)
    if len(pairs) == 1:
        yield Remedy((AssignmentMap((_rule(*reversed(pairs[0])),)),), reason, advice)
    if known and len(names) <= _MOST_NAMES:
        # Where other leaves keep the words.
        rules = tuple([(re.escape(stored), as_template(name)) for stored, name in names.items()])
        yield Remedy((Rename(rules),), reason)


def _is_one_to_one(pairs: list[Pair]) -> bool:
    return len({old for old, _ in pairs}) == len(pairs) == len({new for _, new in pairs})


def _by_masked(leaves: Mapping[str, Any]) -> dict[Hashable, list[str]]:
    """Maps names with one or two parts masked, and the leaf's shape, to the names."""
    names: dict[Hashable, list[str]] = {}
    for name, leaf in leaves.items():
        for masked in () if may_be_moment(name) else _masked(name):
            names.setdefault((masked, tuple(leaf.shape)), []).append(name)
    return names


def _masked(name: str) -> Iterator[tuple[str, ...]]:
    parts = name.removesuffix("/value").split("/")
    for count in range(1, _MOST_PARTS + 1):
        for places in itertools.combinations(range(len(parts)), count):
            if count < len(parts):
                yield tuple(["" if at in places else part for at, part in enumerate(parts)])


def _differing_parts(theirs: str, ours: str) -> tuple[Pair, ...]:
    """Returns the parts in which names differ; nothing if they cannot be one name."""
    pairs: list[Pair] = []
    for pair in zip(*(name.removesuffix("/value").split("/") for name in (theirs, ours)), strict=True):
        old, new = (list(map(int, re.findall(r"\d+", part))) for part in pair)
        if pair[0] == pair[1]:
            continue
        if not KINDS.isdisjoint(pair) or _NUMBER in "".join(pair) or (old and new and old != new):
            return ()
        is_numbered = old == new and len(old) == 1
        pairs.append((re.sub(r"\d+", _NUMBER, pair[0]), re.sub(r"\d+", _NUMBER, pair[1])) if is_numbered else pair)
    return tuple(pairs)


def _rule(old: str, new: str) -> Pair:
    """Returns the rule for a part of a whole name."""
    pattern = re.escape(old).replace(re.escape(_NUMBER), r"(\d+)")
    if _NUMBER in old:
        return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new).replace(_NUMBER, chr(92) + 'g<2>')}\\3"
    return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new)}\\2"


def _is_same_word(old: str, new: str) -> bool:
    """Returns True if words are equal, abbreviate each other, or one is misspelt."""
    words = [_words(part) for part in (old, new)]
    if _LAYER_WORDS.issuperset(word for part in words for word in part if not word.isdecimal()):
        return True
    if re.sub(r"[_\d]+", "", old) == re.sub(r"[_\d]+", "", new):  # `wi` and `wi_0`
        return True
    return len(words[0]) == len(words[1]) and all(
        _is_short_for(*sorted(pair, key=len)) or _is_misspelt(*sorted(pair, key=len))
        for pair in zip(*words, strict=True)
    )


def _words(name: str) -> tuple[str, ...]:
    """Returns a name's words in small letters, numbers normalized."""
    return tuple([str(int(word)) if word.isdecimal() else word.lower() for word in _WORD.findall(name)])


def _is_short_for(short: str, long: str) -> bool:
    letters = iter(long)
    return short == long or (
        len(short) >= _LEAST_LETTERS and short[0] == long[0] and all(letter in letters for letter in short)
    )


def _is_misspelt(short: str, long: str) -> bool:
    """Returns True if words differ in one letter, or in the order of two neighbours."""
    if short.isdecimal() or len(short) < _LEAST_MISSPELT or len(long) - len(short) > 1:
        return False
    start = next((at for at, (old, new) in enumerate(zip(short, long, strict=False)) if old != new), len(short))
    if len(long) > len(short):
        return short[start:] == long[start + 1 :]
    is_swapped = short[start : start + 2] == long[start : start + 2][::-1]
    return short[start + 1 :] == long[start + 1 :] or (is_swapped and short[start + 2 :] == long[start + 2 :])
