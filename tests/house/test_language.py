"""Docstrings begin with what they document: a function's with a verb in the third person, a class's with a noun."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent

# Of any docstring: a clause in place of a verb or a noun.
NEVER_FIRST = frozenset(
    "What Whatever Whether How Where Wherever Why Who Whoever Whose Which When Everything Everybody Nothing Nobody "
    "Somebody That There Those It They".split()
)
# Of a function's: verbs end in "s", but for a reference to another docstring.
OTHER_VERBS = frozenset({"See"})

FirstWord = tuple[str, str]
"""The kind of what is documented ("module", "class", "property" or "function"), and the first word of its docstring."""


def first_words(tree: ast.AST) -> Iterator[tuple[str, FirstWord]]:
    """Yields names and first words of everything that has a docstring, nested functions included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        word = re.match(r"[\w'`]*", text)
        assert word is not None
        kind, name = "module", ""
        if isinstance(node, ast.ClassDef):
            kind, name = "class", node.name
        elif not isinstance(node, ast.Module):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_property = any("property" in decorator for decorator in decorators)
            kind, name = "property" if is_property else "function", node.name
        yield name, (kind, word[0])


def constants_words(tree: ast.AST) -> Iterator[tuple[str, FirstWord]]:
    """Yields names and first words of the docstrings below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, after in itertools.pairwise(body if isinstance(body, list) else ()):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                    yield ast.unparse(target), ("constant", after.value.value.split(maxsplit=1)[0])


def begins_well(first: FirstWord) -> bool:
    kind, word = first
    if kind != "function":
        return word not in NEVER_FIRST
    return word in OTHER_VERBS or (word.endswith("s") and word not in NEVER_FIRST)


@pytest.mark.parametrize(
    ("first", "well"),
    [
        (("function", "Returns"), True),
        (("function", "See"), True),
        (("function", "Whether"), False),
        (("function", "The"), False),
        (("class", "Table"), True),
        (("class", "What"), False),
        (("property", "The"), True),
        (("property", "Where"), False),
        (("module", "How"), False),
    ],
)
def test_clauses_are_found(first, well):
    assert begins_well(first) is well


def test_docstrings_of_constants_are_found():
    tree = ast.parse('A: int = 1\n"""Which way."""\nB = 2\nclass C:\n    D = 3\n    """Size of x."""')
    found = dict(constants_words(tree))
    assert found == {"A": ("constant", "Which"), "D": ("constant", "Size")}
    assert [begins_well(first) for first in found.values()] == [False, True]


@pytest.mark.slow
def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [
        f"{path.relative_to(PACKAGE)}: {name}: {first[1]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for tree in [ast.parse(path.read_text())]
        for name, first in (*first_words(tree), *constants_words(tree))
        if not begins_well(first)
    ]
    assert not found, f"{len(found)} docstrings begin otherwise (CONTRIBUTING.md):\n" + "\n".join(found)
