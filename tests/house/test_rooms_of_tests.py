"""Tests lie where the package's modules lie: a folder for each room, and what several tests use is in `support`."""

import ast
import re
from pathlib import Path

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent
TESTS = Path(__file__).parents[1]
# `doors`: of modules that are rooms by themselves; `robustness`: what all formats promise; `house`: of the repository.
OF_THE_WHOLE = {"doors", "robustness", "house"}
# Files that are no tests: helpers, programs that tests start, and the fuzzer.
OF_NO_TESTS = {"support", "fuzz", "goldens", "corpus", "multihost/jobs"}
# The suites are tested in their subclasses, in the rooms of what they test; that they find mistakes, in one file.
OF_OTHER_FILES = {"testing"}
# A module of more lines of code has a test file of its name.
MOST_LINES = 30
TEST_FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def rooms() -> list[str]:
    return sorted(path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


@pytest.mark.parametrize("room", [room for room in rooms() if not room.startswith("_")])
def test_each_room_has_tests(room):
    if (PACKAGE / room).is_dir():
        assert any((TESTS / room).rglob("test_*.py"))
    else:
        assert (TESTS / "doors" / f"test_{room}.py").exists()


def test_each_folder_of_tests_has_fast_ones():
    """`make test-fast` goes once through each room: somewhere is a test without any mark."""

    def has_a_fast_test(path: Path) -> bool:
        text = path.read_text()
        return not re.search(r"^pytestmark = .*slow", text, re.MULTILINE) and "\n\n\ndef test_" in text

    folders = {path.parts[0] for path in TEST_FILES}
    assert {folder for folder in folders if not any(map(has_a_fast_test, (TESTS / folder).rglob("test_*.py")))} == set()


def test_folders_of_tests_are_those_of_the_package():
    folders = {str(path.parent) for path in TEST_FILES} - OF_THE_WHOLE
    assert {folder for folder in folders if not (PACKAGE / folder / "__init__.py").exists()} == set()


def test_helpers_are_no_tests():
    def holds_no_tests(path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in OF_NO_TESTS)

    assert [path for path in TEST_FILES if holds_no_tests(path)] == []


def imported_modules(path: Path) -> set[str]:
    """The modules that a file names in imports, in functions, too: `from tests import x` names `tests.x`."""
    found = set()
    for node in ast.walk(ast.parse((TESTS / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def lines_of_code(tree: ast.Module) -> int:
    """The lines on which something begins or ends that runs: no comments, blank lines or docstrings."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    texts = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    code = [node for node in nodes if node not in texts and not (isinstance(node, ast.Expr) and node.value in texts)]
    return len({node.lineno for node in code} | {node.end_lineno for node in code})


def test_each_module_has_a_test_file_of_its_name():
    def expected(module: Path) -> Path:
        room = module.parent if module.parent != Path() else Path("doors")
        return TESTS / room / f"test_{module.stem.removeprefix('_')}.py"

    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    missing = [path for path in modules if path.parts[0] not in OF_OTHER_FILES and not expected(path).exists()]
    long = [path for path in missing if lines_of_code(ast.parse((PACKAGE / path).read_text())) > MOST_LINES]
    assert long == []


@pytest.mark.slow
def test_no_module_imports_a_test():
    tests = {".".join(("tests", *path.with_suffix("").parts)) for path in TEST_FILES}
    every = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    assert {str(path): found for path in every if (found := imported_modules(path) & tests)} == {}


def test_each_test_file_has_tests():
    empty = [path for path in TEST_FILES if "def test_" not in (TESTS / path).read_text()]
    # A subclass of a suite inherits its tests.
    assert [path for path in empty if "Suite" not in (TESTS / path).read_text()] == []
