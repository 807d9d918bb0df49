"""Formats and their marks, as data."""

import pytest

import orbax_t5x as ot


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
