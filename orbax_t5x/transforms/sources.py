"""Several sources as a tree: averaged, or by precedence.

Leaf names of several sources start with the source's name. Each leaf is read once, and averages are computed box by
box, after reading.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.transforms.base import Following, Given, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_text
from orbax_t5x.trees.dtypes import kind_of
from orbax_t5x.trees.flat import FlatState

_NAME_SOURCES = Fix.in_program("name the sources: ot.restore({'a': path, 'b': path}, …)")
Weights = tuple[tuple[str, float], ...] | tuple[float, ...]

_all_equal, _average_of = (on_demand.function("orbax_t5x.lazy.several", name) for name in ("all_equal", "average"))


@dataclasses.dataclass(frozen=True)
class Average(Following):
    """The weighted average of named sources.

    Weights are divided by their sum. Results have the common dtype of the sources, by JAX's promotion. Integers are
    rounded, with a warning; with negative weights, which could leave their range, they are a problem. Booleans
    and strings must be equal in all sources. PRNG keys, and a leaf that a source lacks, are problems. Leaves that do
    not match keep their names.

    Attributes:
      weights: source name -> weight, or one weight per source in their order (that of the leaves in the state dict).
      pattern: a regex; a leaf takes part if its whole name matches, with the source's name in front or without it.

    Example:
      >>> average = ot.transforms.Average({"a": 3, "b": 1})
      >>> average({"a": {"w": np.zeros(2)}, "b": {"w": np.ones(2)}}, {})["w"].get()
      array([0.25, 0.25])
    """

    weights: Given[Mapping[str, float] | Sequence[float | tuple[str, float]], Weights]
    pattern: Pattern = ".*"

    def __post_init__(self) -> None:
        weights: Any = self.weights
        compile_pattern(self.pattern, "Average")
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if isinstance(pairs, (str, int, float)):
            raise TypeError(f"Average: weights is a mapping or a sequence, not {weights!r}")
        fixed = tuple((str(pair[0]), float(pair[1])) if isinstance(pair, tuple) else float(pair) for pair in pairs)
        numbers = [item[1] if isinstance(item, tuple) else item for item in fixed]
        if not numbers or not math.isfinite(sum(numbers)) or sum(numbers) == 0:
            raise ValueError(f"Average: the sum of weights must be finite and not zero, not {weights!r}")
        # A mapping's order means nothing.
        object.__setattr__(self, "weights", tuple(sorted(fixed)) if isinstance(weights, Mapping) else fixed)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        sources = list(dict.fromkeys(name.split("/", 1)[0] for name in state if "/" in name))
        weights = self._weights_of(sources, diagnostics)
        if weights is None:
            return dict(state)
        groups = self._groups(state, weights)
        if not groups:
            message = f"Average: pattern {pattern_text(self.pattern)!r} matches no name of the sources {list(weights)}"
            diagnostics.problem("unused_rule", None, message, Fix("a pattern must match a whole name"))
        new = NewState(diagnostics)
        averaged = {name for parts in groups.values() for name in parts.values()}
        for name, value in state.items():
            if name not in averaged:
                new.put(name, value, name)
        for result, parts in groups.items():
            lacking = [name for name in weights if name not in parts]
            if lacking:
                lack = "lack" if len(lacking) > 1 else "lacks"
                message = f"Average: {', '.join(map(repr, lacking))} {lack} {result!r}"
                fix = f"take it from one source before: Rename([({next(iter(parts.values()))!r}, {result!r})])"
                diagnostics.problem("missing", result, message, Fix.in_program(fix))
            else:
                leaves = {parts[name]: state[parts[name]] for name in weights}
                self._put_average(result, leaves, weights, new, diagnostics)
        return new.finish()

    def _weights_of(self, sources: list[str], diagnostics: Diagnostics) -> dict[str, float] | None:
        given: Any = self.weights
        if isinstance(given[0], tuple):
            weights: dict[str, float] = dict(given)
            lacking = [name for name in weights if name not in sources]
            if lacking:
                message = f"Average: there are no sources {lacking}; the names begin with {sources}"
                diagnostics.problem("missing", None, message, _NAME_SOURCES)
                return None
            return weights
        if len(given) != len(sources):
            message = f"Average: {len(given)} weights for {len(sources)} sources {sources}"
            fix = Fix("give one weight per source, or a mapping from source to weight")
            diagnostics.problem("rule", None, message, fix)
            return None
        return dict(zip(sources, given, strict=True))

    def _groups(self, state: FlatState, weights: Mapping[str, float]) -> dict[str, dict[str, str]]:
        """Groups leaves by name and source."""
        regex = compile_pattern(self.pattern, "Average")
        groups: dict[str, dict[str, str]] = {}
        chosen: set[str] = set()
        for name in state:
            first, _, rest = name.partition("/")
            if rest and first in weights:
                groups.setdefault(rest, {})[first] = name
                if regex.fullmatch(rest) or regex.fullmatch(name):
                    chosen.add(rest)
        return {rest: parts for rest, parts in groups.items() if rest in chosen}

    def _put_average(
        self, result: str, leaves: FlatState, weights: Mapping[str, float], new: NewState, diagnostics: Diagnostics
    ) -> None:
        """Puts the average of leaves under a name."""
        first = next(iter(leaves))
        if all(value is None for value in leaves.values()):
            new.put(result, None, first, "Average")
            return
        value = combine_leaves(
            leaves.items(),
            lambda views: _average(views, list(weights.values()), result, diagnostics),
            diagnostics,
            becomes=result,
            rule="Average",
            advice="leave it out of the pattern: only arrays of numbers of one shape have an average",
        )
        if value is not None:
            shown = ", ".join(f"{weight:g} {name}" for name, weight in weights.items())
            new.put(result, value, first, f"Average of {shown}")


def _average(views: list[View], weights: list[float], name: str, diagnostics: Diagnostics) -> View | None:
    """Averages arrays, or records a problem."""
    kinds = {kind_of(view.dtype) for view in views}
    if any(leaf.prng_impl is not None for view in views for leaf in view.leaves()):
        message = f"Average: {name!r} holds PRNG keys, which have no average"
        diagnostics.problem("dtype", name, message, Fix("leave it out of the pattern, and take it from one source"))
        return None
    if kinds <= {"bool", "object"}:
        return _all_equal(views)
    if kinds <= {"bool", "int"}:
        dtypes = ", ".join(dict.fromkeys(view.dtype.name for view in views))
        if any(weight / sum(weights) < 0 for weight in weights):
            message = f"Average: with negative weights {name!r} may leave the range of its integers ({dtypes})"
            fix = Fix("leave it out of the pattern, or Cast it to a float before")
            diagnostics.problem("dtype", name, message, fix)
            return None
        diagnostics.warnings.append(f"Average: {name!r} holds integers ({dtypes}); their average is rounded")
    return _average_of(views, weights)


@dataclasses.dataclass(frozen=True)
class Overlay(Transform):
    """Combination of named sources by precedence.

    Leaves get their names without the source's; those of later sources that an earlier one has, too, are
    dropped.

    Attributes:
      sources: source names, the strongest first. Leaves of other sources keep their names.

    Example:
      >>> ot.transforms.Overlay(["tuned", "base"])({"tuned": {"w": 1}, "base": {"w": 2, "bias": 3}}, {})
      {'w': 1, 'bias': 3}
    """

    sources: Given[Iterable[str], tuple[str, ...]]

    def __post_init__(self) -> None:
        if isinstance(self.sources, str):
            raise TypeError(f"Overlay: sources is a sequence of names, not {self.sources!r}")
        object.__setattr__(self, "sources", tuple(map(str, self.sources)))

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        by_source: dict[str, list[tuple[str, str]]] = {name: [] for name in self.sources}
        new = NewState(diagnostics)
        for name, value in state.items():
            first, _, rest = name.partition("/")
            if rest and first in by_source:
                by_source[first].append((rest, name))
            else:
                new.put(name, value, name)
        seen: set[str] = set()
        for first, leaves in by_source.items():
            if not leaves:
                message = f"Overlay: there is no leaf of a source {first!r}"
                diagnostics.problem("missing", None, message, _NAME_SOURCES)
            for rest, name in leaves:
                if rest not in seen:
                    new.put(rest, state[name], name, f"Overlay: {first!r} is the first source that has it")
            seen.update(rest for rest, _ in leaves)
        return new.finish()
