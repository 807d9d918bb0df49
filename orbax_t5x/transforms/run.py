"""Chains of transforms and of T5X's functions."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, for_caller
from orbax_t5x.lazy import View
from orbax_t5x.lazy.view import as_keys, key_data
from orbax_t5x.transforms.base import AnyTransform, Given, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import EndlessTreeError, FlatState, NameClashError, flatten, unflatten

_OURS = "orbax_t5x."
_qualified_name = on_demand.function("orbax_t5x.provenance.digests", "qualified_name")  # of functions only


def takes_is_resuming(function: Callable[..., Any]) -> bool:
    """Reports whether a function can be called with the keyword `is_resuming`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == "is_resuming" and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )


def _takes_target(function: Callable[..., Any], keywords: Mapping[str, Any]) -> bool:
    """Reports whether a function takes the target, too."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return True
    try:
        signature.bind_partial(None, None, **keywords)
    except TypeError:
        return False
    return True


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
    name = _qualified_name(function)
    # Fresh nested dicts: the function may change them.
    nested = [unflatten(state, join_clashes=True)]
    if _takes_target(function, arguments):
        nested.append(unflatten(target, join_clashes=True))
    try:
        result = function(*nested, **arguments)
    except Exception as error:
        _record_raised(name, error, diagnostics)
        return state
    if not isinstance(result, Mapping):
        message = f"{name} returned {type(result).__name__}, not a state dict"
        diagnostics.problem("transform", None, message, Fix("return the nested dict"))
        return state
    try:
        flat = flatten(result)
    except NameClashError as error:
        diagnostics.problem("duplicate", error.names[0], f"{name} returned {error}")
        return state
    except EndlessTreeError as error:
        diagnostics.problem("transform", None, f"{name} returned a dict that {error}")
        return state
    names_of = {id(value): old for old, value in reversed(state.items())}
    changed = {
        new: names_of.get(id(value), new) for new, value in flat.items() if new not in state or state[new] is not value
    }
    diagnostics.record_origins({new: (old, name) for new, old in changed.items()})
    return flat


def _record_raised(name: str, error: Exception, diagnostics: Diagnostics) -> None:
    """Records errors of a caller's code; re-raises the machine's."""
    if isinstance(error, OSError | MemoryError):
        raise for_caller(error)
    advice = "; ".join(getattr(error, "__notes__", ()))
    fix = Fix(advice) if advice else None
    diagnostics.problem("transform", None, f"{name} raised {type(error).__name__}: {error}", fix)
    diagnostics.raised.append(error)


def _run_transform(
    transform: Transform, state: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics
) -> dict[str, Any]:
    if type(transform).__module__.startswith(_OURS):
        # What one of ours raises is an error of ours.
        return transform.apply(state, target, diagnostics)
    try:
        return transform.apply(state, target, diagnostics)
    except Exception as error:
        _record_raised(type(transform).__qualname__, error, diagnostics)
        return state


def run_on_leaves(
    transforms: Sequence[AnyTransform],
    leaves: Mapping[str, Any],
    target_flat: Mapping[str, Any],
    *,
    is_resuming: bool,
    diagnostics: Diagnostics,
    skipped: Collection[int] = (),
) -> dict[str, Any]:
    """Runs transforms on leaves of checkpoints."""
    if not transforms:
        return dict(leaves)
    source = {name: as_keys(value) if isinstance(value, View) else value for name, value in leaves.items()}
    state = run_transforms(
        transforms, source, target_flat, is_resuming=is_resuming, diagnostics=diagnostics, skipped=skipped
    )
    return {name: key_data(value) if isinstance(value, View) else value for name, value in state.items()}


def run_transforms(
    transforms: Sequence[AnyTransform],
    source_flat: Mapping[str, Any],
    target_flat: Mapping[str, Any],
    *,
    is_resuming: bool,
    diagnostics: Diagnostics,
    skipped: Collection[int] = (),
) -> dict[str, Any]:
    """Runs transforms in order; those at `skipped` positions as when resuming."""
    state = dict(source_flat)
    for index, transform in enumerate(transforms):
        resuming = is_resuming or index in skipped
        if not isinstance(transform, Transform):
            state = _run_function(transform, state, target_flat, is_resuming=resuming, diagnostics=diagnostics)
        elif not resuming:
            state = _run_transform(transform, state, target_flat, diagnostics)
    return state


class Steps(Transform):
    """Base of transforms made of `steps`, run in order."""

    steps: Any

    @property
    def only_selects(self) -> bool:
        return all(getattr(step, "only_selects", False) is True for step in self.steps)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return run_transforms(self.steps, state, target, is_resuming=False, diagnostics=diagnostics)


@dataclasses.dataclass(frozen=True)
class Chain(Steps):
    """Sequence of transforms, run in order.

    Attributes:
      steps: transforms, or plain functions of T5X's protocol.

    Example:
      >>> both = ot.transforms.Chain([ot.transforms.Drop("head/.*"), ot.transforms.Rename([("w", "kernel")])])
      >>> both({"w": 1, "head": {"b": 2}}, {})
      {'kernel': 1}
    """

    steps: Given[Iterable[AnyTransform], tuple[AnyTransform, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
