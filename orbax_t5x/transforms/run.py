"""Chains of transforms and of T5X's functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, for_caller
from orbax_t5x.lazy import View
from orbax_t5x.lazy.view import as_keys, key_data
from orbax_t5x.optim.moments import OptimizerStructure, find_optimizer, plain_name
from orbax_t5x.transforms.base import AnyTransform, Given, Transform
from orbax_t5x.transforms.by_rules import ByRules
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.followed import FollowedState, note_lost
from orbax_t5x.transforms.follow.place import place_optimizer
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
    """Runs transforms on leaves of checkpoints, and places the optimizer's in the target's chain."""
    if not transforms:
        return place_optimizer(leaves, target_flat, diagnostics)
    source = {name: as_keys(value) if isinstance(value, View) else value for name, value in leaves.items()}
    state = run_and_place(
        transforms, source, target_flat, is_resuming=is_resuming, diagnostics=diagnostics, skipped=skipped
    )
    return {name: key_data(value) if isinstance(value, View) else value for name, value in state.items()}


def run_and_place(
    transforms: Sequence[AnyTransform],
    source_flat: FlatState,
    target_flat: FlatState,
    *,
    is_resuming: bool = False,
    diagnostics: Diagnostics | None = None,
    skipped: Collection[int] = (),
) -> dict[str, Any]:
    """Runs transforms, and places the optimizer's leaves in the target's chain."""
    diagnostics = diagnostics or Diagnostics()
    run = _ChainRun(target_flat, diagnostics)
    state = run.all(transforms, source_flat, is_resuming=is_resuming, skipped=skipped)
    placed = place_optimizer(state, target_flat, diagnostics, run.optimizer)
    note_lost(diagnostics, target_flat)
    return placed


def run_transforms(
    transforms: Sequence[AnyTransform],
    source_flat: FlatState,
    target_flat: FlatState,
    *,
    is_resuming: bool,
    diagnostics: Diagnostics,
    skipped: Collection[int] = (),
) -> dict[str, Any]:
    """Runs transforms in order; those at `skipped` positions as when resuming."""
    return _ChainRun(target_flat, diagnostics).all(transforms, source_flat, is_resuming=is_resuming, skipped=skipped)


class _ChainRun:
    """Run of a chain of transforms, through which the optimizer follows.

    Attributes:
      optimizer: Structure of the result's optimizers, if it is known.
    """

    def __init__(self, target: FlatState, diagnostics: Diagnostics):
        self.optimizer: OptimizerStructure | None = None
        self._target = target
        self._diagnostics = diagnostics
        self._followed: FollowedState | None = None

    @functools.cached_property
    def _target_optimizer(self) -> OptimizerStructure:
        return find_optimizer(self._target)

    def all(
        self, transforms: Sequence[AnyTransform], source: FlatState, *, is_resuming: bool, skipped: Collection[int]
    ) -> dict[str, Any]:
        """Runs transforms, and returns the state after them."""
        state = dict(source)
        for index, transform in enumerate(transforms):
            resuming = is_resuming or index in skipped
            for step in (transform,) if resuming else _flat_steps(transform):
                state = self._step(step, state, resuming)
        return self._joined(state)

    def _step(self, transform: AnyTransform, state: dict[str, Any], resuming: bool) -> dict[str, Any]:
        if not isinstance(transform, Transform):
            state = self._joined(state)
            return _run_function(transform, state, self._target, is_resuming=resuming, diagnostics=self._diagnostics)
        if resuming:
            return state
        if not transform.follow or not (self._diagnostics.follows or transform.always_follows):
            return _run_transform(transform, self._joined(state), self._target, self._diagnostics)
        return self._follow(transform, state)

    @functools.cached_property
    def _target_without_slots(self) -> FlatState:
        slots = self._target_optimizer.parameters_of_slots()
        return {name: leaf for name, leaf in self._target.items() if name not in slots}

    def _follow(self, transform: Transform, state: dict[str, Any]) -> dict[str, Any]:
        """Applies a transform that the optimizer follows."""
        followed = self._followed
        if followed is None or followed.roots != getattr(transform, "roots", None):
            followed = self._begin(self._joined(state), transform)
            state = followed.visible
        inner = getattr(transform, "transform", transform)
        rules = inner if isinstance(inner, ByRules) else None
        slots = {} if rules is None else followed.current_slots(state)
        matched = set[str]() if rules is None else rules.matching(slots)
        if rules is not None and rules.takes_names and matched:
            # Moments that the rule names are renamed or dropped by it, as any leaf.
            if state is not followed.visible:
                followed = self._begin(self._joined(state), transform)
            followed.take_out(rules)
            return self._joined(self._apply(transform, followed.visible), is_known=False)
        self._diagnostics.slots = matched
        moved = self._apply(transform, state)
        self._diagnostics.slots = ()
        followed.check_clear(state, moved, self._diagnostics)
        unchanged = {plain_name(name) for name, value in state.items() if moved.get(name) is value}
        if rules is None or all(slots[slot] not in unchanged for slot in matched):
            return moved
        moved = self._joined(moved, is_known=False)
        own_slots = [slot for slot in matched if slots[slot] in unchanged and slot in moved]
        quiet = dataclasses.replace(self._diagnostics, warns_of_unused=False)
        changed = rules.apply({name: moved.pop(name) for name in own_slots}, self._target, quiet)
        return {**moved, **changed}

    def _apply(self, transform: Transform, state: dict[str, Any]) -> dict[str, Any]:
        return _run_transform(transform, state, self._target_without_slots, self._diagnostics)

    def _begin(self, state: dict[str, Any], transform: Transform) -> FollowedState:
        """Takes the slots out of a state."""
        rule_of = getattr(transform, "rule_of", None)
        self._followed = FollowedState(state, getattr(transform, "roots", None), rule_of)
        return self._followed

    def _joined(self, state: dict[str, Any], *, is_known: bool = True) -> dict[str, Any]:
        """Puts parameters and slots together, if they are apart."""
        if self._followed is None:
            self.optimizer = None
            return state
        followed, self._followed = self._followed, None
        joined = followed.joined(state, self._target_optimizer, self._target, self._diagnostics)
        fields = followed.optimizer.fields.values()
        is_known &= all(name in joined for names in fields for name in names.values())
        self.optimizer = followed.optimizer if is_known else None
        return joined


def _flat_steps(transform: AnyTransform) -> Iterator[AnyTransform]:
    """Yields the steps of plain chains, through which the optimizer is followed without a break."""
    if type(transform) is Chain or hasattr(transform, "migration_name"):
        for step in getattr(transform, "steps", ()):
            yield from _flat_steps(step)
    else:
        yield transform


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
