"""Draws the benchmarks' plots: `python docs/plots.py` writes docs/_static/plots/*.svg from benchmarks/measured.json.

A drawing has the text's colour and font, so that it is read on light and on dark ground.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured.json"
PLOTS = ROOT / "docs" / "_static" / "plots"
_WIDTH, _LABELS, _ROW, _TOP = 860, 450, 28, 12
_RIGHT = _WIDTH - 60


def position(plot: dict[str, Any], value: float) -> float:
    """Returns the horizontal position of a value."""
    scale = math.log if plot["scale"] == "log" else float
    least, most = scale(plot["least"]), scale(plot["most"])
    return _LABELS + (_RIGHT - _LABELS) * (scale(value) - least) / (most - least)


def svg(plot: dict[str, Any]) -> str:
    """Returns a plot of horizontal bars, which begin at 1 on a logarithmic axis and at 0 on a linear one."""
    is_log = plot["scale"] == "log"
    bottom = _TOP + _ROW * len(plot["bars"])
    spoken = "; ".join(f"{bar['label']}: {bar['value']:g}" for bar in plot["bars"])
    lines = [
        f'<svg class="plot" role="img" aria-label="{html.escape(plot["title"])}. {html.escape(spoken)}." '
        f'viewBox="0 0 {_WIDTH} {bottom + 42}" xmlns="http://www.w3.org/2000/svg" font-family="inherit" font-size="14" '
        'fill="currentColor">'
    ]
    one = position(plot, 1)
    for index, bar in enumerate(plot["bars"]):
        middle = _TOP + _ROW * index + _ROW / 2
        end, start = position(plot, bar["value"]), one if is_log else position(plot, 0)
        left, right = sorted((start, end))
        lines.append(f'<text x="{_LABELS - 8}" y="{middle + 5:g}" text-anchor="end">{html.escape(bar["label"])}</text>')
        lines.append(
            f'<rect class="bar" x="{left:.1f}" y="{middle - 8:g}" width="{right - left:.1f}" height="16" rx="2"/>'
        )
        if "low" in bar:
            low, high = position(plot, bar["low"]), position(plot, bar["high"])
            ends = "".join(f" M{x:.1f} {middle - 5:g} v10" for x in (low, high))
            line = f"M{low:.1f} {middle:g} H{high:.1f}{ends}"
            lines.append(f'<path d="{line}" stroke="currentColor" stroke-width="1.5"/>')
        after, anchor = (left - 6, "end") if is_log and end < start else (right + 6, "start")
        if "high" in bar:
            after = max(after, position(plot, bar["high"]) + 6)
        lines.append(f'<text x="{after:.1f}" y="{middle + 5:g}" text-anchor="{anchor}">{bar["value"]:g}</text>')
    if plot["axis"].startswith("ratio"):
        lines.append(f'<path d="M{one:.1f} {_TOP - 6} V{bottom + 4}" stroke="currentColor" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{one:.1f}" y="{bottom + 18}" text-anchor="middle">1</text>')
    lines.append(f'<text x="{_WIDTH / 2:g}" y="{bottom + 38}" text-anchor="middle">{html.escape(plot["axis"])}</text>')
    return "\n".join([*lines, "</svg>\n"])


def drawings() -> dict[str, str]:
    """Returns the drawing of each plot by its file's name."""
    return {f"{plot['name']}.svg": svg(plot) for plot in json.loads(MEASURED.read_text())["plots"]}


if __name__ == "__main__":
    PLOTS.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (PLOTS / name).write_text(drawing)
