"""The matrix of relatives and layouts: translations in both directions, compared value by value with NumPy's trees.

`python -m tests.support.relative_matrix` writes the table into the page of the documentation.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy, run
from tests.support import relative_trees as trees

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "relatives.md"
_BEGIN, _END = "<!-- {}: made by the tests -->", "<!-- {}: end -->"
_OTHER_PROGRAMS = frozenset(
    {"Hugging Face", "Hugging Face Flax", "Mesh TensorFlow", "Wan's text encoder", "Pix2Struct"}
)
_NO_WAY_BACK = frozenset({"Mesh TensorFlow"})


def compared(pack, source, target):
    """Translates a tree and compares every leaf; returns how many."""
    result, diagnostics = run(pack, source, target)
    assert diagnostics.problems == [], diagnostics.problems[0].message
    assert result.keys() == target.keys(), sorted(result.keys() ^ target.keys())[:5]
    for name, value in target.items():
        assert np.array_equal(as_numpy(result[name]), value), name
    return len(target)


def made(one, sizes):
    """Returns a relative's trees by layout, T5X's and Flaxformer's below a prefix."""
    plain = trees.minimal(one, sizes)
    found = {name: make(plain, one, sizes) for name, make in trees.LAYOUTS.items()}
    return {
        name: tree if name in _OTHER_PROGRAMS else trees.below("target/", tree)
        for name, tree in found.items()
        if not isinstance(tree, str)
    }


def both_ways(one, sizes):
    """Translates a relative to its layouts and back, by the packs that are found.

    Returns:
      layout -> leaves compared there and back, or why there are none. Where Hugging Face has the model the other end is
      its tree, else T5X's minimal one.
    """
    plain, there_are = trees.minimal(one, sizes), made(one, sizes)
    anchor = "Hugging Face" if "Hugging Face" in there_are else "T5X minimal"
    cells = {}
    for name, make in trees.LAYOUTS.items():
        if name not in there_are:
            cells[name] = make(plain, one, sizes)
        elif name == anchor:
            cells[name] = None
        else:
            first, last = there_are[anchor], there_are[name]
            there = None if name in _NO_WAY_BACK else compared(rules.infer(first, last), first, last)
            cells[name] = (there, compared(rules.infer(last, first), last, first))
    return cells


@functools.cache
def matrix():
    """Returns relative -> layout -> cell of `both_ways`, at the sizes of the page."""
    return {one.name: both_ways(one, trees.Sizes()) for one in trees.RELATIVES}


def _text(cell):
    if cell is None:
        return "from here"
    if isinstance(cell, str):
        return cell
    there, back = cell
    return f"– / {back}" if there is None else f"{there} / {back}"


def table():
    """Renders the matrix for the page."""
    lines = [
        "| relative | " + " | ".join(trees.LAYOUTS) + " |",
        "|---" * (len(trees.LAYOUTS) + 1) + "|",
        *(
            "| " + " | ".join([name, *(_text(cell) for cell in cells.values())]) + " |"
            for name, cells in matrix().items()
        ),
    ]
    return "\n".join(lines)


def section(name, text):
    """Returns the text between two marks of the page, and the page with another text there."""
    page = PAGE.read_text()
    begin, end = _BEGIN.format(name), _END.format(name)
    before, _, rest = page.partition(begin)
    found, _, after = rest.partition(end)
    return found.strip(), f"{before}{begin}\n\n{text}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(section("translations", table())[1])
