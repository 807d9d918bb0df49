"""T5X's rules for factoring Adafactor's second moments.

A rule gives each dimension a role: ROW and COLUMN dimensions are reduced as two groups, BATCH dimensions separate
independent matrices, NONE means that the second moment is kept whole. A rule comes from the parameter's name
(`HParamMap`) or its logical axes (`rules_from_axes`); matrices without one are factored by size. What a rule means for
a shape is in `factored_dims`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from orbax_t5x.optim.optax_state import flatten_by_name


class FactorDim(enum.Enum):
    """Role of a dimension in the factored second moment."""

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of `HEURISTIC_RULE`."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token
"""The rule that factors only by size; for parameters of rank 2 or less."""

FactorRule = HeuristicRule | Sequence[FactorDim] | None
LogicalFactorRules = Mapping[str, FactorDim]

_FACTOR_NAMES = {
    "row": FactorDim.ROW,
    "col": FactorDim.COLUMN,
    "column": FactorDim.COLUMN,
    "batch": FactorDim.BATCH,
    "none": FactorDim.NONE,
    "unfactorized": FactorDim.NONE,
}


def factor_name_to_factordim(name: Any) -> Any:
    """Converts a name in any case to a `FactorDim`.

    Names are row, column (or col), batch, none (or unfactorized). What is not a string stays as it is.
    """
    if not isinstance(name, str):
        return name
    try:
        return _FACTOR_NAMES[name.lower()]
    except KeyError:
        raise KeyError(f"{name!r} is no factor dimension; use one of {sorted(_FACTOR_NAMES)}") from None


STANDARD_LOGICAL_FACTOR_RULES: LogicalFactorRules = {
    "vocab": FactorDim.COLUMN,
    "embed": FactorDim.ROW,
    "mlp": FactorDim.COLUMN,
    "heads": FactorDim.COLUMN,
    "kv": FactorDim.COLUMN,
    "joined_kv": FactorDim.COLUMN,
    "relpos_buckets": FactorDim.NONE,
    "layers": FactorDim.BATCH,
    "stack": FactorDim.BATCH,
    "q_wi_fused": FactorDim.COLUMN,
    "o_wo_fused": FactorDim.COLUMN,
    "multiquery_heads": FactorDim.COLUMN,
    "kv_fused": FactorDim.COLUMN,
    "layer_norm_scale": FactorDim.NONE,
    "mlp_activations": FactorDim.COLUMN,
}
"""T5X's logical axis names and the role of each."""


class HParamMap:
    """A hyper-parameter per parameter, by patterns of names.

    The first pattern found in the '/'-joined name decides.

    Args:
      rules: pairs of a regular expression, searched for anywhere in the name, and a value.
    """

    def __init__(self, rules: Sequence[tuple[str, Any]]):
        self._rules = tuple((re.compile(pattern), value) for pattern, value in rules)

    def __getitem__(self, key: str) -> Any:
        for pattern, value in self._rules:
            if pattern.search(key):
                return value
        raise KeyError(f"No rule found for parameter: {key}")

    def __call__(self, params: Any) -> Any:
        """Returns a tree like the parameters with the value of each."""
        names, _, treedef = flatten_by_name(params)
        return treedef.unflatten([self[name] for name in names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HParamMap) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(tuple(pattern for pattern, _ in self._rules))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[(pattern.pattern, value) for pattern, value in self._rules]})"


def rules_from_axes(param_logical_axes: Any, logical_factor_rules: LogicalFactorRules) -> dict[str, FactorRule]:
    """Derives each parameter's rule from its logical axis names.

    Args:
      param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s of axis names.
      logical_factor_rules: the role of each axis name.

    Raises:
      ValueError: an axis name without a role; ROW and COLUMN together with NONE.
    """
    names, axes, _ = flatten_by_name(param_logical_axes, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    return {name: _rule_from_axes(name, spec, logical_factor_rules) for name, spec in zip(names, axes, strict=True)}


def _rule_from_axes(path: str, spec: Any, rules: LogicalFactorRules) -> FactorRule:
    if spec is None:
        return HEURISTIC_RULE
    unknown = [axis for axis in spec if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(f"Logical axes {unknown} of parameter {path} have no factor rule; rules are {dict(rules)}.")
    parts = tuple(FactorDim.NONE if axis is None else rules[axis] for axis in spec)
    has_row, has_column = FactorDim.ROW in parts, FactorDim.COLUMN in parts
    if has_row and has_column and FactorDim.NONE in parts:
        error = ValueError(f"Incomplete adafactor spec {parts} for {path} with axes {tuple(spec)}!")
        error.add_note("ROW and COLUMN cannot be combined with NONE; give BATCH, ROW or COLUMN for every axis.")
        raise error
    if has_row != has_column:
        # With only one group there is no matrix to factor.
        parts = tuple(FactorDim.NONE if part in (FactorDim.ROW, FactorDim.COLUMN) else part for part in parts)
    return parts
