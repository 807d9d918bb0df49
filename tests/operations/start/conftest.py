"""A target and a source, and a process that knows of no run."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.started_runs import SOURCE


@pytest.fixture
def target():
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    return {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=rows) for name in SOURCE}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, SOURCE)
    return path
