"""Blocks are read, written and counted; an error stops the others."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError
from orbax_t5x.lazy import LazyThreadPoolArray, chunks
from orbax_t5x.operations.convert import pipeline
from orbax_t5x.operations.convert.safetensors_layout import SINGLE_NAME as FILE
from orbax_t5x.operations.convert.safetensors_layout import TensorInFile
from orbax_t5x.readers.ranges import byte_range, windowed
from tests.support.bundle_writer import bundle_of
from tests.support.conversions import assert_equals, flat, names_in
from tests.support.memory_checkpoint import AwaitedLeaf, FailingLeaf, checkpoint
from tests.support.saving import stock

MIB = 1 << 20


def test_get_fn_arrays_are_read_once_whatever_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BLOCK_BYTES", 1)
    calls = []
    array = np.arange(50_000, dtype=np.int32).reshape(100, 500)

    def get():
        calls.append(1)
        return array

    def lazy(state, target):
        return {"w": LazyThreadPoolArray(array.shape, array.dtype, get)}

    ot.convert(checkpoint({"w": np.ones(1)}), tmp_path / "out", lazy, memory_limit_bytes=1024)
    np.testing.assert_array_equal(stock(tmp_path / "out")["w"], array)
    assert len(calls) == 1


def test_a_limit_below_a_mebibyte_cuts_no_leaf_smaller_than_that_and_warns(tmp_path, caplog):
    """Chunks of a few bytes took 107 s for 74 KiB: each is a commit of the database."""
    leaves = {"w": np.arange(3 << 17, dtype=np.float32).reshape(3, 1 << 17), "v": np.ones((64, 64))}
    ot.convert(checkpoint(leaves), tmp_path / "out", memory_limit_bytes=64)
    assert_equals(flat(stock(tmp_path / "out")), leaves)
    with ot.open_checkpoint(tmp_path / "out") as opened:
        chunks = {name: view.leaves()[0].chunks for name, view in opened.leaves.items()}
    assert chunks == {"v": (64, 64), "w": (1, 1 << 17)}
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("orbax_t5x")]
    assert "memory_limit_bytes=64 is 64 B" in warning and "1.00 MiB" in warning
    caplog.clear()
    ot.convert(checkpoint(leaves), tmp_path / "again", memory_limit_bytes=MIB)
    assert not caplog.records


@pytest.mark.parametrize(("rows", "expected"), [(64, 8 * MIB), (1, 4 * MIB)])
def test_memory_follows_blocks_and_not_arrays(tmp_path, monkeypatch, rows, expected):
    """An array of many blocks takes the memory of some; the values are those of one block."""
    monkeypatch.setattr(chunks, "MOST_BLOCK_BYTES", MIB)
    monkeypatch.setattr(pipeline, "_LEAST_IN_FLIGHT", 0)
    monkeypatch.setattr(pipeline, "_MOST_LARGE_BLOCKS", 2)
    limits, begin = [], pipeline.for_each_block

    def noted(blocks, limit, *rest):
        limits.append(limit)
        return begin(blocks, limit, *rest)

    monkeypatch.setattr(pipeline, "for_each_block", noted)
    array = np.arange(rows << 18, dtype=np.float32).reshape(rows, 1 << 18)
    ot.convert(checkpoint({"w": array}), tmp_path / "out")
    assert limits == [expected]
    np.testing.assert_array_equal(stock(tmp_path / "out")["w"], array)


def test_an_error_in_the_middle_stops_the_other_leaves(tmp_path):
    leaves = {f"w{i:03}": np.ones((64, 128)) for i in range(300)}
    leaves["w003"] = FailingLeaf("w003", np.ones((64, 128)), CheckpointIOError("gone", path="/p", leaf="w003"))
    source = checkpoint(leaves, AwaitedLeaf)
    with pytest.raises(CheckpointIOError, match="w003"):
        ot.convert(source, tmp_path / "out", memory_limit_bytes=MIB)
    assert names_in(tmp_path) == []
    assert not source.made["w299"].boxes


def test_progress_counts_every_byte_and_may_stop_the_conversion(tmp_path):
    source = checkpoint({f"w{i}": np.ones((8, 1024), np.float32) for i in range(8)})
    seen = []
    ot.convert(source, tmp_path / "out", progress=lambda done, total, leaf: seen.append((done, total, leaf)))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == 8 * 8 * 1024 * 4 and {total for _, total, _ in seen} == {8 * 8 * 1024 * 4}
    assert {leaf for _, _, leaf in seen} == {f"w{i}" for i in range(8)}

    def enough(done, total, leaf):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ot.convert(source, tmp_path / "other", progress=enough)
    assert names_in(tmp_path) == ["out"]


def test_bytes_that_stay_are_copied_as_they_would_be_read_and_written(tmp_path, monkeypatch):
    """The same files, from a source with checksums; several windows each."""
    for module in (byte_range, windowed):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1024)
    rng = np.random.default_rng(0)
    leaves = {"a": rng.random((40, 33), np.float32), "b/c": rng.integers(0, 99, (7, 300)), "d": np.float32(3)}
    leaves |= {"e": rng.random((3, 5)) > 0.5, "none": np.zeros((0, 3)), "turned": rng.random((20, 30))}
    prefix = bundle_of(leaves).write(tmp_path)
    turned = ot.transforms.Transpose("turned", (1, 0))
    copied, copy = [], TensorInFile.copy

    async def noting_copy(output, box, leaf, stats):
        copied.append((leaf.name, await copy(output, box, leaf, stats)))
        return copied[-1][1]

    monkeypatch.setattr(TensorInFile, "copy", noting_copy)
    ot.convert(prefix, tmp_path / "fast", turned, format="safetensors")
    assert {name for name, crc in copied if crc is not None} == {"a", "b/c", "d"}
    monkeypatch.setattr(pipeline, "TensorInFile", type(None))
    ot.convert(prefix, tmp_path / "slow", turned, format="safetensors")
    assert (tmp_path / "fast" / FILE).read_bytes() == (tmp_path / "slow" / FILE).read_bytes()
    assert_equals(load_file(tmp_path / "fast" / FILE), {**leaves, "turned": leaves["turned"].T})


def test_damage_is_found_in_what_is_copied(tmp_path):
    prefix = bundle_of({"a": np.arange(1000.0)}).write(tmp_path)
    (data,) = tmp_path.glob("*.data-*")
    damaged = bytearray(data.read_bytes())
    damaged[500] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="crc32c"):
        ot.convert(prefix, tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()
