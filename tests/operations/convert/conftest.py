"""A bundle to convert, and where to."""

import pytest

from tests.support.bundle_writer import bundle_of
from tests.support.killed_blocks import ARRAYS


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return bundle_of(ARRAYS).write(tmp_path / "source")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "c"
