"""A new flat state dict with origins of its leaves.

Two leaves that land on one name are a problem, never the loss of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View, as_view
from orbax_t5x.transforms.diagnostics import Diagnostics


class NewState:
    """Collector of results under new names in `flat`; records clashes."""

    def __init__(self, diagnostics: Diagnostics):
        self.flat: dict[str, Any] = {}
        self._diagnostics = diagnostics
        self._made_from: dict[str, str] = {}
        self._origins: dict[str, tuple[str, str]] = {}

    def put(self, name: str, value: Any, made_from: str, rule: str | None = None) -> None:
        """Adds a leaf, made from an old leaf by a rule."""
        if name in self.flat:
            self._diagnostics.problem(
                "duplicate",
                name,
                f"{self._made_from[name]!r} and {made_from!r} both become {name!r}" + (f" ({rule})" if rule else ""),
                Fix("rename or drop one of the two"),
            )
            return
        self.flat[name] = value
        self._made_from[name] = made_from
        if rule is not None:
            self._origins[name] = (made_from, rule)

    def finish(self) -> dict[str, Any]:
        """Returns the state dict and records its origins."""
        self._diagnostics.record_origins(self._origins)
        return self.flat


def view_of(name: str, value: Any, diagnostics: Diagnostics, *, becomes: str | None = None) -> View | None:
    """Returns a leaf as a view, or records a problem."""
    try:
        return as_view(value, name=name)
    except (TypeError, ValueError) as error:
        diagnostics.problem(
            "transform", name, f"not an array: {error}", Fix("leave it out of the pattern"), becomes=becomes
        )
        return None


def views_of(leaves: Iterable[tuple[str, Any]], diagnostics: Diagnostics, *, becomes: str) -> list[View] | None:
    """Returns leaves as views, or None after a problem."""
    views = [view_of(name, value, diagnostics, becomes=becomes) for name, value in leaves]
    arrays = [view for view in views if view is not None]
    return arrays if len(arrays) == len(views) else None


def combine_leaves(
    leaves: Iterable[tuple[str, Any]],
    combine: Callable[[list[View]], View | None],
    diagnostics: Diagnostics,
    *,
    becomes: str,
    rule: str,
    advice: str | None = None,
) -> View | None:
    """Combines leaves into a view; records a problem on failure."""
    views = views_of(leaves, diagnostics, becomes=becomes)
    if views is None:
        return None
    try:
        return combine(views)
    except (ValueError, TypeError) as error:
        kind = "shape" if isinstance(error, ValueError) else "dtype"
        diagnostics.problem(kind, becomes, f"{rule}: {error}", None if advice is None else Fix(advice))
        return None
