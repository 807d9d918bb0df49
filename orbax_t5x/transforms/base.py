"""Protocol of transforms.

A transform maps names and composes lazy views; nothing is read, and no argument is changed. Inside a restore
transforms work on flat dicts, record what is wrong in `Diagnostics` and go on, so that one error has all problems.
Called by hand, on nested dicts, a transform raises its first problem, as T5X's functions do.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.text.code import dataclass_call
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState, NameClashError, StateDict, flatten, unflatten
from orbax_t5x.trees.narrow import check_flag

_dataclass_digest = on_demand.function("orbax_t5x.provenance.digests", "dataclass_digest")
_qualified_name = on_demand.function("orbax_t5x.provenance.digests", "qualified_name")
_inverse = on_demand.function("orbax_t5x.transforms.inverses", "inverse")
_chain = on_demand.function("orbax_t5x.transforms.run", "Chain")
_run_and_place = on_demand.function("orbax_t5x.transforms.run", "run_and_place")

_logger = logging.getLogger(__name__)

_Taken = TypeVar("_Taken", contravariant=True)
_Held = TypeVar("_Held", covariant=True)

# A transform with hundreds of rules is still one line of a table.
_SHOWN_ITEMS = 3


def _is_transform(value: Any) -> bool:
    """Reports whether a value is an own transform."""
    return not isinstance(value, type) and hasattr(value, "describe") and hasattr(value, "digest")


def describe_fields(transform: Any) -> str:
    """Describes a dataclass by the fields that are set."""
    fields = []
    for field in sorted(dataclasses.fields(transform), key=lambda field: field.kw_only):
        value = getattr(transform, field.name)
        is_shown = field.repr or (field.name == "follow" and field.init)
        if is_shown and (field.default is dataclasses.MISSING or value != field.default):
            named = field.default is not dataclasses.MISSING
            fields.append(f"{field.name}={_short(value)}" if named else _short(value))
    return f"{type(transform).__name__}({', '.join(fields)})"


def _short(value: Any) -> str:
    if isinstance(value, re.Pattern):
        return repr(value.pattern)
    if isinstance(value, tuple) and len(value) > _SHOWN_ITEMS:
        return f"({', '.join(_short(item) for item in value[:_SHOWN_ITEMS])}, … {len(value)} in all)"
    if isinstance(value, tuple):
        return f"({', '.join(_short(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, np.dtype):
        return value.name
    if _is_transform(value):
        return value.describe()
    if callable(value):
        return _qualified_name(value)
    return repr(value)


def describe_transform(transform: Any) -> str:
    """Describes a transform in a line; functions are opaque."""
    return transform.describe() if _is_transform(transform) else f"{_qualified_name(transform)} (opaque)"


class Given(Generic[_Taken, _Held]):
    """Type of a field that the constructor converts."""

    if TYPE_CHECKING:  # a descriptor in the eyes of type checkers, which tells the two types apart

        def __get__(self, instance: Any, owner: Any = None) -> _Held: ...

        def __set__(self, instance: Any, value: _Taken) -> None: ...

    else:

        def __class_getitem__(cls, types):
            # What tools that read annotations show of the constructor.
            return types[0]


class Transform:
    """Base of all transforms: frozen dataclasses with T5X's protocol.

    Attributes:
      follow: whether the optimizer's moments follow what becomes of their parameters.
      always_follows: whether it follows inside a rule pack, too.
      takes_names: whether its patterns decide about names alone, so that moments which they match need not follow.

    Example:
      >>> class Halve(ot.transforms.Transform):
      ...     def apply(self, state, target, diagnostics):
      ...         return {name: value / 2 for name, value in state.items()}
      >>> Halve()({"encoder": {"scale": 3.0}}, {})
      {'encoder': {'scale': 1.5}}
    """

    follow: bool = False
    takes_names: ClassVar[bool] = False
    always_follows: ClassVar[bool] = False

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        """Returns the new flat state dict.

        Args:
          state: leaves by '/'-joined name; not changed.
          target: the target's leaves by name: anything with `shape` and `dtype`, or `...`; empty where there is
            no target.
          diagnostics: takes problems; nothing is raised for what a user got wrong.
        """
        raise NotImplementedError

    def __call__(self, state_dict: StateDict, target_state_dict: StateDict, *, is_resuming: bool = False) -> StateDict:
        """Returns the transformed nested state dict; leaves that are computed are lazy.

        Args:
          state_dict: nested; leaves may be lazy arrays, NumPy or JAX arrays, or anything where only names change.
          target_state_dict: nested; what the state is restored into.
          is_resuming: whether the run goes on from its own checkpoint: the state is returned as it is.

        Raises:
          RestorePlanError: the first problem.
          TypeError: `is_resuming` is neither True nor False.
        """
        check_flag("is_resuming", is_resuming)
        if is_resuming:
            return state_dict
        diagnostics = Diagnostics()
        try:
            flat = self._by_hand(flatten(state_dict), flatten(target_state_dict), diagnostics)
            if diagnostics.problems:
                raise diagnostics.error(diagnostics.problems[:1])
            result = unflatten(flat)
        except NameClashError as error:
            raise RestorePlanError([Problem("duplicate", error.names[0], str(error))]) from error
        for warning in diagnostics.warnings:
            _logger.warning("%s", warning)
        return result

    def _by_hand(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        """Runs the transform, or T5X's function if results differ."""
        return _run_and_place((self,), state, target, is_resuming=False, diagnostics=diagnostics)

    def describe(self) -> str:
        """Returns a line for people."""
        return describe_fields(self)

    def inverse(self, source: Any = None) -> AnyTransform:
        """Returns the inverse transform.

        Raises:
          ValueError: there is none, or it needs `source`.
        """
        back = _inverse((self,), source)
        return back[0] if len(back) == 1 else _chain(back)

    def as_code(self) -> str:
        """Returns the Python call of the transform."""
        return dataclass_call(self, f"ot.transforms.{type(self).__name__}")

    def digest(self) -> str | None:
        """Returns 32 hexadecimal digits, the same for equal transforms.

        None where the transform holds a lambda, a closure or another object whose behaviour has no stable text.
        """
        return _dataclass_digest(self)

    @property
    def only_selects(self) -> bool:
        """True if it changes no value and no kept name."""
        return False


@dataclasses.dataclass(frozen=True)
class Following(Transform):
    """Base of transforms that the optimizer follows.

    Attributes:
      follow: whether moments follow their parameters.
    """

    follow: bool = dataclasses.field(default=True, kw_only=True, repr=False)


@dataclasses.dataclass(frozen=True)
class FollowingOnRequest(Transform):
    """Base of T5X's transforms, which act on the names that they match.

    Attributes:
      follow: whether moments follow their parameters.
    """

    follow: bool = dataclasses.field(default=False, kw_only=True, repr=False)


AnyTransform = Transform | Callable[..., Any]
"""A transform of ours, or a plain function of T5X's protocol."""
