"""A run that goes on with another number of processes each time, and Orbax's own managers for pods."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.multihost.jobs.broadcast_jobs import check_equal
from tests.multihost.jobs.pod_jobs import abstract, own_bytes, state_of
from tests.support.jax_job import run_job
from tests.support.t5x_goldens import golden

pytestmark = pytest.mark.slow

# Nodes of a database, which each process reads.
_DATABASE_BYTES = 20_000


@pytest.fixture(scope="module")
def arrays():
    generator = np.random.default_rng(0)
    kernels = {f"params/layers_{index}/kernel": generator.standard_normal((512, 96), np.float32) for index in range(3)}
    return {
        "params/embedding": generator.standard_normal((1024, 256), np.float32),
        **kernels,
        "params/bias": generator.standard_normal((24,), np.float32),
        "step": np.array(7, np.int32),
    }


def check_bytes(told):
    """Of byte ranges by rows own shards; of chunks those that hold them, and the nodes of the database."""
    ranges, chunks = told["ranges"], told["chunks"]
    assert ranges["read"] <= 1.02 * ranges["shards"]
    assert chunks["read"] <= 1.02 * chunks["shards"]
    assert chunks["from files"] <= 1.02 * chunks["chunks"] + _DATABASE_BYTES


def test_four_two_and_one_process_go_on_with_one_run(arrays, goldens, tmp_path):
    """The eight devices of this process, two of each of four, and of each of two, and back."""
    np.savez(tmp_path / "arrays.npz", **arrays)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    root = tmp_path / "root"
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    native = golden("d8_adafactor_sds_smallchunks").step
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state_of(arrays, "all rows")))
    told = run_job(4, "pod_jobs:run", tmp_path, 0, bundle, native)
    told += run_job(2, "pod_jobs:run", tmp_path, 1, bundle, native)
    told.append(own_bytes(tmp_path, root, arrays))
    for one in told:
        check_bytes(one)
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        assert manager.all_steps() == [0, 1, 2]
        for placing in ("rows", "columns"):
            args = ot.args.TrainStateRestore(abstract(arrays, placing))
            check_equal(manager.restore(2, args=args), arrays)
    with ocp.PyTreeCheckpointer() as checkpointer:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), unflatten(arrays))
        stock = checkpointer.restore(root / "2" / "default", restore_args=as_numpy)
    jax.tree.map(np.testing.assert_array_equal, stock, unflatten(arrays))


def test_managers_of_orbax_for_pods(tmp_path):
    first, second = run_job(2, "pod_jobs:managers", tmp_path)
    assert first["single host"] == second["single host"] == [3]
    assert first["replica"] and second["replica"]
    # The first slice writes the persistent step, the other one its own.
    assert (first["emergency"], second["emergency"]) == ([], ["1/state/_METADATA"])
