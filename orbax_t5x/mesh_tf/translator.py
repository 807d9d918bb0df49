"""Renames leaves by an ordered table of patterns and functions.

The interface is T5X's: `add(pattern)` decorates a rule, `apply(flatdict, **opts)` runs the first rule whose pattern
matches the whole name. A rule gets names and lazy arrays and reads nothing. Names that no rule matches, and two names
that become one, are errors that list names and never the arrays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Rule = Callable[..., tuple[str | None, Any]]
_RuleT = TypeVar("_RuleT", bound=Rule)

# Checkpoints record digests of tables by the modules of their functions. T5's own rules were in another one first.
_RECORDED_MODULES = {"orbax_t5x.mesh_tf.rules": "orbax_t5x.rules.mesh_tf"}


@dataclasses.dataclass(frozen=True)
class Translation:
    """The translation of a flat dict.

    Attributes:
      values: by new name, in the order of the sources.
      sources: old name by new name.
      rule_for: the text of the rule by new name.
      dropped: old names that a rule took out by giving no new name.
      unmatched: old names that no rule matches.
      failed: old name and what is wrong with it: a rule refused it, or its new name is taken already.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    rule_for: dict[str, str]
    dropped: list[str]
    unmatched: list[str]
    failed: list[tuple[str, str]]


class CheckpointTranslator:
    r"""An ordered table of rules that rename leaves.

    Example:
      >>> translator = ot.checkpoint_importer.CheckpointTranslator()
      >>> @translator.add(r"layer(\d+)/(bias|kernel)")
      ... def layers(opts, key, val, number, name):
      ...     return f"{opts['tower']}/layers_{number}/{name}", val
      >>> translator.apply({"layer3/bias": 0.5}, tower="encoder")
      {'encoder/layers_3/bias': 0.5}
    """

    def __init__(self) -> None:
        self.rules: list[tuple[re.Pattern[str], Rule]] = []

    def add(self, pattern: str) -> Callable[[_RuleT], _RuleT]:
        """Registers the decorated function for names that `pattern` matches whole.

        The function is called as `fn(opts, key, val, *groups)`: the keywords of `apply` as a dict, the name, the
        value and the pattern's groups (None for one that took no part). It returns the new name and the value; None
        as the new name leaves the leaf out.
        """
        compiled = re.compile(pattern)

        def register(function: _RuleT) -> _RuleT:
            self.rules.append((compiled, function))
            return function

        return register

    def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
        """Translates every leaf; the first matching rule decides.

        Args:
          flatdict: values by '/'-joined name.
          **opts: handed to every rule as its first argument.

        Returns:
          Values by new name, in the order of `flatdict`.

        Raises:
          ValueError: names that no rule matches, all of them; or two names that become one.
        """
        translation = self.translate(flatdict, opts)
        if translation.unmatched:
            names = ", ".join(repr(name) for name in translation.unmatched)
            raise ValueError(f"no translation rule matches these {len(translation.unmatched)} names: {names}")
        if translation.failed:
            raise ValueError("; ".join(f"{name!r}: {message}" for name, message in translation.failed))
        return translation.values

    def translate(self, flatdict: Mapping[str, Any], opts: Mapping[str, Any]) -> Translation:
        """Applies the table; problems are gathered in the result."""
        result = Translation({}, {}, {}, [], [], [])
        for key, value in flatdict.items():
            self._translate_leaf(key, value, dict(opts), result)
        return result

    def _translate_leaf(self, key: str, value: Any, opts: dict[str, Any], result: Translation) -> None:
        for pattern, function in self.rules:
            match = pattern.fullmatch(key)
            if match is None:
                continue
            try:
                new_key, new_value = function(opts, key, value, *match.groups())
            except ValueError as error:
                result.failed.append((key, str(error)))
                return
            if new_key is None:
                result.dropped.append(key)
            elif new_key in result.values:
                result.failed.append((key, f"becomes {new_key!r}, and so does {result.sources[new_key]!r}"))
            else:
                result.values[new_key] = new_value
                result.sources[new_key] = key
                result.rule_for[new_key] = f"{pattern.pattern} ({getattr(function, '__name__', 'rule')})"
            return
        result.unmatched.append(key)

    def describe(self) -> str:
        """Returns the table as text, equal in every process.

        It has the patterns and the functions' qualified names.
        """
        return "; ".join(f"{pattern.pattern} -> {_recorded_name(function)}" for pattern, function in self.rules)

    def digest(self) -> str | None:
        """Returns text that is equal for equal tables, or None.

        It is the same in every process; None with a lambda or a closure.
        """
        for _, function in self.rules:
            if getattr(function, "__closure__", None) is not None or "<lambda>" in function.__qualname__:
                return None
        return hashlib.sha256(self.describe().encode()).hexdigest()

    def __repr__(self) -> str:
        return f"<CheckpointTranslator: {len(self.rules)} rule{'' if len(self.rules) == 1 else 's'}>"


def _recorded_name(function: Rule) -> str:
    module = getattr(function, "__module__", "")
    return f"{_RECORDED_MODULES.get(module, module)}.{getattr(function, '__qualname__', '')}"
