"""`python -m benchmarks.scale`: compares a model of restores by several processes with measured ones.

The model is `scale_model.py`. Its costs, and the restores by 1, 2 and 4 processes, were measured on one machine
(`scale_measured.json`, made by `python -m benchmarks.scale_measure`).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from benchmarks.data import layer_shapes
from benchmarks.scale_measure import MEASURED
from benchmarks.scale_model import Case, Costs, Format, Layout, Leaf, Tree, predict

_DEVICES = 8
_LAYERS = 24
# As `scale_measure` writes them: one byte range, or one chunk, for each array.
_FORMATS = {"bundle": Format("bundle", None), "orbax": Format("orbax", 1), "t5x": Format("t5x", 1)}


def print_comparison(measured: dict[str, Any]) -> None:
    """Prints the model beside what was measured."""
    tree = Tree(tuple(Leaf(shape, count) for shape, count in Counter(layer_shapes(_LAYERS).values()).items()))
    costs = Costs(**measured["costs"])
    print("| format | layout | processes | bytes of all: model / measured | seconds: model | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, figures in measured["cases"].items():
        format_, layout, count = name.split()
        case = Case(
            tree,
            _FORMATS[format_],
            Layout(columns=layout == "columns"),
            int(count),
            _DEVICES,
            measured["cores"],
            measured["floor_bytes_per_second"],
        )
        found = predict(case, costs)
        expected = tree.nbytes if format_ != "bundle" else found.all_bytes  # of chunks the elements are counted
        print(
            f"| {format_} | {layout} | {count} | {expected / figures['bytes']:.2f} | {found.seconds:.2f} "
            f"| {figures['seconds']:.2f} | {found.seconds / figures['seconds']:.2f} |"
        )


if __name__ == "__main__":
    print_comparison(json.loads(MEASURED.read_text()))
