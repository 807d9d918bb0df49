"""Summaries of docstrings are short and name their things, in every room.

A summary is the first paragraph. Its hard words stand for a noun that the reader has to find. Of comparable packages,
zarr-python and Orbax have 0.5 in 100 words, zarr-indexing 1.3; their median summary has 8 to 10 words.
"""

import ast
import collections
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent

HARD = re.compile(r"\b(what|whatever|those|which|one|ones|none|whose|where|others)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")
_CODE = re.compile(r"`[^`]*`")

# Hard words in 100, the median of words, and the words of the longest summary, in each room.
MOST_HARD, MOST_MEDIAN, MOST_WORDS = 1.5, 10, 12


class Summary(NamedTuple):
    """The first paragraph of a docstring, code left out."""

    place: str
    text: str

    @property
    def words(self) -> int:
        return len(WORD.findall(self.text))

    @property
    def hard_words(self) -> int:
        return len(HARD.findall(self.text))


def summaries(tree: ast.AST, file: str) -> Iterator[Summary]:
    """Yields the summaries of a module and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            first = _CODE.sub("x", text.strip().split("\n\n")[0].replace("\n", " "))
            if WORD.search(first):
                place = f"{file}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
                yield Summary(place, first)


def by_room() -> dict[str, list[Summary]]:
    rooms: dict[str, list[Summary]] = collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        rooms[parts[0] if len(parts) > 1 else "doors"] += summaries(ast.parse(path.read_text()), "/".join(parts))
    return rooms


def figures(found: list[Summary]) -> tuple[float, float]:
    """Hard words in 100, and the median of words."""
    words = [summary.words for summary in found]
    return 100 * sum(summary.hard_words for summary in found) / sum(words), statistics.median(words)


def test_the_measure():
    tree = ast.parse(
        '"""One thing, or none."""\ndef f():\n    """Returns `what` it\n    is.\n\n    Which?"""\nclass C:\n    pass'
    )
    found = list(summaries(tree, "a.py"))
    assert [(one.place, one.words, one.hard_words) for one in found] == [("a.py:1 module", 4, 2), ("a.py:2 f", 4, 0)]
    assert figures(found) == (25.0, 4)


ROOMS = by_room()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_summaries_are_plain_and_short(room):
    hard, median = figures(ROOMS[room])
    hardest = sorted(ROOMS[room], key=lambda one: (-one.hard_words, -one.words))[:5]
    shown = "\n".join(f"  {one.place}: {one.text}" for one in hardest)
    assert hard <= MOST_HARD and median <= MOST_MEDIAN, (
        f"{room}: {hard:.2f} in 100, median {median:g}; hardest:\n{shown}"
    )
    long = [f"{one.place}: {one.words} words: {one.text}" for one in ROOMS[room] if one.words > MOST_WORDS]
    assert not long, "\n".join(long)
