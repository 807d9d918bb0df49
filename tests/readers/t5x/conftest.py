"""A step of T5X with one leaf to damage."""

import gzip

import pytest

from tests.support.t5x_steps import GOOD, array


@pytest.fixture
def step(tmp_path):
    directory = tmp_path / "checkpoint_1"
    array(directory / "bad")
    array(directory / "good")
    (tmp_path / "secret").write_bytes(gzip.compress(GOOD.tobytes()))
    array(tmp_path / "outside")
    return directory
