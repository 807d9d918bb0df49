"""The words of the page on the architecture are few, and those that have a class are written with its name."""

import ast
import re
from pathlib import Path

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent
MOST_WORDS = 34


def words() -> dict[str, str]:
    """The rows of the glossary: word -> meaning."""
    page = (PACKAGE.parent / "docs" / "project" / "architecture.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.partition("## Words")[2], re.MULTILINE)
    return {word: meaning for word, meaning in rows if word != "word"}


def names_of_classes() -> set[str]:
    """The classes of the package, and the names for other types."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.add(node.targets[0].id)
    return found


def test_there_are_no_more_words_than_a_person_keeps_in_mind():
    assert 20 < len(words()) <= MOST_WORDS


def test_words_are_written_with_the_names_of_their_classes():
    named = {name for meaning in words().values() for name in re.findall(r"`([A-Z]\w+)`", meaning)}
    assert len(named) > 20 and named - names_of_classes() == set()
