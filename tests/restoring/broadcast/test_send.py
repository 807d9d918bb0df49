"""`broadcast=True` in several real processes: every placing gets the bits that are stored, and each stored byte is read
by one process."""

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from orbax_t5x.trees.flat import unflatten
from tests.support.bundle_writer import bundle_of
from tests.support.jax_job import run_job

_ROWS, _COLUMNS = 1024, 768
# What three short strings take in a bundle.
_STRINGS_BYTES = 64


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
    """The same arrays in three formats; chunks of Orbax are neither rows nor columns."""
    folder = tmp_path_factory.mktemp("broadcast")
    own = arrays()
    named = {name.replace(".", "/"): array for name, array in own.items()}
    np.savez(folder / "arrays.npz", **{name: array for name, array in own.items() if name != "layers.half"})
    (folder / "bundle").mkdir()
    bundle = bundle_of(named)
    bundle.add("names", np.array([b"one", b"", b"three"], object))
    paths = {
        "bundle": bundle.write(folder / "bundle"),
        "safetensors": folder / "model.safetensors",
        "orbax": folder / "orbax",
    }
    safetensors.numpy.save_file(named, paths["safetensors"])
    save_orbax(paths["orbax"], named)
    for name, path in paths.items():
        (folder / f"{name}.path").write_text(str(path))
    return folder


def save_orbax(path, named):
    tree = unflatten(named)
    save_args = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=300_000), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))


@pytest.mark.parametrize("processes", [2, 4])
def test_every_placing_has_the_stored_bits_and_each_byte_is_read_by_one(checkpoints, processes):
    results = run_job(processes, "broadcast_jobs:every_placing", checkpoints)
    stored = sum(array.nbytes for array in arrays().values())
    for case in results[0]:
        told = [result[case] for result in results]
        read = sum(one["read"] for one in told)
        assert stored <= read <= stored + _STRINGS_BYTES, case
        if "columns" not in case or "orbax" not in case:
            # Nodes of the database are read by each. Where the processes need other chunks, nothing is sent, and
            # TensorStore may fetch one twice that two devices of a process share.
            assert sum(one["from files"] for one in told) <= 1.02 * stored + 100_000 * processes, case
        if "rows" not in case and "columns" not in case:
            assert all(one["received"] > 0 for one in told), case
            # A process may own nothing: small neighbours are one chunk.
            assert any(one["received"] < one["needed"] for one in told), case
        if case.endswith(f", {1 << 20}"):
            # With a small budget shares are small, and all read about as much.
            assert max(one["read"] for one in told) <= 1.3 * stored / processes, case
        assert len({one["verified"] for one in told}) == 1, case


def test_auto_reads_once_where_the_store_is_far_and_bytes_are_shared(checkpoints):
    """Values are those of both other ways (the job compares them); so is what is read, as the plan said before."""
    results = run_job(4, "broadcast_jobs:each_way", checkpoints)
    stored = _ROWS * _COLUMNS * 4
    for case in results[0]:
        name, store, placing, way = case.split(", ")
        told = [result[case] for result in results]
        assert len({str(one["decided"]) for one in told}) == 1, case  # the same on all processes
        assert told[0]["is the same after"], case
        if way != "auto":
            continue
        is_sent = store != "local" and placing != "all rows"
        as_chosen = [result[f"{name}, {store}, {placing}, {is_sent}"] for result in results]
        if name == "orbax" and placing != "replicated":
            continue  # chunks are neither rows nor columns: what is read depends on the owners
        assert told[0]["decided"]["leaves_sent"] == is_sent, case
        assert told[0]["text"] == told[0]["explained"] == is_sent, case
        assert any(one["received"] for one in told) == is_sent, case
        assert sum(one["read"] for one in told) == sum(one["read"] for one in as_chosen), case
        if name == "safetensors":
            assert told[0]["decided"]["bytes"] == sum(one["read"] for one in told), case
        if placing != "columns":  # each process by itself reads over the small gaps between columns
            assert sum(one["read"] for one in told) == stored * (4 if placing == "replicated" and not is_sent else 1)


def test_one_process_that_fails_is_the_same_error_on_all(checkpoints, tmp_path):
    """What one process cannot read nobody has, and nobody waits for it; afterwards all restore together."""
    for name in ("bundle", "orbax"):
        source = Path((checkpoints / f"{name}.path").read_text())
        folder = source.parent if name == "bundle" else source
        copy = shutil.copytree(folder, tmp_path / name)
        shard = max((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        # What no codec takes for its own; of a bundle one bit is enough.
        size = 1 if name == "bundle" else len(data) // 2
        data[len(data) // 4 : len(data) // 4 + size] = bytes(255 - byte for byte in data[len(data) // 4 :][:size])
        shard.write_bytes(data)
        (tmp_path / f"damaged {name}.path").write_text(str(copy / source.name if name == "bundle" else copy))
    (tmp_path / "safetensors.path").write_text((checkpoints / "safetensors.path").read_text())
    first, second = run_job(2, "broadcast_jobs:failures", tmp_path)
    refused, closed, callback, bundle, orbax, different, mixed, good = zip(first, second, strict=True)
    assert refused == (["CheckpointIOError", "layers/large", True], ["CheckpointIOError", "layers/large", False])
    assert [kind for kind, *_ in closed] == ["CheckpointIOError", "ValueError"]
    assert [kind for kind, *_ in callback] == ["CheckpointIOError", "RuntimeError"]
    for damaged in (bundle, orbax):
        assert [kind for kind, *_ in damaged] == ["CorruptCheckpointError"] * 2
    assert len({leaf for _, leaf, *_ in bundle}) == 1  # of the other one each has met what is damaged of its own
    assert [kind for kind, *_ in different] == ["RestorePlanError"] * 2
    assert mixed == ("differ", "differ") and good == ("ok", "ok")


def test_a_process_that_is_killed_between_two_rounds_is_an_error_on_the_others(checkpoints):
    source = (checkpoints / "safetensors.path").read_text()
    survivor, _ = run_job(2, "broadcast_jobs:restore_where_one_dies", source, killed=[1])
    assert survivor["error"] == "CheckpointIOError" and survivor["path"] == source
    assert "has died" in survivor["text"]


def test_what_transforms_and_fallbacks_make_equals_numpy(tmp_path):
    own = {name: array for name, array in arrays().items() if name in ("layers.large", "small", "count")}
    np.savez(tmp_path / "arrays.npz", **own)
    layers = np.random.default_rng(1).standard_normal((4, 64, 48), np.float32)
    np.save(tmp_path / "layers.npy", layers)
    key = jax.random.key_data(jax.random.key(7))
    np.save(tmp_path / "key.npy", key)
    named = {name.replace(".", "/"): array for name, array in own.items()}
    named |= {f"steps/{index}/w": layer for index, layer in enumerate(layers)}
    save_orbax(tmp_path / "orbax", named | {"key": np.asarray(key)})
    (tmp_path / "orbax.path").write_text(str(tmp_path / "orbax"))
    results = run_job(2, "broadcast_jobs:transformed", tmp_path)
    stored = sum(array.nbytes for array in named.values()) + key.nbytes
    assert sum(result["read"] for result in results) == stored
    assert sum(result["from files"] for result in results) <= 1.02 * stored + 200_000


@pytest.mark.slow
def test_the_peak_of_each_process_is_within_the_budget(tmp_path):
    """One array of 128 MiB with 32 MiB of budget: rows of all, and what they are made of."""
    generator = np.random.default_rng(0)
    tensors = {"large": generator.standard_normal((4096, 8192), np.float32), "small": np.zeros(8, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "large.path").write_text(str(tmp_path / "model.safetensors"))
    for result in run_job(2, "broadcast_jobs:peak", tmp_path):
        assert result["result"] == 128 << 20
        assert result["beside"] <= result["limit"]
