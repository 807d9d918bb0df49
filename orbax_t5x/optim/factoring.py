"""Which dimensions of a parameter Adafactor factors its second moment over, and how that is said.

A rule gives each dimension a part: ROW and COLUMN dimensions are reduced as two groups, BATCH dimensions separate
independent matrices, NONE means that the second moment is kept whole. Where nobody says anything, matrices are factored
by size alone. Pure: names and shapes in, dimensions out.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from orbax_t5x.optim.optax_state import named_leaves

_log = logging.getLogger(__name__)


class FactorDim(enum.Enum):
    """The part of a dimension in the factored second moment."""

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of `HEURISTIC_RULE`."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token
"""The rule that factors by size alone; for parameters of rank 2 or less."""

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
    """The `FactorDim` of a name: row, column (or col), batch, none (or unfactorized), in upper or lower case.

    What is no text stays as it is.
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
"""T5X's logical axis names and the part of each."""


class HParamMap:
    """A hyper-parameter per parameter: the value of the first pattern found in the parameter's '/'-joined name.

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
        """A tree like the parameters with each one's value in its place."""
        names, _, treedef = named_leaves(params)
        return treedef.unflatten([self[name] for name in names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HParamMap) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(tuple(pattern for pattern, _ in self._rules))

    def _key(self) -> Any:
        return self._rules

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[(pattern.pattern, value) for pattern, value in self._rules]})"


class NamedRules(HParamMap):
    """A rule per parameter by its whole name: what logical axes come to."""

    def __init__(self, by_name: Mapping[str, Any]):
        super().__init__(())
        self._by_name = dict(by_name)

    def __getitem__(self, key: str) -> Any:
        try:
            return self._by_name[key]
        except KeyError:
            raise KeyError(f"No rule found for parameter: {key}") from None

    def __hash__(self) -> int:
        return hash(frozenset(self._by_name))

    def _key(self) -> Any:
        return self._by_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._by_name})"


class FactorDims(NamedTuple):
    """A rule made concrete for one shape.

    Attributes:
      averaging: the dimensions over which the parameter's scale and the clipping average: all but BATCH.
      row: the ROW group, or () where the second moment is not factored.
      column: the COLUMN group, or ().
    """

    averaging: tuple[int, ...]
    row: tuple[int, ...] = ()
    column: tuple[int, ...] = ()

    @property
    def factored(self) -> bool:
        """Whether the second moment is factored."""
        return bool(self.row)


def heuristic_dims(shape: Sequence[int], min_dim_size_to_factor: int) -> tuple[int, int] | None:
    """The second largest and the largest dimension, or None where they are too few or too small to factor over.

    Of equal dimensions the later one counts as larger: a square matrix averages its rows' moment over dimension 1.
    """
    if len(shape) < 2:
        return None
    by_size = np.argsort(shape, kind="stable")
    if shape[by_size[-2]] < min_dim_size_to_factor:
        return None
    return int(by_size[-2]), int(by_size[-1])


def resolve_rule(rule: FactorRule, shape: Sequence[int], path: str, min_dim_size_to_factor: int) -> FactorDims:
    """The dimensions that a rule means for a parameter.

    Args:
      rule: a `FactorDim` per dimension, `HEURISTIC_RULE`, or None for "do not factor".
      shape: of the parameter.
      path: its name, for errors.
      min_dim_size_to_factor: both factored dimensions must be at least this large for the heuristic to factor.

    Raises:
      ValueError: the heuristic for a rank above 2; a rule of another rank, or with one of ROW and COLUMN alone.
    """
    rank = len(shape)
    everything = tuple(range(rank))
    if rule is None:
        return FactorDims(everything)
    if rule is HEURISTIC_RULE:
        if rank > 2:
            raise ValueError(
                f"A parameter of rank above 2 must have an explicit factorization rule: {path}, {tuple(shape)}. "
                "Give one by factor_map, or logical_factor_rules and the parameters' logical axes."
            )
        dims = heuristic_dims(shape, min_dim_size_to_factor)
        return FactorDims(everything) if dims is None else FactorDims(everything, (dims[0],), (dims[1],))
    parts = [_as_factor_dim(part, path) for part in rule]
    if len(parts) != rank:
        raise ValueError(
            f"Factorization rule {rule} has incorrect rank for param of rank {rank}: {path}, {tuple(shape)}"
        )
    row, column, batch = (
        tuple(dim for dim in everything if parts[dim] is wanted)
        for wanted in (FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH)
    )
    if rank <= 2 and not batch and (row or column):
        _log.info("%s has rank %d: the size heuristic decides, not the rule %s.", path, rank, rule)
        return resolve_rule(HEURISTIC_RULE, shape, path, min_dim_size_to_factor)
    if bool(row) != bool(column):
        raise ValueError(
            f"Factorization rule {rule} needs both ROW and COLUMN dimensions, or neither: {path}, {tuple(shape)}"
        )
    return FactorDims(tuple(dim for dim in everything if dim not in batch), row, column)


def _as_factor_dim(part: Any, path: str) -> FactorDim:
    part = FactorDim.NONE if part is None else factor_name_to_factordim(part)
    if not isinstance(part, FactorDim):
        raise ValueError(f"{part!r} in the factorization rule of {path} is no FactorDim.")
    return part


def rules_from_axes(param_logical_axes: Any, logical_factor_rules: LogicalFactorRules) -> NamedRules:
    """A rule per parameter from its logical axis names.

    Args:
      param_logical_axes: a tree like the parameters whose leaves are `PartitionSpec`s of axis names.
      logical_factor_rules: the part of each axis name.

    Raises:
      ValueError: an axis name without a part; ROW and COLUMN together with NONE.
    """
    names, axes, _ = named_leaves(param_logical_axes, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    return NamedRules(
        {name: _rule_from_axes(name, spec, logical_factor_rules) for name, spec in zip(names, axes, strict=True)}
    )


def _rule_from_axes(path: str, spec: Any, rules: LogicalFactorRules) -> FactorRule:
    if spec is None:
        return HEURISTIC_RULE
    unknown = [axis for axis in spec if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(f"Logical axes {unknown} of parameter {path} have no factor rule; rules are {dict(rules)}.")
    parts = tuple(FactorDim.NONE if axis is None else rules[axis] for axis in spec)
    has_row, has_column = FactorDim.ROW in parts, FactorDim.COLUMN in parts
    if has_row and has_column and FactorDim.NONE in parts:
        raise ValueError(
            f"Incomplete adafactor spec {parts} for parameter {path} with axes {tuple(spec)}: ROW and COLUMN cannot "
            "stand together with NONE; say BATCH, ROW or COLUMN for every axis."
        )
    if has_row != has_column:
        # With one group alone there is no matrix to factor.
        parts = tuple(FactorDim.NONE if part in (FactorDim.ROW, FactorDim.COLUMN) else part for part in parts)
    return parts
