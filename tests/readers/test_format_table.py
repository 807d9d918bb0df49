"""The table of formats: own rows load nothing until they are used, and formats of others are seen everywhere."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.readers.format_table import FORMATS, all_formats
from orbax_t5x.testing.array_leaf import ArrayLeaf


def open_text(path, *, limits):
    """Opens a file of numbers as text."""
    leaf = ArrayLeaf(np.loadtxt(path, dtype=np.float32), "w")
    return ot.Checkpoint(path=path, format="text", step=None, leaves={"w": leaf})


TEXT = ot.Format("text", open_text, files=[ot.Mark("*.numbers"), ot.Mark(head=b"# numbers")], sought="numbers as text")


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "model.numbers"
    np.savetxt(path, np.arange(3))
    return path


def test_a_registered_format_is_seen_until_it_is_unregistered(numbers):
    with pytest.raises(UnsupportedCheckpointError, match="not a checkpoint of a known format"):
        ot.open_checkpoint(numbers)
    with ot.register_format(TEXT):
        assert FORMATS.names()[-1] == "text"
        for format in (None, "text"):
            with ot.open_checkpoint(numbers, format=format) as checkpoint:
                assert checkpoint.format == "text"
        np.testing.assert_array_equal(ot.restore(numbers, None)["w"], np.arange(3))
        np.testing.assert_array_equal(ot.restore(ot.Source(numbers, format="text"), None)["w"], np.arange(3))
        with pytest.raises(ValueError, match="'gguf', 'text'"):
            ot.open_checkpoint(numbers, format="numbers")
        with pytest.raises(CheckpointNotFoundError, match="a GGUF file; numbers as text; a root"):
            ot.open_checkpoint(numbers.parent)
        with pytest.raises(UnsupportedCheckpointError, match="a text has no items"):
            ot.open_checkpoint(numbers, item="state")
    with pytest.raises(ValueError, match="format='text' is none of"):
        ot.open_checkpoint(numbers, format="text")
    with pytest.raises(ValueError, match=r"'torch'.*; did you mean 'safetensors'\?"):
        ot.open_checkpoint(numbers, format="safetensor")


def test_two_registered_formats_of_one_file(numbers):
    other = ot.Format("other", open_text, files=[ot.Mark("*.numbers")])
    with (
        ot.register_format(TEXT),
        ot.register_format(other),
        pytest.raises(UnsupportedCheckpointError, match=r"(?s)text by its name .*other by its name .*format='other'"),
    ):
        ot.open_checkpoint(numbers)


def test_a_name_is_given_once():
    registered = ot.register_format(TEXT)
    try:
        for format in (TEXT, ot.Format("orbax", open_text)):
            with pytest.raises(ValueError, match="is registered already"):
                ot.register_format(format)
    finally:
        registered.unregister()
    registered.unregister()
    with pytest.raises(TypeError, match=r"an orbax_t5x\.Format, not a function"):
        ot.register_format(open_text)


def run_python(code: str, *arguments: object, path: Path | None = None) -> str:
    before = "" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n"
    command = [sys.executable, "-c", before + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path):
    """A package with an entry point, as pip installs it."""
    (tmp_path / "numbers_reader.py").write_text(
        textwrap.dedent("""
            import numpy as np
            import orbax_t5x as ot

            def open_text(path, *, limits):
                return ot.Checkpoint(path=path, format="text", step=None, leaves={})

            FORMAT = ot.Format("text", open_text, files=[ot.Mark("*.numbers")])
        """)
    )
    info = tmp_path / "numbers_reader-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numbers-reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[orbax_t5x.formats]\ntext = numbers_reader:FORMAT\nlost = numbers_reader:NOTHING\norbax = numbers_reader:X\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_format_of_an_installed_package(installed, numbers):
    """A broken row is left out with a warning; the package's own names win; the command line sees the format, too."""
    code = """
        import sys, warnings, orbax_t5x as ot
        from orbax_t5x.cli.main import main
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(ot.open_checkpoint(sys.argv[1]).format, ot.open_checkpoint(sys.argv[1], format="text").format)
        try:
            ot.open_checkpoint(sys.argv[1], format="lost")
        except ot.errors.UnsupportedCheckpointError as error:
            print(error.message)
        print(sorted(str(one.message).partition(": ")[0] for one in caught))
        print(main(["inspect", sys.argv[1]]))
    """
    lines = run_python(code, numbers, path=installed).splitlines()
    taken, lost = (
        f"the format {one} is left out" for one in ("'orbax' at numbers_reader:X", "'lost' of an installed package")
    )
    assert lines[0] == "text text"
    assert lines[1] == f"{lost}: module 'numbers_reader' has no attribute 'NOTHING'"
    assert lines[2] == str([lost, taken])
    assert " ".join(lines[3:]).split()[1] == "text" and lines[-1] == "0"


def test_every_own_row_has_the_name_of_its_entry():
    assert [row.name for row in all_formats()] == list(FORMATS.names())


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_format_has_a_name(name):
    with pytest.raises(ValueError, match="the name of a format is a text"):
        ot.Format(name, "module:function")


def test_marks_may_be_lists():
    row = ot.Format("x", "module:function", files=[ot.Mark("*.x")], directory=[ot.Mark("x")])
    assert (row.files, row.directory) == ((ot.Mark("*.x"),), (ot.Mark("x"),))
    assert hash(row) == hash(ot.Format("x", "module:function", files=row.files, directory=row.directory))


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"head": "TOY"}, TypeError, "head= of a mark is a regular expression of bytes, not 'TOY'"),
        ({"tail": b"("}, ValueError, r"tail=b'\(' of a mark is no regular expression"),
        ({"weight": "strong"}, ValueError, "weight='strong' of a mark is none of 'own', 'loose', 'hint'"),
    ],
)
def test_a_mark_that_cannot_be_looked_for_is_refused(given, error, told):
    with pytest.raises(error, match=told):
        ot.Mark("*.x", **given)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"open": "module"}, ValueError, "x: open='module' is no place of a function"),
        ({"open": 3}, TypeError, "x: open= is a function or its place as text, not 3"),
        ({"open": "a.b:c", "files": ["*.x"]}, TypeError, r"x: marks are orbax_t5x\.Mark objects, not '\*\.x'"),
    ],
)
def test_a_format_that_cannot_open_is_refused(given, error, told):
    with pytest.raises(error, match=told):
        ot.Format("x", **given)


def test_what_an_opener_returns_is_an_open_checkpoint_of_leaves(tmp_path):
    def open_x(path, *, limits):
        return ot.Checkpoint(path=path, format="x", step=None, leaves={"w": np.ones(3)})

    (tmp_path / "a.x").touch()
    with ot.register_format(ot.Format("x", lambda path, *, limits: None, files=[ot.Mark("*.x")])):
        with pytest.raises(
            UnsupportedCheckpointError, match=r"'x' opens it as NoneType, not as an orbax_t5x\.Checkpoint"
        ):
            ot.open_checkpoint(tmp_path / "a.x")
    with ot.register_format(ot.Format("x", open_x, files=[ot.Mark("*.x")])):
        with pytest.raises(UnsupportedCheckpointError, match=r"leaves of a Checkpoint are .*Leaf objects, not ndarray"):
            ot.open_checkpoint(tmp_path / "a.x")
