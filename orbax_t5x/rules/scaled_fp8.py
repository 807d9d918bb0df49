"""Quantized weights times the scales beside them.

`X.scale_weight` and `X.weight_scale` are one number or one for each row, `X.weight_scale_inv` one for each block, and
`X.SCB` (bitsandbytes) the largest number of each row, of which int8 has 127 parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View, as_view, broadcast_to
from orbax_t5x.lazy.several import scaled
from orbax_t5x.rules.leaf_table import Dimensions
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.dequantize import (
    BLOCKS,
    INT8,
    MARKER,
    QUANTIZED_ELSEWHERE,
    ROWS,
    SCALES,
    UNKNOWN_FORM,
    WEIGHT,
    multiplied_by,
    notes_beside,
    scales_beside,
    weight_of,
)
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.trees.flat import FlatState

_SHOWN_NAMES = 2
# DeepSeek's, and the only size for which kernels exist.
_BLOCK_ROWS = 128
_FORMAT = ".weight_format"
_NO_WAY_BACK = (
    "to quantize is to choose a scale for each weight and to round, which the program does that reads the file"
)


def with_scales(leaves: Mapping[str, Dimensions]) -> dict[str, Dimensions]:
    """Adds possible scales and the marker to a layout's leaves."""
    weights = [name.removesuffix(WEIGHT) for name in leaves if name.endswith(WEIGHT)]
    return {**leaves, **{name + end: () for name in weights for end in SCALES}, MARKER: ()}


@dataclasses.dataclass(frozen=True)
class TimesScales(Transform):
    """Product of weights and their scales."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        scales: dict[str, str] = {}
        for name in scales_beside(state, state):
            scales.setdefault(weight_of(name), name)
        dropped = notes_beside(state).union(name for name in state if name.rpartition(".")[2] == MARKER)
        dropped.update(scales.values())
        result = NewState(diagnostics)
        for name, value in state.items():
            if name not in scales:
                if name not in dropped:
                    result.put(name, value, name)
                continue
            scale = scales[name]
            format_of = state.get(name.removesuffix(WEIGHT) + _FORMAT)
            made = combine_leaves(
                [(one, state[one]) for one in (name, scale)],
                functools.partial(_product, name=scale, format_of=format_of),
                diagnostics,
                becomes=name,
                rule=f"times {scale!r}",
                advice=QUANTIZED_ELSEWHERE.text,
            )
            if made is None:
                diagnostics.explained.add(name)
            else:
                result.put(name, made, name, f"times {scale!r}")
        made_state = result.finish()
        unread = {
            name: weight for name, weight in multiplied_by(state, made_state) if name not in diagnostics.explained
        }
        for name, weight in unread.items():
            diagnostics.problem("unmapped", name, UNKNOWN_FORM.format(repr(weight)), QUANTIZED_ELSEWHERE)
            diagnostics.explained.add(name)
        for name in made_state:
            if name.endswith(SCALES) and name not in diagnostics.explained:
                message = f"it is the scale of {weight_of(name)!r}, which the checkpoint does not have"
                diagnostics.problem("unmapped", name, message, Fix("drop it before, or use a file that is whole"))
        return made_state


def _product(views: list[View], *, name: str, format_of: Any) -> View:
    """Multiplies a weight by the scale of a name."""
    weight, scale = views
    if name.endswith((ROWS, INT8)) and scale.shape == weight.shape[:1] != (1,):
        scale = scale.reshape((-1, *(1 for _ in weight.shape[1:])))
    if name.endswith(INT8):
        product = scaled(weight, scale.map(_int8_parts, "x / 127"))
        return product if format_of is None else scaled(product, as_view(format_of).map(_by_rows, "if by rows"))
    if name.endswith(BLOCKS) and scale.ndim == weight.ndim == 2:
        rows, columns = scale.shape
        blocks = scale.reshape((rows, 1, columns, 1))
        if tuple(-(-size // _BLOCK_ROWS) for size in weight.shape) == scale.shape:
            wide = broadcast_to(blocks, (rows, _BLOCK_ROWS, columns, _BLOCK_ROWS))
            wide = wide.reshape((rows * _BLOCK_ROWS, columns * _BLOCK_ROWS))
            scale = wide[: weight.shape[0], : weight.shape[1]]
    return scaled(weight, scale)


def _int8_parts(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float32) / np.float32(127)


def _by_rows(format_of: np.ndarray) -> np.ndarray:
    """Returns 1 for bitsandbytes' row format."""
    if format_of.any():
        raise ValueError(f"weight_format is {format_of.max()}, and only 0, by rows, is known")
    return np.ones_like(format_of, np.float32)


@dataclasses.dataclass(frozen=True)
class NoScalesWanted(Transform):
    """Check that a target wants no quantized weights."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        scales = scales_beside(target, target)
        if scales:
            message = f"the target has scaled float8 weights ({listed(scales, _SHOWN_NAMES)}): {_NO_WAY_BACK}"
            fix = "restore into a target without scales, in float32 or bfloat16, and quantize what that gives"
            diagnostics.problem("rule", None, message, Fix(fix))
            # Every other problem of such a target would have the same cause.
            diagnostics.explained.update(target)
        return {} if scales else dict(state)


def scaled_fp8_to_float32() -> RulePack:
    """Multiplies float8 and int8 weights by the scales beside them, into float32.

    `X.weight` by `X.scale_weight` or `X.weight_scale` (one number, or one for each row), `X.weight_scale_inv` (one for
    each block of 128 by 128, as DeepSeek's) or `X.SCB / 127` (bitsandbytes' int8). Notes that change no product
    (`scale_input`, `comfy_quant`) are left out; anything else beside a quantized weight is a problem. Names stay, below
    any prefix. `hf_t5_to_t5x()` does the same on its way. There is no inverse: nothing here chooses scales.

    Example:
      >>> state = {"shared.weight": np.ones(2, "float8_e4m3fn"), "shared.scale_weight": np.float32(0.5)}
      >>> np.asarray(ot.rules.scaled_fp8_to_float32()(state, {})["shared.weight"])
      array([0.5, 0.5], dtype=float32)
    """
    example = "encoder.block.0.layer.0.SelfAttention.q.scale_weight"
    return pack_of(
        PackCall("scaled_fp8_to_float32"), (TimesScales(),), (), example=example, _why_no_inverse=_NO_WAY_BACK
    )
