r"""Writes a mapping of names as few rules of `Rename`.

Names that differ in the same parts share a rule: `(.*)/decoder/(.*)` -> `\1/dec/\2`. What does not fit such rules gets
one for each kind of name, with groups for the numbers that both names have.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.transforms import Rename

_NUMBER = re.compile(r"\d+")
# In place of a number that both names have.
_MARK = "\0"

Parts = tuple[str, ...]
Rule = tuple[str, str]


class _Substitution(NamedTuple):
    """Parts in place of other parts.

    Attributes:
      old, new: the parts, with those beside them that tell them from the same parts of other names.
      place: "start", "middle" or "end" of names, or "whole".
      chunk: the parts alone.
    """

    old: Parts
    new: Parts
    place: str
    chunk: tuple[Parts, Parts]

    def rule(self) -> Rule:
        """Returns it as a rule for whole names."""
        pattern, _, count = _with_groups("/".join(self.old), 2 if self.place in ("middle", "end") else 1)
        _, replacement, _ = _with_groups("/".join(self.new), 2 if self.place in ("middle", "end") else 1)
        last = rf"\g<{count}>"
        old, new = f"{pattern}/" if pattern else "", f"{replacement}/" if replacement else ""
        if self.place == "start":
            return f"{old}(.*)", f"{new}{last}"
        if self.place == "whole":
            return pattern, replacement
        if self.place == "end":
            tail = f"/{pattern}" if pattern else ""
            return f"(.*){tail}", rf"\g<1>/{replacement}" if replacement else r"\g<1>"
        return f"(.*)/{old}(.*)", rf"\g<1>/{new}{last}"


def _with_groups(text: str, first: int) -> tuple[str, str, int]:
    """Returns a text's pattern, replacement and next group."""
    pattern, replacement, group = "", "", first
    for at, piece in enumerate(text.split(_MARK)):
        if at:
            pattern, replacement, group = rf"{pattern}(\d+)", rf"{replacement}\g<{group}>", group + 1
        pattern, replacement = pattern + re.escape(piece), replacement + piece.replace("\\", r"\\")
    return pattern, replacement, group


@dataclasses.dataclass
class _Kind:
    """Names that differ only in numbers, with their changes.

    Attributes:
      name: one of them, as it is by now.
      chunks: its parts with marks, and what takes their place; equal where nothing does.
      done: whether each has been replaced.
      template: all of it with marks, and the template of the new name.
    """

    name: str
    numbers: tuple[str, ...]
    chunks: list[tuple[Parts, Parts]]
    done: list[bool]

    def current(self, which: Sequence[int] | None = None, replaced: int | None = None) -> Parts:
        """Returns the present parts of some chunks, with marks."""
        which = range(len(self.chunks)) if which is None else which
        return tuple(part for at in which for part in self.chunks[at][self.done[at] or at == replaced])

    def text(self, parts: Parts) -> str:
        """Returns parts with the numbers of the name."""
        numbers = iter(self.numbers)
        return re.sub(_MARK, lambda _: next(numbers, ""), "/".join(parts))


def rename_rules(names: Mapping[str, str], others: Collection[str]) -> list[Rename]:
    """Returns transforms that rename leaves and keep the rest."""
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return []
    fixed = [name for name in (*others, *names) if name not in changed]
    for renames in _attempts(changed, fixed):
        if _is_right(renames, changed, fixed):
            return renames
    return [Rename(tuple((re.escape(old), new.replace("\\", r"\\")) for old, new in changed.items()))]


def _attempts(changed: Mapping[str, str], fixed: Collection[str]) -> Iterator[list[Rename]]:
    separators = _separators(changed, fixed)
    if separators is None:
        yield _by_parts(changed, fixed)
    else:
        # Parts are replaced where '/' separates them.
        theirs, ours = separators
        if theirs == ".":
            first = _separator_rules(changed, *separators)
            yield [first, *_by_parts({old.replace(theirs, ours): new for old, new in changed.items()}, fixed)]
        else:
            between = {old: new.replace(ours, theirs) for old, new in changed.items()}
            yield [*_by_parts(between, fixed), _separator_rules(between.values(), *separators)]
    yield [Rename(tuple(dict.fromkeys(_whole_rule(old, new) for old, new in changed.items())))]


def _is_right(renames: Iterable[Rename], changed: Mapping[str, str], fixed: Collection[str]) -> bool:
    """Tests rules on all names."""
    state = {name: name for name in (*changed, *fixed)}
    for rename in renames:
        rules = [(re.compile(str(pattern)), str(new)) for pattern, new in rename.rules]
        for old, name in state.items():
            found = ((match, new) for rule, new in rules if (match := rule.fullmatch(name)) is not None)
            for match, new in itertools.islice(found, 1):
                state[old] = match.expand(new)
    return all(state[old] == new for old, new in changed.items()) and all(state[name] == name for name in fixed)


def _separators(changed: Mapping[str, str], fixed: Collection[str]) -> tuple[str, str] | None:
    """Returns the separators of old and new names."""
    for one, other in ((".", "/"), ("/", ".")):
        if not any(other in name for name in changed) and not any(one in name for name in changed.values()):
            if any(one in name for name in changed) and any(other in name for name in changed.values()):
                return one, other
    return None


def _separator_rules(names: Iterable[str], old: str, new: str) -> Rename:
    counts = sorted({name.count(old) for name in names} - {0})
    part = f"([^{old}]*)"
    return Rename(
        tuple(
            (re.escape(old).join([part] * (count + 1)), new.join(rf"\g<{group + 1}>" for group in range(count + 1)))
            for count in counts
        )
    )


def _by_parts(changed: Mapping[str, str], fixed: Collection[str]) -> list[Rename]:
    """Returns a transform for each set of substitutions that different names need."""
    examples = {_template(old, new): (old, new) for old, new in changed.items()}
    ends = _ends(changed), _ends(changed.values())
    every = [_kind_of_change(*example, ends) for example in examples.values()]
    steps: list[tuple[dict[Rule, None], set[int]]] = []
    while found := _next_substitution(every, fixed):
        substitution, hit = found
        for at, chunk in hit.items():
            every[at].done[chunk] = True
            every[at].name = every[at].text(every[at].current())
        if not steps or not steps[-1][1].isdisjoint(hit):
            steps.append(({}, set()))
        steps[-1][0][substitution.rule()] = None
        steps[-1][1].update(hit)
    rest = dict.fromkeys(
        _whole_rule_of(kind.current(), tuple(part for _, new in kind.chunks for part in new))
        for kind in every
        if not all(kind.done)
    )
    return [Rename(tuple(rules)) for rules in (*(rules for rules, _ in steps), rest) if rules]


def _template(old: str, new: str) -> tuple[str, str]:
    """Returns both names with marks for their common numbers."""
    numbers, wanted = _NUMBER.findall(old), _NUMBER.findall(new)
    carried: list[int] = []
    for number in wanted:
        at = next((at for at in range(carried[-1] + 1 if carried else 0, len(numbers)) if numbers[at] == number), None)
        if at is None:
            return old, new
        carried.append(at)
    places = iter(range(len(numbers)))
    marked = _NUMBER.sub(lambda match: _MARK if next(places) in carried else match[0], old)
    return marked, _NUMBER.sub(_MARK, new)


def _ends(names: Iterable[str]) -> tuple[Parts, Parts]:
    """Returns the parts that all names begin and end with."""
    every = [tuple(name.split("/")) for name in names]
    # Numbers are part of the names.
    most = min(len(parts) for parts in every) - 1
    first, last = (
        sum(1 for _ in itertools.takewhile(lambda at: len({parts[at] for parts in every}) == 1, order))
        for order in (range(most), range(-1, -1 - most, -1))
    )
    first, last = (0, 0) if first + last > most else (first, last)
    return every[0][:first], every[0][len(every[0]) - last :]


def _kind_of_change(old: str, new: str, ends: tuple[tuple[Parts, Parts], tuple[Parts, Parts]]) -> _Kind:
    theirs, ours = (tuple(text.split("/")) for text in _template(old, new))
    (start, end), (new_start, new_end) = ends
    if any(_MARK in part for part in (*theirs[: len(start)], *theirs[len(theirs) - len(end) :])):
        start = end = new_start = new_end = ()
    inner = theirs[len(start) : len(theirs) - len(end)], ours[len(new_start) : len(ours) - len(new_end)]
    chunks = [(start, new_start), *_changed_parts(*inner), (end, new_end)]
    chunks = [(one, other) for one, other in chunks if one or other]
    done = [one == other for one, other in chunks]
    numbers = _NUMBER.findall(new) if _MARK in "/".join(theirs) else []
    return _Kind(old, tuple(numbers), chunks, done)


def _changed_parts(old: Parts, new: Parts) -> Iterator[tuple[Parts, Parts]]:
    for tag, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        pieces = old[start:end], new[new_start:new_end]
        yield from [pieces] if tag == "equal" else _split_at_change(*pieces)


def _split_at_change(old: Parts, new: Parts) -> Iterator[tuple[Parts, Parts]]:
    """Splits parts and their replacements at common places."""
    marked = [next((at for at, part in enumerate(parts) if _MARK in part), len(parts)) for parts in (old, new)]
    same = min(marked)
    if len(old) == len(new):
        yield from (((one,), (other,)) for one, other in zip(old, new, strict=True))
    elif max(marked) - same > 1 or marked[0] == len(old) or marked[1] == len(new):
        yield old, new
    else:
        # One name has the number in a part of its own: `layers_0` and `layers/0`.
        yield from (((one,), (other,)) for one, other in zip(old[:same], new[:same], strict=True))
        yield old[same : marked[0] + 1], new[same : marked[1] + 1]
        rest = old[marked[0] + 1 :], new[marked[1] + 1 :]
        if any(rest):
            yield from _split_at_change(*rest)


def _substitutions(kinds: list[_Kind]) -> list[_Substitution]:
    """Returns substitutions to try, the most frequent first."""
    found: dict[tuple[int, _Substitution], int] = {}
    for kind in kinds:
        for at, (old, new) in enumerate(kind.chunks):
            if kind.done[at] or "".join(old).count(_MARK) != "".join(new).count(_MARK):
                continue
            before, after = kind.current(range(at)), kind.current(range(at + 1, len(kind.chunks)))
            for context, (left, right) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
                one, other = before[len(before) - left :], after[:right]
                if len(one) < left or len(other) < right or (not context and not old and before and after):
                    continue
                is_first, is_last = len(before) == left, len(after) == right
                place = "whole" if is_first and is_last else "start" if is_first else "end" if is_last else "middle"
                key = context, _Substitution((*one, *old, *other), (*one, *new, *other), place, (old, new))
                found[key] = found.get(key, 0) + 1
    return [one for _, one in sorted(found, key=lambda key: (key[0], -found[key], key[1].place))]


def _next_substitution(kinds: list[_Kind], fixed: Collection[str]) -> tuple[_Substitution, dict[int, int]] | None:
    """Returns the first harmless substitution, with its chunks."""
    for substitution in _substitutions(kinds):
        hit = _hit(substitution, kinds, fixed)
        if hit is not None:
            return substitution, hit
    return None


def _hit(substitution: _Substitution, kinds: list[_Kind], fixed: Collection[str]) -> dict[int, int] | None:
    """Returns the replaced chunk of each kind, or None."""
    pattern, new = substitution.rule()
    regex = re.compile(pattern)
    hit: dict[int, int] = {}
    for at, kind in enumerate(kinds):
        match = regex.fullmatch(kind.name)
        if match is None:
            continue
        result = match.expand(new)
        chunk = next(
            (
                chunk
                for chunk, is_done in enumerate(kind.done)
                if not is_done
                and kind.chunks[chunk] == substitution.chunk
                and kind.text(kind.current(replaced=chunk)) == result
            ),
            None,
        )
        if chunk is None:
            return None
        hit[at] = chunk
    return hit if hit and not any(regex.fullmatch(name) for name in fixed) else None


def _whole_rule(old: str, new: str) -> Rule:
    theirs, ours = _template(old, new)
    return _whole_rule_of((theirs,), (ours,))


def _whole_rule_of(old: Parts, new: Parts) -> Rule:
    return _with_groups("/".join(old), 1)[0], _with_groups("/".join(new), 1)[1]
