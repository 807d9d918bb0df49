"""Errors: the builtin that each class also is, its fields, and the documented kinds of problems."""

import ast
import errno
import re
import typing
from pathlib import Path

import pytest

import orbax_t5x as ot
from orbax_t5x import errors

ROOT = Path(__file__).parent.parent
KINDS = typing.get_args(errors.ProblemKind)


def kinds_in_code():
    """The kinds that calls of `Problem`, `problem` and `_problem` in the package give as text."""
    found = set()
    for path in (ROOT / "orbax_t5x").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("Problem", "problem", "_problem"):
                found.add(node.args[0].value)
    return found


def test_every_kind_is_used_and_every_used_kind_is_listed():
    assert kinds_in_code() == set(KINDS)


def test_every_kind_is_documented():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/problems.md").read_text(), re.MULTILINE)
    assert table == list(KINDS)
    listed = re.findall(r'^\* "(\w+)": ', Path(errors.__file__).read_text(), re.MULTILINE)
    assert listed == list(KINDS)


@pytest.mark.parametrize("number", [None, errno.EACCES])
def test_an_error_of_the_system_has_its_number(number):
    error = errors.CheckpointIOError("cannot be read", path="/a/b", leaf="x", errno=number)
    assert isinstance(error, OSError) and error.errno == number
    assert str(error) == "/a/b: leaf 'x': cannot be read"


def test_a_refused_directory_has_the_number_of_the_system(tmp_path):
    (tmp_path / "there").mkdir()
    bundle = ROOT / "orbax_t5x/cli/demo_data/model.ckpt-1000000"
    with pytest.raises(errors.CheckpointIOError) as caught:
        ot.convert(bundle, tmp_path / "there")
    assert caught.value.errno == errno.EEXIST
