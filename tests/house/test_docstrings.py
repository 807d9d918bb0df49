"""Every example in a docstring runs, and everything public has one."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint.experimental import v1 as ocp_v1

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent
_PARSER = doctest.DocTestParser()


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring with examples."""

    path: Path
    owner: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}:{self.owner}"


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yields the docstrings of a module: its own, those of classes and functions, and those below assignments."""

    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, owner: str):
        before: ast.stmt | None = None
        for statement in node.body:
            named = owner
            if isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                named = ast.unparse(target)
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield Docstring(path, named, statement.lineno, inspect.cleandoc(statement.value.value))
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(statement, f"{owner}.{statement.name}".lstrip("."))
            before = statement

    yield from visit(ast.parse(path.read_text()), "")


WITH_EXAMPLES = [
    docstring
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text()
    for docstring in docstrings(path)
    if ">>>" in docstring.text
]


@pytest.mark.parametrize("docstring", WITH_EXAMPLES, ids=str)
def test_examples_run(docstring, goldens, tmp_path, standard_dtype_promotion):
    """The names that an example may use besides the libraries: two checkpoints, and a directory for its own."""
    names = {
        **{"ot": ot, "np": np, "jax": jax, "jnp": jnp, "ocp": ocp, "ocp_v1": ocp_v1},
        **{"flax": flax, "nnx": nnx, "optax": optax},
        "bundle": str(goldens / "tf_bundle" / "t5_1_1_f32"),
        "directory": tmp_path,
    }
    test = _PARSER.get_doctest(docstring.text, names, str(docstring), str(docstring.path), docstring.line)
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=failures.append)
    assert not failures, "".join(failures)


def documented(owner: types.ModuleType, names: Iterator[str]) -> dict[str, str]:
    """Returns the docstring of each name: that of a constant is below its assignment in its module."""
    below = {docstring.owner: docstring.text for docstring in WITH_EXAMPLES}
    found = {}
    for name in names:
        value = getattr(owner, name)
        has_its_own = isinstance(value, types.ModuleType | type) or inspect.isroutine(value)
        found[f"{owner.__name__}.{name}"] = (inspect.getdoc(value) if has_its_own else below.get(name)) or ""
    return found


@pytest.mark.parametrize("owner", [ot, ot.transforms, ot.rules], ids=lambda module: module.__name__)
def test_everything_public_has_an_example(owner):
    """Of two to six lines of input, and, for a class, its own and not its parent's."""
    lacking = []
    for name, text in documented(owner, iter(owner.__all__)).items():
        examples = _PARSER.get_examples(text)
        lines = sum(len(example.source.splitlines()) for example in examples)
        shown = lines + sum(len(example.want.splitlines()) for example in examples)
        if not examples or not 2 <= shown <= 9 or lines > 6:
            lacking.append(f"{name}: {lines} lines")
    assert not lacking


def public_methods(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the public methods of a module's public classes, but for the tests of a suite."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    if not method.name.startswith(("_", "test_")):
                        yield node.name, method.name


@pytest.mark.slow
def test_public_methods_have_a_docstring_or_inherit_one():
    lacking = []
    for path in PACKAGE.rglob("*.py"):
        methods = list(public_methods(path))
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name) if methods else None
        lacking += [
            f"{name}.{owner}.{method}"
            for owner, method in methods
            if not inspect.getdoc(getattr(getattr(module, owner), method))
        ]
    assert not lacking


def test_a_class_has_its_own_docstring():
    classes = [value for name in ot.transforms.__all__ if isinstance(value := getattr(ot.transforms, name), type)]
    assert len(classes) > 20 and [each for each in classes if ">>>" not in (each.__doc__ or "")] == []
