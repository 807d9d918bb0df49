"""Dimensions that Adafactor's factored second moment averages over (arXiv 1804.04235).

`v_row` is the mean over the COLUMN dimensions and `v_col` the mean over the ROW dimensions; both keep the BATCH
dimensions (layers). Up to rank 2 the sizes decide which dimension is which, in T5X and in Optax. Above rank 2 Optax
still uses the two largest dimensions, and T5X a rule per parameter. A checkpoint holds the shapes of the slots but not
the rule, and shapes are ambiguous where dimensions are equal: `possible_dims` gives all answers that fit them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.optim.factor_rules import HEURISTIC_RULE, FactorDim, FactorRule, HeuristicRule, factor_name_to_factordim

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]
FactoredPair = tuple[tuple[int, ...], tuple[int, ...]]
"""The ROW dimensions and the COLUMN dimensions."""

# There are 3 ** rank rules to try; no parameter has a higher rank.
_MAX_RANK_TRIED = 6


class FactorDims(NamedTuple):
    """The averaged dimensions of parameters of a shape.

    Attributes:
      averaging: the dimensions over which the parameter's scale and the clipping average: all but BATCH.
      row: the ROW dimensions, which v_col lacks; () where the second moment is not factored.
      column: the COLUMN dimensions, which v_row lacks, or ().
    """

    averaging: tuple[int, ...]
    row: tuple[int, ...] = ()
    column: tuple[int, ...] = ()

    @property
    def factored(self) -> bool:
        """True if the second moment is factored."""
        return bool(self.row)

    def kept(self, rank: int) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the dimensions of v_row and of v_col."""
        dims = frozenset(range(rank))
        return dims.difference(self.column), dims.difference(self.row)

    def slot_shapes(self, shape: Sequence[int]) -> tuple[Shape, Shape]:
        """Returns the shapes of v_row and v_col for a parameter."""
        row, column = (tuple(shape[dim] for dim in sorted(kept)) for kept in self.kept(len(shape)))
        return row, column


def dims_by_size(shape: Sequence[int], min_dim_size_to_factor: int = 0) -> FactorDims | None:
    """Takes the second largest dimension as ROW, the largest as COLUMN.

    None: they are too few or too small. Of equal dimensions the later one counts as larger: a square matrix averages
    its rows' moment over dimension 1.
    """
    if len(shape) < 2:
        return None
    by_size = np.argsort(shape, kind="stable")
    if shape[by_size[-2]] < min_dim_size_to_factor:
        return None
    return FactorDims(tuple(range(len(shape))), (int(by_size[-2]),), (int(by_size[-1]),))


def dims_by_rule(rule: Sequence[FactorDim]) -> FactorDims:
    """Returns the dimensions that a rule names.

    The rule has a part per dimension.
    """
    row, column = (tuple(dim for dim, part in enumerate(rule) if part is wanted) for wanted in _FACTORED_PARTS)
    return FactorDims(tuple(dim for dim, part in enumerate(rule) if part is not FactorDim.BATCH), row, column)


_FACTORED_PARTS = (FactorDim.ROW, FactorDim.COLUMN)


def parse_rule(
    rule: FactorRule, shape: Sequence[int], path: str, fallback_to_heuristics: bool = True
) -> tuple[tuple[int, ...], HeuristicRule | FactoredPair | None]:
    """Interprets a rule for a parameter; see `FactorDims`.

    In place of ROW and COLUMN, `HEURISTIC_RULE` is returned where the sizes decide, and None where the second moment is
    not factored. With `fallback_to_heuristics`, rules for rank 2 and less without BATCH give way to `HEURISTIC_RULE`. A
    rule of another rank, or with only one of ROW and COLUMN, is a ValueError.
    """
    rank = len(shape)
    every = tuple(range(rank))
    if rule is None:
        return every, None
    if isinstance(rule, HeuristicRule):
        if rank > 2:
            error = ValueError(
                "A parameter with rank strictly higher than 2 must have an explicit factorization rule: "
                f"{path}, {tuple(shape)}"
            )
            error.add_note("Give one by factor_map, or by logical_factor_rules and the parameters' logical axes.")
            raise error
        return every, HEURISTIC_RULE
    parts = [_as_factor_dim(part, path) for part in rule]
    if len(parts) != rank:
        raise ValueError(
            f"Factorization rule {rule} has incorrect rank for param of rank {rank}: {path}, {tuple(shape)}"
        )
    dims = dims_by_rule(parts)
    if fallback_to_heuristics and rank <= 2 and FactorDim.BATCH not in parts and (dims.row or dims.column):
        _log.info("%s has rank %d: the size heuristic decides, not the rule %s.", path, rank, rule)
        return every, HEURISTIC_RULE
    if bool(dims.row) != bool(dims.column):
        raise ValueError(
            f"Factorization rule {rule} needs both ROW and COLUMN dimensions, or neither: {path}, {tuple(shape)}"
        )
    return dims.averaging, (dims.row, dims.column) if dims.factored else None


def _as_factor_dim(part: Any, path: str) -> FactorDim:
    part = FactorDim.NONE if part is None else factor_name_to_factordim(part)
    if not isinstance(part, FactorDim):
        raise ValueError(f"{part!r} in the factorization rule of {path} is no FactorDim.")
    return part


@functools.lru_cache(maxsize=4096)
def possible_dims(
    shape: Shape,
    v_row: Shape | None,
    v_col: Shape | None,
    rule: tuple[FactorDim, ...] | None,
    *,
    always_by_size: bool = False,
) -> tuple[FactorDims, ...]:
    """Lists all dimensions that a checkpoint's slots may average over.

    `v_row` and `v_col` are shapes, or None where not known, and so is T5X's rule, which counts for ranks above 2. With
    `always_by_size` the sizes decide for every rank (Optax), not only up to rank 2.
    """

    def fits(dims: FactorDims) -> bool:
        return all(have in (None, want) for have, want in zip((v_row, v_col), dims.slot_shapes(shape), strict=True))

    if always_by_size or len(shape) <= 2:
        dims = dims_by_size(shape)
        if dims is None:
            return ()
        if fits(dims):
            return (dims,)
    elif rule is not None and len(rule) == len(shape):
        dims = dims_by_rule(rule)
        return (dims,) if fits(dims) else ()
    if len(shape) > _MAX_RANK_TRIED:
        return ()
    rules = itertools.product((*_FACTORED_PARTS, FactorDim.BATCH), repeat=len(shape))
    tried = (dims_by_rule(parts) for parts in rules if set(_FACTORED_PARTS) <= set(parts))
    return tuple(dims for dims in tried if fits(dims))
