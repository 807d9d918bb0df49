"""Fixtures for tests of Orbax's table of type handlers."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot


@pytest.fixture(autouse=True)
def table():
    """Asserts that the process's table is unchanged after a test."""
    before = ocp.type_handlers.get_type_handler(np.ndarray)
    yield
    assert ocp.type_handlers.get_type_handler(np.ndarray) is before


@pytest.fixture
def registered():
    with ot.register_type_handlers():
        yield
