"""A process that ends before, in or after an exchange ends the others with an error that names the checkpoint."""

import numpy as np
import pytest
import safetensors.numpy

from tests.support.jax_job import run_job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ends", "process", "where"),
    [
        ("stops", 0, "the opener opens"),
        ("dies", 1, "the catalogue is awaited"),
        ("stops", 1, "the catalogue is received"),
        ("dies", 1, "buffers are exchanged"),
        ("dies", 1, "checksums are exchanged"),
    ],
)
def test_a_process_that_ends_ends_the_others_with_an_error(tmp_path, ends, process, where):
    source = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.ones((64, 64), np.float32)}, source)
    gone = {"killed": [process]} if ends == "dies" else {"stopped": [process]}
    survivor = run_job(2, f"ending_jobs:restore_where_one_{ends}", source, where, process, **gone)[1 - process]
    assert survivor["error"] == "CheckpointIOError" and survivor["path"] == str(source)
    said = [f"process {process} has sent no heartbeat", *(["has died"] if ends == "dies" else [])]
    said += [] if process else ["the coordination service of JAX has not answered"]
    assert any(text in survivor["text"] for text in said), survivor["text"]
