"""Which dimensions of a parameter a factored second moment keeps (Adafactor, arXiv 1804.04235).

`v_row` is the mean over the COLUMN dimensions and `v_col` over the ROW dimensions; BATCH dimensions (layers) stay
in both. Two rules decide which is which: up to rank 2 (and in Optax for every rank) a heuristic on sizes, beyond
that T5X's logical axes, where ROW is the embedding. Shapes alone cannot always tell the two apart: where E = H*D
both answers fit. So the heuristic is applied as it was when the state was made, logical axes may be given, and only
otherwise shapes are matched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from orbax_t5x.optim.factoring import heuristic_dims
from orbax_t5x.transforms.follow.trace import Kept

Shape = tuple[int, ...]
Spec = tuple[str, ...]

_PARTS = ("ROW", "COLUMN", "BATCH")
# 3 ** 6 ways to name the dimensions of a parameter; none has more.
_MAX_RANK = 6


class Factoring(NamedTuple):
    """The dimensions that v_row and v_col keep."""

    row: Kept
    col: Kept

    def fits(self, shape: Shape, row: Shape | None, col: Shape | None) -> bool:
        """Whether slots of these shapes can be this parameter's; None fits any."""
        return all(
            slot is None or slot == tuple(shape[dim] for dim in sorted(kept))
            for slot, kept in zip((row, col), self, strict=True)
        )


def checked_spec(spec: Sequence[Any]) -> Spec:
    """The part that each dimension plays, from text or enum members: "ROW", "COLUMN" or "BATCH".

    Raises:
      ValueError: another word, or no ROW or no COLUMN.
    """
    parts = tuple(str(getattr(part, "name", part)).upper() for part in spec)
    if not set(parts) <= set(_PARTS) or not {"ROW", "COLUMN"} <= set(parts):
        raise ValueError(f"the dimensions of a factored parameter are ROW, COLUMN (both), or BATCH, not {spec!r}")
    return parts


def by_spec(spec: Spec) -> Factoring:
    """What named dimensions mean."""
    row = frozenset(dim for dim, part in enumerate(spec) if part != "COLUMN")
    col = frozenset(dim for dim, part in enumerate(spec) if part != "ROW")
    return Factoring(row, col)


def by_size(shape: Shape) -> Factoring:
    """The heuristic: v_row drops the largest dimension, v_col the second largest; of equal ones the later counts as
    larger.
    """
    factored = heuristic_dims(shape, 0)
    assert factored is not None, "rank 2 and more"
    second, largest = factored
    dims = frozenset(range(len(shape)))
    return Factoring(dims - {largest}, dims - {second})


@functools.lru_cache(maxsize=4096)
def candidates(
    shape: Shape, row: Shape | None, col: Shape | None, spec: Spec | None, sizes_decide: bool
) -> tuple[Factoring, ...]:
    """All ways in which a parameter may be factored.

    Args:
      shape: the parameter's.
      row: the shape of v_row, or None where it is not known.
      col: the shape of v_col, likewise.
      spec: the part of each dimension where it is known.
      sizes_decide: whether the heuristic is used for every rank (Optax), not only up to rank 2.
    """
    if len(shape) < 2:
        return ()
    if sizes_decide or len(shape) <= 2:
        known = by_size(shape)
        if known.fits(shape, row, col):
            return (known,)
    elif spec is not None and len(spec) == len(shape):
        known = by_spec(spec)
        return (known,) if known.fits(shape, row, col) else ()
    if len(shape) > _MAX_RANK:
        return ()
    found = (
        by_spec(parts) for parts in itertools.product(_PARTS, repeat=len(shape)) if "ROW" in parts and "COLUMN" in parts
    )
    return tuple(factoring for factoring in found if factoring.fits(shape, row, col))
