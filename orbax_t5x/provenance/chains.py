"""Descriptions of a chain of transforms for a record.

No class of transform is known here, only its methods `digest()` and `describe()`, its attribute `only_selects`, and
`steps` of migrations and of named sources.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from orbax_t5x import on_demand
from orbax_t5x.trees.narrow import is_list_or_tuple, is_mapping

# Of chains with transforms only.
_DIGESTS = "orbax_t5x.provenance.digests"
_digest_of_chain: Callable[..., str | None] = on_demand.function(_DIGESTS, "digest_of_chain")
_digest_of_rule: Callable[..., str] = on_demand.function(_DIGESTS, "digest_of_rule")
_qualified_name: Callable[..., str] = on_demand.function(_DIGESTS, "qualified_name")
_rule_identities: Callable[..., list[str | None]] = on_demand.function(_DIGESTS, "rule_identities")
# A record is stored with every step: longer rules are cut. The digest counts all of them.
_RULE_CHARACTERS = 300


class RuleRecord(NamedTuple):
    """Record of a transform, given or read from a checkpoint.

    Attributes:
      texts: its rules.
      digest: equal for equal rules; None if nothing tells.
      name: of a migration.
      inner: the rules of a migration, or of a named source.
      identity: of a given transform, what `digest` is made of.
      only_selects: it changes no leaf that it keeps.
      is_assumed: a state without a record has the migration.
      source: the named source, if these are rules of its own.
    """

    texts: tuple[str, ...]
    digest: str | None
    name: str | None = None
    inner: tuple[RuleRecord, ...] = ()
    identity: str | None = None
    only_selects: bool = False
    is_assumed: bool = False
    source: str = ""


Rules = tuple[RuleRecord, ...]
"""Records of a chain of transforms, in order."""


def record_rules(transforms: Sequence[Callable[..., Any]]) -> Rules:
    """Makes the records of some transforms, in order."""
    chain = tuple(transforms)
    return tuple(map(_rule_record, chain, _rule_identities(chain)))


def digest_of_rules(rules: Rules) -> str | None:
    """Returns the digest of a whole chain, or None.

    None: it is empty, or a transform has no digest.
    """
    return _digest_of_chain([rule.identity for rule in rules])


def texts_of(rules: Iterable[RuleRecord]) -> list[str]:
    """Lists the texts of all rules."""
    return [text for rule in rules for text in rule.texts]


def _rule_record(transform: Any, identity: str | None) -> RuleRecord:
    digest, only_selects = identity and _digest_of_rule(identity), getattr(transform, "only_selects", False) is True
    name, source = getattr(transform, "migration_name", None), getattr(transform, "rules_of_source", "")
    if source:
        inner = record_rules(transform.steps)
        texts = tuple(_cut_rule(f"{source}: {text}") for text in texts_of(inner))
        return RuleRecord(texts, digest, None, inner, identity, only_selects, False, source)
    if name is None:
        try:
            rules = _rules(transform)
        except RecursionError:  # an argument contains itself
            rules = [_qualified_name(transform)]
        return RuleRecord(tuple(map(_cut_rule, rules)), digest, None, (), identity, only_selects)
    inner = record_rules(transform.steps)
    text = _cut_rule(f"{name}: {'; '.join(texts_of(inner)) or 'nothing'}")
    return RuleRecord((text,), digest, name, inner, identity, only_selects, transform.is_assumed)


def _rules(transform: Any) -> list[str]:
    """Returns the rules of a transform as texts.

    A text per element of its longest sequence of rules, else a single text.
    """
    if isinstance(transform, functools.partial):
        partial = cast("functools.partial[Any]", transform)
        name, arguments = _qualified_name(partial), _arguments(partial)
    elif dataclasses.is_dataclass(transform) and not isinstance(transform, type):
        name, arguments = type(transform).__name__, _shown_fields(transform)
    else:
        return [_own_description(transform) or _qualified_name(transform)]
    lists = {key: value for key, value in arguments.items() if _are_rules(value)}
    if not lists:
        return [_own_description(transform) or f"{name}({_arguments_text(arguments)})"]
    longest = max(lists, key=lambda key: len(lists[key]))
    rest = _arguments_text({key: value for key, value in arguments.items() if key != longest})
    return [f"{name}{f'({rest})' if rest else ''}: {_text_of_value(item)}" for item in lists[longest]]


def _are_rules(value: Any) -> bool:
    """Tests for a sequence of patterns or transforms.

    Tuples that begin with a pattern count; a shape does not.
    """
    return is_list_or_tuple(value) and len(value) > 1 and all(map(_is_rule, value))


def _is_rule(item: Any) -> bool:
    first = item[0] if is_list_or_tuple(item) and item else item
    return isinstance(first, str | re.Pattern) or callable(first)


def _shown_fields(transform: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(transform):
        value = getattr(transform, field.name)
        # By their text, since a tuple of arrays has no single answer to whether it equals another.
        at_default = value is field.default or (is_list_or_tuple(value) and repr(value) == repr(field.default))
        if field.repr and not field.name.startswith("_") and not at_default:
            shown[field.name] = value
    return shown


def _arguments(partial: functools.partial[Any]) -> dict[str, Any]:
    """Returns the bound arguments by the names of the function's parameters."""
    try:
        return dict(inspect.signature(partial.func).bind_partial(*partial.args, **partial.keywords).arguments)
    except (TypeError, ValueError):  # some builtins have no signature
        return {**{str(index): value for index, value in enumerate(partial.args)}, **partial.keywords}


def _arguments_text(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_text_of_value(value)}" for key, value in arguments.items())


def _text_of_value(value: Any) -> str:
    """Formats a value in a line, without the contents of arrays."""
    if is_list_or_tuple(value):
        return f"({', '.join(map(_text_of_value, value))})"
    if is_mapping(value):
        return f"{{{', '.join(f'{key!r}: {_text_of_value(item)}' for key, item in value.items())}}}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, re.Pattern):
        return repr(cast("re.Pattern[Any]", value).pattern)
    return _own_description(value) or (_qualified_name(value) if callable(value) else repr(value))


def _own_description(value: Any) -> str:
    """Calls an object's `describe()`, or returns ""."""
    describe = None if isinstance(value, type) else getattr(value, "describe", None)
    return str(describe()) if callable(describe) else ""


def _cut_rule(rule: str) -> str:
    line = " ".join(rule.split())
    return line if len(line) <= _RULE_CHARACTERS else f"{line[:_RULE_CHARACTERS]}…"
