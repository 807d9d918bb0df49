"""Single rules of a list of transforms, and their entries in a record.

A named source and a migration are lists of rules of their own; all others are single rules. No class of transform is
known here, only attributes: `steps` with `rules_of_source` (a named source) or `migration_name` and `is_assumed` (a
migration), `stands_for_found` (`"auto"`), `only_selects`, `recorded_patterns`, `digest()` and
`describe()`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from orbax_t5x.provenance.digests import digest_of, qualified_name
from orbax_t5x.provenance.records import Entry
from orbax_t5x.trees.narrow import is_list_or_tuple

# A record is stored with every step: longer texts are cut. The digest counts all of a rule.
_MOST_CHARACTERS = 300
_FIELDS_OF_PATTERNS = ("pattern", "patterns", "rules", "assignment_map")


@dataclasses.dataclass(frozen=True, eq=False)
class RuleStep:
    """A single rule.

    Attributes:
      transform: a transform, a function, or the placeholder of `"auto"`.
      source: name of the source on whose leaves it runs; "" for all leaves.
      name: name of the migration that it belongs to, or "".
      is_found: whether `"auto"` found it.
      is_assumed: whether a checkpoint without a record has it (`Migrations.since`).
    """

    transform: Any
    source: str = ""
    name: str = ""
    is_found: bool = False
    is_assumed: bool = False

    @property
    def only_selects(self) -> bool:
        """True if the rule changes no value and no name of what it keeps."""
        return getattr(self.transform, "only_selects", False) is True

    @property
    def is_placeholder(self) -> bool:
        """True for `"auto"` before its rules were found."""
        return getattr(self.transform, "stands_for_found", False) is True

    @functools.cached_property
    def entry(self) -> Entry:
        """The entry of the rule in a record."""
        entry: dict[str, Any] = {"text": _text_of(self.transform), "digest": digest_of(self.transform)}
        patterns = list(dict.fromkeys(_patterns_of(self.transform)))
        optional = {"patterns": patterns, "source": self.source, "name": self.name}
        entry.update({key: value for key, value in optional.items() if value})
        return {**entry, "auto": True} if self.is_found or self.is_placeholder else entry


def steps_of(transforms: Iterable[Any], found: Iterable[Any] = ()) -> tuple[RuleStep, ...]:
    """Returns the single rules of a list of transforms; `found` are those that `"auto"` found."""
    ids = frozenset(map(id, found))
    return tuple(step for transform in transforms for step in _flattened(RuleStep(transform), ids))


def _flattened(step: RuleStep, found: Collection[int]) -> Iterator[RuleStep]:
    if not _is_list(step.transform):
        yield dataclasses.replace(step, is_found=id(step.transform) in found)
        return
    listed = step.transform
    source = getattr(listed, "rules_of_source", step.source)
    name, is_assumed = getattr(listed, "migration_name", step.name), getattr(listed, "is_assumed", False)
    for transform in listed.steps:
        yield from _flattened(RuleStep(transform, source, name, is_assumed=is_assumed), found)


def _is_list(transform: Any) -> bool:
    return hasattr(transform, "rules_of_source") or hasattr(transform, "migration_name")


def without_skipped(transforms: Sequence[Any], skipped: Collection[int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the transforms that are applied, and the positions of those that are not.

    Named sources and migrations keep only the rules that are applied; other transforms stay where they are.

    Args:
      transforms: as given to `steps_of`.
      skipped: positions among the single rules.
    """
    numbers = itertools.count()
    remaining = [_remaining(transform, skipped, numbers) for transform in transforms]
    chain = [transform if part is None else part for transform, part in zip(transforms, remaining, strict=True)]
    return tuple(chain), tuple(position for position, part in enumerate(remaining) if part is None)


def _remaining(transform: Any, skipped: Collection[int], numbers: Iterator[int]) -> Any:
    """Returns a transform without its skipped rules; None if it is a skipped rule itself."""
    if not _is_list(transform):
        return None if next(numbers) in skipped else transform
    parts = [_remaining(part, skipped, numbers) for part in transform.steps]
    if all(part is step for part, step in zip(parts, transform.steps, strict=True)):
        return transform
    return dataclasses.replace(transform, steps=tuple(part for part in parts if part is not None))


def _text_of(transform: Any) -> str:
    describe = None if isinstance(transform, type) else getattr(transform, "describe", None)
    if callable(describe):
        text = str(describe())
    elif isinstance(transform, functools.partial):
        arguments = [*map(repr, transform.args), *(f"{key}={value!r}" for key, value in transform.keywords.items())]
        text = f"{qualified_name(transform)}({', '.join(arguments)})"
    else:
        text = qualified_name(transform)
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


def _patterns_of(transform: Any) -> Iterator[str]:
    """Yields the class and the pattern of each rule inside a transform."""
    if isinstance(transform, functools.partial):
        kind, arguments = qualified_name(transform), [*transform.args, *transform.keywords.values()]
    elif hasattr(transform, "recorded_patterns"):
        kind, arguments = type(transform).__name__, [transform.recorded_patterns]
    else:
        kind = type(transform).__name__
        arguments = [getattr(transform, field, ()) for field in _FIELDS_OF_PATTERNS]
        for part in (getattr(transform, "transform", None), *getattr(transform, "steps", ())):
            yield from () if part is None else _patterns_of(part)
    for argument in arguments:
        for rule in argument if is_list_or_tuple(argument) else (argument,):
            pattern: Any = rule[0] if is_list_or_tuple(rule) and rule else rule
            pattern = cast("re.Pattern[Any]", pattern).pattern if isinstance(pattern, re.Pattern) else pattern
            if isinstance(pattern, str):
                yield f"{kind}: {pattern}"
