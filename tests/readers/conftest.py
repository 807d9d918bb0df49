"""An Orbax item beside which other things are put."""

import numpy as np
import orbax.checkpoint as ocp
import pytest


@pytest.fixture
def orbax_item(tmp_path):
    path = tmp_path / "3" / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": np.arange(3)})
    return path
