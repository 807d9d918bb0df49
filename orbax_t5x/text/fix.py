"""Fixes of problems as data: transforms, arguments, or advice in words.

The text is made from the data. Another interface, such as the command line, writes the same data in its own words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from orbax_t5x.text.code import arguments_code, calls_code, code_of

Scope = Literal["anywhere", "program", "target"]
"""The reach of advice in words: anywhere, only in a Python program, or only by another target."""

Rule = tuple[str, str | None]


class Arguments(Mapping[str, Any]):
    """Immutable keyword arguments."""

    def __init__(self, arguments: Mapping[str, Any] | None = None):
        self._values = dict(arguments or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


@dataclasses.dataclass(frozen=True)
class Fix:
    """Fix of a problem.

    Without transforms and arguments it is advice in words.

    Attributes:
      text: the fix in words, for a program in Python.
      transforms: transforms to add to those of the call.
      arguments: keyword arguments to set in the call; `...` is a value that the caller has to choose.
      rule: the rule to write in place of a wrong one, as (pattern, replacement).
      removed: a transform to take out.
      words: the text with `{}` for the code of the arguments, `{set}` for that of the ones with a value, and
        `{fallback}` for the keyword of the fallback; of a transform to take out, the condition.
      to_others: whether the call has transforms already.
      scope: where advice in words can be followed.
      alternatives: other fixes, each of which is enough; the first has the same data as this one.

    Example:
      >>> fix = ot.errors.Fix.setting("pass {} to leave them unread", strict=False)
      >>> fix.text, dict(fix.arguments)
      ('pass strict=False to leave them unread', {'strict': False})
    """

    text: str
    transforms: tuple[Any, ...] = dataclasses.field(default=(), hash=False)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=Arguments, hash=False)
    rule: Rule | None = None
    removed: Any = dataclasses.field(default=None, hash=False)
    words: str = ""
    to_others: bool = False
    scope: Scope = "anywhere"
    alternatives: tuple[Fix, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        object.__setattr__(self, "arguments", Arguments(self.arguments))

    @classmethod
    def setting(cls, words: str, /, **arguments: Any) -> Fix:
        """Makes a fix that sets keyword arguments; `words` has `{}` for all of them, `{set}` for those with a value."""
        return cls("", arguments=arguments, words=words)._written()

    @classmethod
    def adding(cls, *transforms: Any, to_others: bool = False) -> Fix:
        """Makes a fix that adds transforms.

        `to_others`: the call has some already.
        """
        return cls("", transforms, to_others=to_others)._written()

    @classmethod
    def writing(cls, pattern: str, replacement: str | None) -> Fix:
        """Makes a fix that corrects a rule."""
        return cls("", rule=(pattern, replacement))._written()

    @classmethod
    def removing(cls, transform: Any, condition: str) -> Fix:
        """Makes a fix that removes a transform under a condition in words."""
        return cls("", removed=transform, words=condition)._written()

    @classmethod
    def in_program(cls, text: str) -> Fix:
        """Makes advice that only a program in Python can follow."""
        return cls(text, scope="program")

    @classmethod
    def by_target(cls, text: str) -> Fix:
        """Makes advice that changes the target."""
        return cls(text, scope="target")

    @classmethod
    def any_of(cls, *ways: Fix) -> Fix:
        """Makes a fix of several, each enough; the first is best."""
        if len(ways) == 1:
            return ways[0]
        text = ", or ".join(way.text for way in ways)
        return dataclasses.replace(ways[0], text=text, alternatives=ways)

    @property
    def ways(self) -> tuple[Fix, ...]:
        """Alternatives of this fix, each of which is enough."""
        return self.alternatives or (self,)

    def also_setting(self, words: str, /, **arguments: Any) -> Fix:
        """Returns the fix with keyword arguments to set, too."""
        return dataclasses.replace(self, arguments=arguments, words=words)._written()

    def with_keywords(self, names: Mapping[str, str]) -> Fix:
        """Returns the fix for a call with other keywords."""
        if self.alternatives:
            return Fix.any_of(*(way.with_keywords(names) for way in self.alternatives))
        words = self.words.replace("{fallback}", f"{names.get('fallback', 'fallback')}=")
        if names.keys().isdisjoint(self.arguments) and words == self.words:
            return self
        arguments = {names.get(name, name): value for name, value in self.arguments.items()}
        return dataclasses.replace(self, arguments=arguments, words=words)._written()

    def in_words(self) -> Fix:
        """Returns the fix as advice that no program follows."""
        if not self.arguments or self.transforms:
            return Fix.in_program(self.text)
        return dataclasses.replace(self, arguments={}, words=self._words(), scope="program")._written()

    def _written(self) -> Fix:
        """Returns the fix with the text that its data make."""
        texts: list[str] = []
        if self.transforms:
            code = calls_code(self.transforms)
            texts.append(f"pass transforms=[*transforms, {code}]" if self.to_others else f"add transforms=[{code}]")
        if self.arguments or (self.words and not texts and self.removed is None):
            texts.append(self._words().replace("{fallback}", "fallback="))
        if self.rule is not None:
            texts.append(f"write the rule as {self.rule}")
        if self.removed is not None:
            texts.append(f"leave {code_of(self.removed)} out {self.words}")
        return dataclasses.replace(self, text=" and ".join(texts))

    def _words(self) -> str:
        chosen = {name: value for name, value in self.arguments.items() if value is not ...}
        words = self.words.replace("{}", arguments_code(self.arguments))
        return words.replace("{set}", arguments_code(chosen))

    def as_data(self) -> dict[str, Any]:
        """Returns the fix for JSON; transforms are the code that makes them."""
        data: dict[str, Any] = {
            "text": self.text,
            "transforms": [code_of(one) for one in self.transforms],
            "arguments": {name: _plain_value(value) for name, value in self.arguments.items()},
        }
        if self.rule is not None:
            data["rule"] = list(self.rule)
        if self.alternatives:
            data["alternatives"] = [way.as_data() for way in self.alternatives]
        return data

    def __str__(self) -> str:
        return self.text


def _plain_value(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else code_of(value)
