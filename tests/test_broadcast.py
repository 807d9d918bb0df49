"""`broadcast=True` in several real processes: every placing gets the bits that are stored, and each stored byte is read
by one process."""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from tests.bundle_writer import bundle_of
from tests.test_multiprocess import run_processes

_ROWS, _COLUMNS = 1024, 768


def arrays():
    """Incompressible, with what arithmetic would lose: zeros with a sign, NaNs with a payload."""
    generator = np.random.default_rng(0)
    large = generator.integers(0, 1 << 32, (_ROWS, _COLUMNS), np.uint32).view(np.float32)
    large[0, :4] = np.array([0x80000000, 0x7FC00001, 0xFF800001, 0x7F800000], np.uint32).view(np.float32)
    return {
        "layers.large": large,
        "layers.half": generator.integers(0, 1 << 16, (_ROWS // 2, _COLUMNS), np.uint16).view(ml_dtypes.bfloat16),
        "small": np.array([-0.0, np.nan, 1.5], np.float32),
        "count": np.array(-7, np.int32),
        "flags": generator.integers(0, 2, (33,)).astype(bool),
        "wide": generator.integers(-(1 << 40), 1 << 40, (40, 8)),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same arrays in three formats; of bundles strings, too. Chunks of Orbax are neither rows nor columns."""
    folder = tmp_path_factory.mktemp("broadcast")
    own = arrays()
    named = {name.replace(".", "/"): array for name, array in own.items()}
    np.savez(folder / "arrays.npz", **{name: array for name, array in own.items() if name != "layers.half"})
    safetensors.numpy.save_file(named, folder / "model.safetensors")
    (folder / "safetensors.path").write_text(str(folder / "model.safetensors"))
    (folder / "bundle").mkdir()
    bundle = bundle_of(named)
    (folder / "bundle.path").write_text(str(bundle.write(folder / "bundle")))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = {"layers": {key[7:]: own[key] for key in own if key.startswith("layers.")}}
        tree |= {key: array for key, array in own.items() if "." not in key}
        save_args = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=300_000), tree)
        checkpointer.save(folder / "orbax", args=ocp.args.PyTreeSave(tree, save_args=save_args))
    (folder / "orbax.path").write_text(str(folder / "orbax"))
    return folder


@pytest.mark.parametrize("processes", [2, 4])
def test_every_placing_has_the_stored_bits_and_each_byte_is_read_by_one(checkpoints, processes):
    results = run_processes(processes, "broadcast_jobs:every_placing", checkpoints)
    stored = sum(array.nbytes for array in arrays().values())
    for case in results[0]:
        told = [result[case] for result in results]
        read = sum(one["read"] for one in told)
        assert read == stored, case
        if "columns" not in case or "orbax" not in case:
            # Nodes of the database are read by each. Where the processes need other chunks, nothing is sent, and
            # TensorStore may fetch one twice that two devices of a process share.
            assert sum(one["from files"] for one in told) <= 1.02 * stored + 100_000 * processes, case
        if "rows" not in case and "columns" not in case:
            assert all(one["received"] > 0 for one in told), case
            assert all(one["received"] < one["needed"] for one in told), case
        if case.endswith(f", {1 << 20}"):
            # With a small budget shares are small, and all read about as much.
            assert max(one["read"] for one in told) <= 1.3 * stored / processes, case
        assert len({one["verified"] for one in told}) == 1, case
