"""Weights that are quantized with one scale each become floating-point numbers; nothing is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import scaled
from orbax_t5x.transforms.by_rules import ByRules, Matches
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, expand, pattern_text
from orbax_t5x.transforms.state import NewState, combine_leaves
from orbax_t5x.trees.flat import FlatState

# Text encoders in float8: `X.weight` has a scale beside it, and one leaf of the file says which float8 it is.
WEIGHT, SCALE = ".weight", ".scale_weight"
MARKER = "scaled_fp8"


def weight_of(scale: str) -> str:
    """Returns the name of the weight that a scale is stored beside."""
    return scale.removesuffix(SCALE) + WEIGHT


def scales_beside(weights: Collection[str], names: Iterable[str]) -> list[str]:
    """Lists the names of scales that belong to given weights."""
    return [name for name in names if name.endswith(SCALE) and weight_of(name) in weights]


@dataclasses.dataclass(frozen=True)
class Dequantize(ByRules):
    r"""Product of quantized leaves and the scale that is stored beside each, which is consumed.

    Products are float32 (float64 where a leaf has 64 bits), made for each shard as it is read; `Cast` after it, or
    `dtype=`, makes them bfloat16. A leaf that matches and has no scale stays as it is.

    Attributes:
      pattern: a regex that must match a quantized leaf's whole name.
      scale: the name of its scale, of shape () or (1,); it may use the pattern's groups.
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

    def _patterns(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        rule = f"Dequantize {pattern_text(self.pattern)!r}"
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
                    lambda views: scaled(*views),
                    diagnostics,
                    becomes=name,
                    rule=rule,
                    advice="leave the leaf out of the pattern",
                )
            if made is not None:
                new.put(name, made, name, f"{rule} times {scales[name]!r}")
            elif name not in taken:
                new.put(name, value, name)
