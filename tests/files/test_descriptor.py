"""Descriptors close themselves, once, also when the interpreter ends."""

import os

import pytest

from orbax_t5x.files import descriptor
from orbax_t5x.files.descriptor import Descriptor


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "file").write_text("text")
    return Descriptor(tmp_path / "file", os.O_RDONLY)


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_it_is_closed_once(opened):
    number = opened.number
    with opened:
        assert is_open(number)
    assert not is_open(number)
    opened.close()


def test_it_is_closed_when_modules_are_gone_already(opened, monkeypatch):
    """As at the interpreter's end, where an exception of `__del__` would be printed."""
    number = opened.number
    monkeypatch.setattr(descriptor, "os", None)
    opened.__del__()
    assert not is_open(number)


def test_what_cannot_be_opened_is_not_closed(tmp_path):
    with pytest.raises(FileNotFoundError):
        Descriptor(tmp_path / "nothing", os.O_RDONLY)
