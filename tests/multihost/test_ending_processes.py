"""A process that is killed in an exchange is an error on the others, or JAX ends them; none waits for it forever."""

import numpy as np
import pytest
import safetensors.numpy

from tests.support.jax_job import run_job

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.ones((64, 64), np.float32)}, path)
    return path


@pytest.mark.parametrize("where", ["buffers are exchanged", "checksums are exchanged"])
def test_a_process_that_is_killed_in_an_exchange_is_an_error_on_the_others(source, where):
    survivor, _ = run_job(2, "ending_jobs:restore_where_one_dies", source, where, 1, killed=[1])
    assert survivor["error"] == "CheckpointIOError" and survivor["path"] == str(source)
    assert "has died" in survivor["text"]


def test_jax_ends_those_that_wait_for_a_process_killed_before_it_has_computed_with_them(source):
    where = "the catalogue is awaited"
    assert run_job(2, "ending_jobs:restore_where_one_dies", source, where, 1, killed=[1], aborted=[0]) == [None, None]
