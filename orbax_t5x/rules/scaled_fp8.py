"""Text encoders in float8 with a scale beside each weight: `X.weight` times `X.scale_weight` or `X.weight_scale`.

Such files carry a leaf `scaled_fp8`, whose dtype says which float8 it is; it holds nothing of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.rules.leaf_table import Dimensions
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.dequantize import (
    MARKER,
    QUANTIZED_ELSEWHERE,
    SCALES,
    UNKNOWN_FORM,
    WEIGHT,
    Dequantize,
    multiplied_by,
    notes_beside,
    scales_beside,
    weight_of,
)
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState

_SHOWN_NAMES = 2
_NO_WAY_BACK = (
    "to quantize is to choose a scale for each weight and to round, which the program does that reads the file"
)


def with_scales(leaves: Mapping[str, Dimensions]) -> dict[str, Dimensions]:
    """Adds to the leaves of a layout the scales that may be beside its weights, and the marker."""
    weights = [name.removesuffix(WEIGHT) for name in leaves if name.endswith(WEIGHT)]
    return {**leaves, **{name + end: () for name in weights for end in SCALES}, MARKER: ()}


@dataclasses.dataclass(frozen=True)
class TimesScales(Transform):
    """Product of weights and the scales beside them; markers and notes are dropped, other neighbours are problems."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        scales = set(scales_beside(state, state))
        dropped = notes_beside(state).union(name for name in state if name.rpartition(".")[2] == MARKER)
        result = {name: value for name, value in state.items() if name not in dropped}
        for end in SCALES:
            dequantize = Dequantize(r"(.*)\.weight", rf"\1{end}", require_match=False)
            others = {name: value for name, value in result.items() if name.endswith(end) and name not in scales}
            result = {name: _by_row(name, value, state) for name, value in result.items() if name not in others}
            result = {**dequantize.apply(result, target, diagnostics), **others}
        unread = {name: weight for name, weight in multiplied_by(state, result) if name not in diagnostics.explained}
        for name, weight in unread.items():
            diagnostics.problem("unmapped", name, UNKNOWN_FORM.format(repr(weight)), QUANTIZED_ELSEWHERE)
            diagnostics.explained.add(name)
        for name in result:
            if name.endswith(SCALES) and name not in diagnostics.explained:
                message = f"it is the scale of {weight_of(name)!r}, which the checkpoint does not have"
                diagnostics.problem("unmapped", name, message, Fix("drop it before, or use a file that is whole"))
        return result


def _by_row(name: str, value: Any, state: FlatState) -> Any:
    """Returns a flat `weight_scale` of as many numbers as its weight has rows as (rows, 1)."""
    weight = state.get(weight_of(name)) if name.endswith(SCALES[1]) else None
    if value is None or weight is None or value.shape != weight.shape[:1] or value.shape == (1,):
        return value
    return value.reshape((-1, *(1 for _ in weight.shape[1:])))


@dataclasses.dataclass(frozen=True)
class NoScalesWanted(Transform):
    """Check of the way back: a target with scaled weights is a problem, because nothing here quantizes."""

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
    """Multiplies float8 weights by the scales beside them, into float32.

    `X.weight` by `X.scale_weight` or `X.weight_scale`, which is one number or one for each row. What is known to change
    no product (`scale_input`, `comfy_quant`) is left out; anything else beside a quantized weight is a problem.
    Names stay, below any prefix. `hf_t5_to_t5x()` does the same on its way. There is no inverse: nothing here chooses
    scales.

    Example:
      >>> state = {"shared.weight": np.ones(2, "float8_e4m3fn"), "shared.scale_weight": np.float32(0.5)}
      >>> np.asarray(ot.rules.scaled_fp8_to_float32()(state, {})["shared.weight"])
      array([0.5, 0.5], dtype=float32)
    """
    example = "encoder.block.0.layer.0.SelfAttention.q.scale_weight"
    return pack_of(
        PackCall("scaled_fp8_to_float32"), (TimesScales(),), (), example=example, _why_no_inverse=_NO_WAY_BACK
    )
