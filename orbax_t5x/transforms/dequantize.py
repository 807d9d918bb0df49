"""Quantized weights times their scales; nothing is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms.by_rules import ByRules, Matches
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, expand
from orbax_t5x.trees.flat import FlatState

_scaled = on_demand.function("orbax_t5x.lazy.several", "scaled")
# `X.weight` in float8 or int8 has a scale beside it; a marker leaf of the file says which float8 it is.
WEIGHT, MARKER = ".weight", "scaled_fp8"
SCALE, ROWS, BLOCKS, INT8 = SCALES = (".scale_weight", ".weight_scale", ".weight_scale_inv", ".SCB")
# For the inputs of layers that compute in float8, and of which kind a weight is: they change no product.
NOTES = (".scale_input", ".input_scale", ".comfy_quant", ".weight_format")
# Of integers that are not symmetric about 0.
_ZEROS = ".weight_zero_point"
_QUANTIZED = re.compile(r"(?:u?int[248]|float[468]_.*)")
_CUT = re.compile(r"[./]")
# A scale beside the module, as `query_scale`, not in it.
_SCALE_OF = re.compile(r"(.+[^./_])_(?:weight_|kernel_)?scale[^./]*", re.DOTALL)
_WEIGHTS = ("weight", "kernel", "embedding")
# Of a leaf that may multiply a weight which is kept: to leave it out would give other values.
UNKNOWN_FORM = "it may say what the quantized weight {} is multiplied by, in a form that is not known"
QUANTIZED_ELSEWHERE = Fix(
    "have the program that quantized the model write it in float32 or bfloat16, and restore from that"
)


def weight_of(name: str) -> str:
    """Returns the weight's name for a scale or a note."""
    return name.rpartition(".")[0] + WEIGHT


def scales_beside(leaves: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Lists the scales of weights among leaves."""
    return [name for name in names if name.endswith(SCALES) and _is_scale(name, leaves)]


def _is_scale(name: str, leaves: Mapping[str, Any]) -> bool:
    weight = weight_of(name)
    if weight not in leaves or weight.removesuffix(WEIGHT) + _ZEROS in leaves:
        return False
    dtype = _dtype_of(leaves[weight])
    # Packed numbers have these names beside them, too, with another product.
    kinds = {ROWS: ("float8", "int8"), BLOCKS: ("float8",), INT8: ("int8",)}
    return name.endswith(SCALE) or dtype.startswith(next(kinds[end] for end in kinds if name.endswith(end)))


def notes_beside(leaves: Mapping[str, Any]) -> set[str]:
    """Finds notes that do not change the product."""
    noted = [name for name in leaves if name.endswith(NOTES)]
    weights = set(map(weight_of, scales_beside(leaves, leaves))) if noted else ()
    return {name for name in noted if weight_of(name) in weights}


def multiplied_by(leaves: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields notes on products, with the names of their weights."""
    for name in names:
        stems = [name[: cut.end()] for cut in _CUT.finditer(name) if name[cut.end() :] not in (*_WEIGHTS, "bias")]
        if scale := _SCALE_OF.fullmatch(name):
            stems += [f"{scale[1]}{separator}" for separator in "./"]
        for stem in stems:
            for weight in (stem + kind for kind in _WEIGHTS):
                if weight in leaves and _QUANTIZED.fullmatch(_dtype_of(leaves[weight])):
                    yield name, weight


def warnings_of_scales(used: Mapping[str, Any], unused: Sequence[str]) -> list[str]:
    """Returns a warning if quantized weights are used without their scales."""
    scales = scales_beside(used, unused)
    advice = ": add ot.rules.scaled_fp8_to_float32() to the transforms" if scales else ", in a form that is not known"
    scales = scales or list({weight: name for name, weight in multiplied_by(used, unused)}.values())
    if not scales:
        return []
    count = counted(len(scales), "quantized weight is", "quantized weights are")
    return [f"{count} restored without the scale that is stored beside it ({scales[0]}){advice}"]


def _dtype_of(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", ""))


@dataclasses.dataclass(frozen=True)
class Dequantize(ByRules):
    r"""Product of quantized leaves and the scales beside them.

    Products are float32 (float64 where a leaf has 64 bits), made for each shard as it is read; `Cast` after it, or
    `dtype=`, makes them bfloat16. A leaf that matches and has no scale stays as it is.

    Attributes:
      pattern: a regex that must match a quantized leaf's whole name.
      scale: the name of its scale: one number, or one for each row; it may use the pattern's groups.
      require_match: whether it is an error that no leaf has a scale.

    Example:
      >>> dequantize = ot.transforms.Dequantize(r"(.*)\.weight", r"\1.scale_weight")
      >>> state = {"q.weight": np.ones(2, "float8_e4m3fn"), "q.scale_weight": np.float32(0.5)}
      >>> np.asarray(dequantize(state, {})["q.weight"])
      array([0.5, 0.5], dtype=float32)
    """

    pattern: Pattern
    scale: str
    require_match: bool = True

    def __post_init__(self) -> None:
        check_pattern(self.pattern, "Dequantize")
        if not isinstance(self.scale, str):
            raise TypeError(f"Dequantize: scale is a name, not {self.scale!r}")

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        rule = self._rule()
        scales: dict[str, str] = {}
        for name, (_, match) in matches.items():
            scale = expand(match, self.scale, rule, diagnostics)
            if scale is not None and scale != name and state.get(scale) is not None and state[name] is not None:
                scales[name] = scale
        if matches and not scales and self.require_match:
            message = f"{rule}: no leaf that matches has a scale; they would be {self.scale!r}"
            diagnostics.problem("unused_rule", None, message, Fix("correct the names of the scales, or remove it"))
        taken = set(scales.values())
        for name, value in state.items():
            made = None
            if name in scales:
                made = combine_leaves(
                    [(one, state[one]) for one in (name, scales[name])],
                    lambda views: _scaled(*views),
                    diagnostics,
                    becomes=name,
                    rule=rule,
                    advice="leave the leaf out of the pattern",
                )
            if made is not None:
                new.put(name, made, name, f"{rule} times {scales[name]!r}")
            elif name not in taken:
                new.put(name, value, name)
