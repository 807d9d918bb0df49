"""Leaves that block and leaves that are awaited."""

import numpy as np
import pytest

from tests.conftest import GOLDENS
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf


@pytest.fixture(params=[BlockedLeaf, AwaitedLeaf])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def parameters():
    """The bundle's parameters by name, as T5X's importer made them."""
    with np.load(GOLDENS / "importer" / "t5_1_1_f32.npz") as values:
        return {name.removeprefix("target/"): values[name] for name in values if name.startswith("target/")}
