"""Formats and their marks, as data."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError


def test_a_mark_shows_what_it_was_given():
    assert repr(ot.Mark()) == "Mark()"
    assert repr(ot.Mark("a.*", head=b"x", weight="hint")) == "Mark(name='a.*', head=b'x', weight='hint')"


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
