"""Errors: the builtin that each class also is, its fields, and the documented kinds of problems."""

import ast
import copy
import errno
import pickle
import re
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x import errors
from orbax_t5x.text import problem as problem_module
from tests.support.memory_checkpoint import checkpoint

ROOT = Path(__file__).parents[2]
KINDS = typing.get_args(errors.ProblemKind)


def kinds_in_code():
    """The kinds that calls of `Problem`, `problem` and `_problem` in the package give as text."""
    found = set()
    for path in (ROOT / "orbax_t5x").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind = node.args[0]
            given = (kind.body, kind.orelse) if isinstance(kind, ast.IfExp) else (kind,)
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("Problem", "problem", "_problem"):
                found.update(one.value for one in given if isinstance(one, ast.Constant))
    return found


@pytest.mark.slow
def test_every_kind_is_used_and_every_used_kind_is_listed():
    assert kinds_in_code() == set(KINDS)


def test_every_kind_is_documented():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reference/problems.md").read_text(), re.MULTILINE)
    assert table == list(KINDS)
    listed = re.findall(r'^\* "(\w+)": ', Path(problem_module.__file__).read_text(), re.MULTILINE)
    assert listed == list(KINDS)


@pytest.mark.parametrize("number", [None, errno.EACCES])
def test_an_error_of_the_system_has_its_number(number):
    error = errors.CheckpointIOError("cannot be read", path="/a/b", leaf="x", errno=number)
    assert isinstance(error, OSError) and error.errno == number
    assert str(error) == "/a/b: leaf 'x': cannot be read."


def test_a_refused_directory_has_the_number_of_the_system(tmp_path):
    (tmp_path / "there").mkdir()
    bundle = ROOT / "orbax_t5x/cli/demo_data/model.ckpt-1000000"
    with pytest.raises(errors.CheckpointIOError) as caught:
        ot.convert(bundle, tmp_path / "there")
    assert caught.value.errno == errno.EEXIST


def test_errors_are_copied_whole_and_cleaned_however_they_are_read():
    fix = ot.errors.Fix("wait")
    error = errors.CheckpointIOError("no http://u:p@h\x1b", path="gs://b?key=S", leaf="a", errno=5, fix=fix)
    for same in (
        error,
        pickle.loads(pickle.dumps(error)),
        copy.copy(error),
        errors.error_at(error, path=error.path, leaf="a"),
    ):
        assert (same.message, same.path, same.leaf, same.errno) == ("no http://…@h\\x1b", "gs://b?…", "a", 5)
        assert same.args == (str(same),) == (str(error),)
        assert not re.search("u:p|=S|\x1b", repr(same) + str(same))
    error.args = ("in other words",)
    assert str(error) == "in other words" and error.args == ("in other words",)


# -- the text of many problems


def caught(source, target, *arguments, **keywords):
    with pytest.raises(ot.RestorePlanError) as info:
        ot.plan_restore(source, target, *arguments, **keywords)
    return info.value


def test_one_dtype_for_a_whole_model_is_one_entry():
    arrays = {f"layers_{i}/{part}": np.zeros(4, np.float32) for i in range(26) for part in ("kernel", "bias")}
    error = caught(checkpoint(arrays), {name: np.zeros(4, np.float16) for name in arrays})
    assert len(error.problems) == 52
    entry, fix, *leaves, last = str(error).splitlines()
    assert last == "52 problems between checkpoint, transforms and target: /memory"
    assert entry.startswith("[dtype] 52 leaves: the checkpoint has dtype float32, the target float16: ")
    assert entry.endswith(" the conversion would lose values.") and fix == "  Fix: pass allow_lossy_cast=True"
    assert sorted(leaves) == ["    layers_{0…25}/bias ×26", "    layers_{0…25}/kernel ×26"]


def test_one_shape_for_leaves_of_other_names_is_one_entry():
    arrays = {f"layers_{i}/{part}": np.zeros(4, np.float32) for i in range(26) for part in ("kernel", "bias")}
    target = {f"model/{name}": np.zeros((4, 2), np.float32) for name in arrays}
    error = caught(checkpoint(arrays), target, ot.transforms.Rename([("(.*)", r"model/\1")]))
    assert len(error.problems) == 52 and error.problems[0].message.endswith("(from layers_0/bias)")
    entry, fix, *leaves, _ = str(error).splitlines()
    assert entry == "[shape] 52 leaves: the checkpoint has shape (4,), the target (4, 2)."
    assert fix.startswith("  Fix: give the target the checkpoint's shape, or ")
    assert len(leaves) == 2


def test_one_typing_error_in_a_rule_is_short():
    arrays = {
        f"block_{i}/layer_{j}/kernel_of_a_long_name": np.zeros(2, np.float32) for i in range(16) for j in range(9)
    }
    target = {name.replace("block", "layers"): array for name, array in arrays.items()}
    rules = ot.transforms.AssignmentMap([(r"layers_(\d+)/(.*)", r"blok_\1/\2")])
    error = caught(checkpoint(arrays), target, rules)
    problem, leftover = error.problems
    assert "'blok_0/layer_0/kernel_of_a_long_name' does not exist" in problem.message
    assert "nor do 143 others" in problem.message and leftover.kind == "leftover"
    assert len(str(error)) < 2_000 and len(str(error).splitlines()) < 60
    mended = ot.transforms.AssignmentMap([ast.literal_eval(str(problem.fix).removeprefix("write the rule as "))])
    assert [entry.name for entry in ot.plan_restore(checkpoint(arrays), target, mended).entries] == sorted(target)


def test_a_single_problem_is_whole():
    problem = errors.Problem("missing", "a", f"Must be one of: {[str(number) for number in range(2_000)]}")
    count = "1 problem between checkpoint, transforms and target"
    assert str(errors.RestorePlanError([problem])) == f"{problem}\n{count}."
    assert str(errors.RestorePlanError([problem], path="/a")) == f"{problem}\n{count}: /a"


def test_no_kind_hides_another():
    problems = [errors.Problem("missing", f"{'abcdefghij'[i % 10] * (i + 1)}", f"reason {'x' * i}") for i in range(300)]
    problems.append(errors.Problem("shape", "last", "two shapes"))
    text = str(errors.RestorePlanError(problems))
    assert "[shape] last: two shapes" in text and "problems more of kind [missing]: see `.problems`" in text


PROBLEMS = st.lists(
    st.builds(
        errors.Problem,
        st.sampled_from(KINDS),
        st.none() | st.from_regex(r"[ab]{1,3}/layers_[0-9]{1,2}/[cd]", fullmatch=True),
        st.text("ab\n1", max_size=200),
        st.builds(errors.Fix, st.text("ab\n", max_size=30)),
    ),
    min_size=1,
    max_size=120,
)


@pytest.mark.slow
@given(PROBLEMS)
def test_a_text_is_short_and_has_every_kind(problems):
    error = errors.RestorePlanError(problems)
    assert error.problems == tuple(problems)
    assert len(str(error).splitlines()) < 60
    if not any("\n" in problem.message + str(problem.fix) for problem in problems):
        assert all(f"[{problem.kind}]" in str(error) for problem in problems)


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\nFix: rm -rf /", "a\u202eb", "a\x07b\r\nc"])
def test_no_text_of_others_moves_a_cursor_or_stands_on_a_line_of_its_own(text):
    """In messages and in the list of problems; a fix is ours."""
    error = errors.CorruptCheckpointError(f"the file says {text}", path="x")
    assert "\n" not in str(error) and str(error).isprintable() and "a" in str(error)
    listed = errors.RestorePlanError(
        [errors.Problem("shape", "x", f"it is {text}"), errors.Problem("shape", "y", text)]
    )
    assert all(line.isprintable() and not line.startswith("Fix:") for line in str(listed).splitlines())


@pytest.mark.parametrize(
    "url",
    [
        "gs://b?key=SECRET",
        "http://u:SECRET/PW@127.0.0.1:9/x",
        "http://u:SE/CRET@h/x",
        "s3://u:SECRET@b/x",
        "https://h/x?anything=SECRET",
        "hf://org/name?token=SECRET",
    ],
)
def test_no_secret_of_a_url_is_shown(url):
    with pytest.raises(errors.CheckpointError) as raised:
        ot.open_checkpoint(url)
    shown = f"{raised.value} {raised.value!r} {raised.value.path}"
    assert "SECRET" not in shown and "CRET" not in shown
