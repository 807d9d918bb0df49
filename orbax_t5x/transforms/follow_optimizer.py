"""`FollowOptimizer`: a transform whose optimizer follows, with roots that no structure tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.provenance.digests import digest_of
from orbax_t5x.transforms.base import AnyTransform, Transform, describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, rule_table
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import FlatState

_PARTS = frozenset({"ROW", "COLUMN", "BATCH"})
Roots = tuple[tuple[str, str], ...]
Factors = tuple[tuple[Pattern, tuple[FactorDim, ...]], ...]
"""Patterns of parameters' plain names, and the part of each dimension in Adafactor's second moment."""


@dataclasses.dataclass(frozen=True)
class FollowOptimizer(Transform):
    """Transform of parameters and, in the same way, of their optimizer's state.

    Transforms of names, shapes and layers do this without it. It is for those that do not (`AssignmentMap`, `Merge`,
    plain functions), and for trees of which no structure tells whose the moments are. The transform gets everything
    but the moments; its patterns are for the parameters.

    Attributes:
      transform: Any transform, or a plain function that renames or composes.
      roots: Pairs (root of the parameters' names, root of their optimizer's state); None finds them.
      factors: Pairs of a pattern and the role of each dimension, for Adafactor's factored moments of parameters whose
        shapes are ambiguous; the first pair of a parameter's name and rank counts.

    Raises:
      TypeError: `transform` is no transform.

    Example:
      >>> follow = ot.transforms.FollowOptimizer(ot.transforms.AssignmentMap([("target/new", "target/old")]))
      >>> state = {"target": {"old": np.ones(2)}, "state": {"param_states": {"old": {"m": np.zeros(2)}}}}
      >>> follow(state, {"target": {"new": np.ones(2)}})
      {'target': {'new': array([1., 1.])}, 'state': {'param_states': {'new': {'m': array([0., 0.])}}}}
    """

    transform: AnyTransform
    roots: Sequence[tuple[str, str]] | None = None
    factors: Sequence[tuple[Pattern, Sequence[str]]] = dataclasses.field(default=(), kw_only=True)

    follow: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    always_follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise TypeError(f"FollowOptimizer takes one transform, not {self.transform!r}; join several by Chain")
        roots = None if self.roots is None else tuple((str(params), str(state)) for params, state in self.roots)
        for pattern, parts in self.factors:
            check_pattern(pattern, "FollowOptimizer")
            if not {"ROW", "COLUMN"} <= set(parts) <= _PARTS:
                raise ValueError(f"the dimensions of a factored parameter are ROW, COLUMN (both) and BATCH: {parts!r}")
        object.__setattr__(self, "roots", roots)
        object.__setattr__(self, "factors", tuple((pattern, tuple(parts)) for pattern, parts in self.factors))

    def describe(self) -> str:
        """Returns a line for people."""
        return f"FollowOptimizer({describe_transform(self.transform)})"

    def digest(self) -> str | None:
        """Returns the transform's own digest, unless roots or factors are given."""
        return super().digest() if self.factors or self.roots is not None else digest_of(self.transform)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        inside = dataclasses.replace(diagnostics, follows=False)
        return run_transforms((self.transform,), state, target, is_resuming=False, diagnostics=inside)

    def rule_of(self, name: str, rank: int) -> tuple[FactorDim, ...] | None:
        """Returns the role of each dimension of a parameter, or None."""
        for pattern, parts in self.factors:
            if len(parts) == rank and rule_table((pattern,)).first(name) is not None:
                return tuple(FactorDim[part] for part in parts)
        return None
