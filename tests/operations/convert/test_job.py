"""Two processes convert together: each writes its share, and they end alike."""

import errno
import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from tests.robustness.killed_conversions import arrays
from tests.support import torch_files
from tests.support.bundle_writer import bundle_of
from tests.support.jax_job import run_module, run_processes

pytestmark = pytest.mark.slow

COUNT = 2


def assert_equals(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have done the jobs of tests.multihost.jobs.convert_worker."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "source").mkdir()
    bundle_of(arrays()).write(folder / "source", "model")
    shutil.copytree(folder / "source", folder / "damaged")
    shard = max((folder / "damaged").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # in the leaf that both processes write pieces of
    shard.write_bytes(data)
    worker = run_module("tests.multihost.jobs.convert_worker")
    run_processes(lambda index, coordinator: (worker, [coordinator, COUNT, index, folder]), COUNT)
    return folder


@pytest.fixture(scope="module")
def told(folder):
    return [json.loads((folder / f"told_{index}").read_text()) for index in range(COUNT)]


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_each_reads_its_share_and_both_write_one_checkpoint(folder, told, format):
    read = [one[format]["read"] for one in told]
    total = sum(array.nbytes for array in arrays().values())
    assert sum(read) == total and max(read) <= 0.6 * total, read
    assert [one[format]["leaves"] for one in told] == [len(arrays())] * COUNT
    assert [one[format]["bytes"] for one in told] == [total] * COUNT
    if format == "orbax":
        loaded = ocp.PyTreeCheckpointer().restore(folder / format)
        report = ot.verify(folder / format)
        assert report.status == "ok" and {leaf.status for leaf in report.leaves} == {"ok"}, report
    else:
        loaded = safetensors.numpy.load_file(folder / format / "model.safetensors")
    assert_equals(loaded, arrays())


def test_what_one_process_finds_wrong_all_raise(told):
    for name, error, text in [
        ("other destinations", "RestorePlanError", "call convert with the same arguments"),
        ("exists", "CheckpointIOError", "exists already"),
        ("damaged", "CorruptCheckpointError", "large"),
        ("process 0 fails", "CheckpointIOError", "No space left on device"),
        ("process 1 fails", "CheckpointIOError", "No space left on device"),
    ]:
        for index, one in enumerate(told):
            assert one[name][0] == error and text in one[name][1], (name, index, one[name])


def test_what_both_left_is_gone_on_with(folder, told):
    kept = [one["left"]["kept"] for one in told]
    assert kept[0] == kept[1] > 0
    assert sum(one["left"]["read"] for one in told) == sum(array.nbytes for array in arrays().values()) - kept[0]
    assert_equals(ocp.PyTreeCheckpointer().restore(folder / "left"), arrays())


def test_nothing_is_left_beside(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"source", "damaged", "orbax", "safetensors", "left", "told_0", "told_1"}


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_more_than_the_disk_can_hold_is_refused_before_the_first_block(tmp_path, format):
    """An expanded tensor of PyTorch, 32 times what is free: Orbax's compression is taken for twentyfold at most."""
    size = 8 * shutil.disk_usage(tmp_path).free
    pickled = torch_files.pickled({"w": torch_files.SavedTensor("0", "float32", 1, 0, (size,), (0,))})
    (tmp_path / "w.bin").write_bytes(torch_files.archive(pickled, {"0": b"\0\0\x80?"}))
    with pytest.raises(CheckpointIOError, match=r"[KMGTP]iB are to be written, but .* free in") as caught:
        ot.convert(tmp_path / "w.bin", tmp_path / "new" / "out", format=format)
    assert caught.value.errno == errno.ENOSPC and caught.value.fix is not None
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]
