"""The protocol of transforms: what one may do, what it records, and how a chain of them runs.

A transform maps names and composes lazy views; nothing is read, and no argument is changed. Inside a restore
transforms work on flat dicts, gather what is wrong in `Diagnostics` and go on, so that one error can tell everything.
Called by hand, on nested dicts, a transform raises its first problem, as T5X's functions do.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import Problem, ProblemKind, RestorePlanError
from orbax_t5x.trees.flat import NameClashError, flatten, unflatten

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Diagnostics:
    """What a chain of transforms gathers while it runs.

    Attributes:
      problems: everything wrong; a chain with problems must not be executed.
      warnings: what a person should see: shadowed and repeated rules, unused ones where that is allowed.
      dropped: names taken out on purpose.
      rule_for: name -> the rules that produced it, in order, as text.
      fidelity: name -> "exact", "approximate" or "reset", for optimizer leaves that followed their parameter.
      explained: target names whose absence a problem here already explains.
      in_pack: whether a rule pack runs, whose single rules need not match anything.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    rule_for: dict[str, str] = dataclasses.field(default_factory=dict)
    fidelity: dict[str, str] = dataclasses.field(default_factory=dict)
    explained: set[str] = dataclasses.field(default_factory=set)
    in_pack: bool = False

    def problem(self, kind: ProblemKind, leaf: str | None, message: str, fix: str = "") -> None:
        """Diagnostics one problem."""
        self.problems.append(Problem(kind, leaf, message, fix))

    def drop(self, names: Iterable[str]) -> None:
        """Diagnostics names that are taken out on purpose; each once."""
        self.dropped.extend(names)

    def credit(self, credits: Mapping[str, tuple[str, str]]) -> None:
        """Diagnostics which rule made which name.

        Args:
          credits: new name -> (the name it was made from, the rule as text). What was known of the old name
            comes first.
        """
        before = {old: self.rule_for.get(old) for old, _ in credits.values()}
        for new, (old, text) in credits.items():
            known = before[old]
            self.rule_for[new] = f"{known}; {text}" if known else text


class Transform:
    """Base of all transforms: frozen dataclasses that follow T5X's protocol for state transformation functions."""

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """The new flat state dict.

        Args:
          source: leaves by '/'-joined name; not changed.
          target: the target's leaves by name: anything with `shape` and `dtype`, or `...`; empty where there is
            no target.
          diagnostics: gathers problems; nothing is raised for what a user got wrong.
        """
        raise NotImplementedError

    def __call__(
        self, state_dict: Mapping[str, Any], target_state_dict: Mapping[str, Any], *, is_resuming: bool = False
    ) -> Mapping[str, Any]:
        """The transformed nested state dict; leaves that are computed come back lazy.

        Args:
          state_dict: nested; leaves may be lazy arrays, NumPy or JAX arrays, or anything where only names change.
          target_state_dict: nested; what the state is restored into.
          is_resuming: whether the run goes on from its own checkpoint: the state comes back as it is.

        Raises:
          RestorePlanError: the first problem.
        """
        if is_resuming:
            return state_dict
        diagnostics = Diagnostics()
        try:
            flat = self._by_hand(flatten(state_dict), flatten(target_state_dict), diagnostics)
            if diagnostics.problems:
                raise RestorePlanError(diagnostics.problems[:1])
            result = unflatten(flat)
        except NameClashError as error:
            raise RestorePlanError([Problem("duplicate", error.names[0], str(error))]) from error
        for warning in diagnostics.warnings:
            _logger.warning("%s", warning)
        return result

    def _by_hand(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """`apply`, or what T5X's function of the same name answers where that differs."""
        return self.apply(source, target, diagnostics)

    def describe(self) -> str:
        """One line for people."""
        fields = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.repr and (field.default is dataclasses.MISSING or value != field.default):
                named = field.default is not dataclasses.MISSING
                fields.append(f"{field.name}={_short(value)}" if named else _short(value))
        return f"{type(self).__name__}({', '.join(fields)})"

    def digest(self) -> str:
        """Text that is the same for equal transforms, in every process; 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(_encode(self), sort_keys=True).encode()).hexdigest()[:32]


AnyTransform = Transform | Callable[..., Any]

# A transform with hundreds of rules is still one line of a table.
_SHOWN_ITEMS = 3


def _short(value: Any) -> str:
    if isinstance(value, re.Pattern):
        return repr(value.pattern)
    if isinstance(value, tuple) and len(value) > _SHOWN_ITEMS:
        return f"({', '.join(_short(item) for item in value[:_SHOWN_ITEMS])}, … {len(value)} in all)"
    if isinstance(value, tuple):
        return f"({', '.join(_short(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, Transform):
        return value.describe()
    if callable(value):
        return qualified_name(value)
    return repr(value)


def _encode(value: Any) -> Any:
    """A value of a transform as JSON. Arrays count by shape and dtype: a digest tells rules apart, not data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Transform):
        # A field with a leading underscore is worked out from the others.
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]  # type: ignore[arg-type]
        return {"transform": type(value).__name__, **{name: _encode(getattr(value, name)) for name in names}}
    if isinstance(value, re.Pattern):
        # str patterns are always UNICODE; an uncompiled one and a compiled one without flags are the same rule.
        flags = value.flags & ~re.UNICODE
        return {"pattern": value.pattern, "flags": flags} if flags else value.pattern
    if isinstance(value, Mapping):
        return {"mapping": {str(key): _encode(item) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, (frozenset, set)):
        return sorted((_encode(item) for item in value), key=json.dumps)
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, enum.Enum):
        return {"enum": value.name}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"array": [int(size) for size in value.shape], "dtype": str(value.dtype)}
    if value is ...:
        return {"ellipsis": True}
    return {"function": qualified_name(value)}


def qualified_name(function: Any) -> str:
    """How a plain function is called in plans and digests; a partial counts as its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def digest_of(transform: AnyTransform) -> str:
    """The digest of a transform, or of a plain function by its qualified name."""
    if isinstance(transform, Transform):
        return transform.digest()
    return hashlib.sha256(qualified_name(transform).encode()).hexdigest()[:32]


def describe_transform(transform: AnyTransform) -> str:
    """One line for people; plain functions are opaque."""
    return transform.describe() if isinstance(transform, Transform) else f"{qualified_name(transform)} (opaque)"


def takes_is_resuming(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with the keyword `is_resuming`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == "is_resuming" and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )


def _run_function(
    function: Callable[..., Any],
    state: dict[str, Any],
    target: Mapping[str, Any],
    *,
    is_resuming: bool,
    diagnostics: Diagnostics,
) -> dict[str, Any]:
    keyword = takes_is_resuming(function)
    if is_resuming and not keyword:
        return state
    arguments = {"is_resuming": is_resuming} if keyword else {}
    name = qualified_name(function)
    # Fresh nested dicts: what the function does to them reaches nobody.
    nested = unflatten(state, join_clashes=True), unflatten(target, join_clashes=True)
    try:
        result = function(*nested, **arguments)
    except ValueError as error:
        diagnostics.problem("transform", None, f"{name} raised {type(error).__name__}: {error}")
        return state
    if not isinstance(result, Mapping):
        diagnostics.problem(
            "transform", None, f"{name} returned {type(result).__name__}, not a state dict", "return the nested dict"
        )
        return state
    try:
        flat = flatten(result)
    except NameClashError as error:
        diagnostics.problem("duplicate", error.names[0], f"{name} returned {error}")
        return state
    kept = {id(value) for value in flat.values()}
    diagnostics.drop(old for old, value in state.items() if old not in flat and id(value) not in kept)
    names_of = {id(value): old for old, value in reversed(state.items())}
    changed = {
        new: names_of.get(id(value), new) for new, value in flat.items() if state.get(new, diagnostics) is not value
    }
    diagnostics.credit({new: (old, name) for new, old in changed.items()})
    return flat


def run_transforms(
    transforms: Sequence[AnyTransform],
    source_flat: Mapping[str, Any],
    target_flat: Mapping[str, Any],
    *,
    is_resuming: bool,
    diagnostics: Diagnostics,
) -> dict[str, Any]:
    """Runs transforms in order on a flat state dict; problems and all else worth knowing go to `diagnostics`.

    When resuming, our own transforms leave the state as it is, functions with the keyword `is_resuming` are called
    with True, others are not called. A ValueError of a plain function becomes a problem; anything else it raises is
    its own.
    """
    state = dict(source_flat)
    for transform in transforms:
        if not isinstance(transform, Transform):
            state = _run_function(transform, state, target_flat, is_resuming=is_resuming, diagnostics=diagnostics)
        elif not is_resuming:
            state = transform.apply(state, target_flat, diagnostics)
    return state
