"""A process that ends before, in or after an exchange ends the others with an error that names the checkpoint."""

import numpy as np
import pytest
import safetensors.numpy

from tests.support.jax_job import run_job, run_script

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


# Before its first call the other process has made no backend: only the loading of the package tells that it lives.
_KILLED_WHILE_LOADING = """
    import atexit, importlib.abc, os, signal, time
    import orbax_t5x as ot

    atexit.register(os._exit, 0)  # JAX's own end waits for the other process
    store = jax._src.distributed.global_state.client

    class Killing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "orbax_t5x.restoring.api":
                store.key_value_set("test/killed", "")
                while not dict(store.key_value_dir_get("orbax_t5x/beat/")).get("orbax_t5x/beat/1"):
                    time.sleep(0.05)
                time.sleep(float(sys.argv[1]))
                os.kill(os.getpid(), signal.SIGKILL)

    if process == 1:
        sys.meta_path.insert(0, Killing())
        store.blocking_key_value_get("test/called", 300_000)
    else:
        ot.restore
        store.key_value_set("test/called", "")
        store.blocking_key_value_get("test/killed", 300_000)
    begun = time.monotonic()
    try:
        ot.restore(f"{sys.argv[2]}/nothing", None)
    except ot.errors.CheckpointIOError as error:
        tell([str(error), time.monotonic() - begun])
"""


def test_a_process_that_is_killed_while_it_loads_its_first_call_is_known_dead(tmp_path):
    first, _ = run_script(_KILLED_WHILE_LOADING, 2, 3, tmp_path, killed=[1])
    ((message, seconds),) = first
    assert "process 1 has sent no heartbeat for" in message and seconds < 3 + 30
