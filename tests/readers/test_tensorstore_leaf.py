"""Chunks that are decoded at the same time are bounded together: a restore of large ones holds about one of them."""

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.concurrency import wait_all
from orbax_t5x.lazy import ReadStats, Request, ValueLeaf, box_shape, box_slices
from orbax_t5x.readers.tensorstore_leaf import TensorStoreLeaf
from orbax_t5x.restoring import executor
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite, LeafSuite
from tests.support.array_strategies import boxes
from tests.support.leaf_arrays import ARRAY, LARGE

_CHUNK_BYTES = 64 << 20
_ROWS = 4

CHILD = """
import resource, sys
import numpy as np
import orbax_t5x as ot

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

path, small, way, limit = *sys.argv[1:4], int(sys.argv[4])
first = [ot.transforms.Slice("a.*", (slice(None), slice(0, 8)))]
ot.restore(small, None, first)  # what is made once is there
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is what there is now
before = memory("VmRSS")
if way == "restore":
    state = ot.restore(path, None, first, memory_limit_bytes=limit)
elif way == "convert":
    ot.convert(path, f"{path}-out", first, memory_limit_bytes=limit)
    state = ot.restore(f"{path}-out", None)
else:
    with ot.open_checkpoint(path) as checkpoint:
        state = {"all": ot.stack([checkpoint.leaves[f"a{i}"][:, :8] for i in range(3)]).get()}
peak = memory("VmHWM") - before
print(peak, {name: int(np.sum(value)) for name, value in state.items()})
"""


def arrays_of(directory: Path, columns: int, *, compressed: bool) -> Path:
    """Three arrays of four rows, each row a chunk; what is stored of a chunk is small, or a hole."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave({f"a{i}": np.ones(7, np.uint8) for i in range(3)}))
    compressor = {"id": "gzip", "level": 1} if compressed else None
    chunk = gzip.compress(b"\1" * columns, 1) if compressed else b"\1" * 8
    for i in range(3):
        place = directory / f"a{i}"
        said = json.loads((place / ".zarray").read_text())
        said |= {"shape": [_ROWS, columns], "chunks": [1, columns], "compressor": compressor}
        (place / ".zarray").write_text(json.dumps(said))
        (place / "0").unlink()
        for row in range(_ROWS):
            (place / f"{row}.0").write_bytes(chunk)
            if not compressed:
                os.truncate(place / f"{row}.0", columns)
    return directory


# A limit of one chunk, and the default of a lazy array, which is four of them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "chunks", "compressed"),
    [("restore", 1, True), ("restore", 1, False), ("convert", 1, False), ("get", 4, False)],
)
def test_no_more_chunks_are_decoded_at_once_than_the_limit_holds(way, chunks, compressed, tmp_path):
    path = arrays_of(tmp_path / "large", _CHUNK_BYTES, compressed=compressed)
    small = arrays_of(tmp_path / "small", 16, compressed=compressed)
    arguments = [sys.executable, "-c", CHILD, str(path), str(small), way, str(chunks * _CHUNK_BYTES)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    peak, _, sums = run.stdout.partition(" ")
    ones = _ROWS * 8
    assert sums.strip() == str({"all": 3 * ones} if way == "get" else {f"a{i}": ones for i in range(3)})
    # There are twelve chunks. What is not theirs is Python's, the compressed bytes' and TensorStore's.
    assert _CHUNK_BYTES // 2 < int(peak) < (chunks + 0.6) * _CHUNK_BYTES


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_what_is_read_chunk_by_chunk_is_what_is_read_at_once(small_chunks, data):
    path, array = small_chunks
    wanted = data.draw(st.lists(boxes(array.shape), min_size=1, max_size=4))
    limit = data.draw(st.sampled_from([1, 100, 300, 1 << 20]))
    outs = [np.full(box_shape(box), -1, array.dtype) for box in wanted]
    with ot.open_checkpoint(path) as checkpoint:
        leaf = checkpoint.leaves["a"].leaf
        assert leaf is not None and leaf.chunks == CHUNKS
        requests = [Request(box, out) for box, out in zip(wanted, outs, strict=True)]
        asyncio.run(leaf.read_into(requests, ReadStats("off", limit)))
    for box, out in zip(wanted, outs, strict=True):
        np.testing.assert_array_equal(out, array[box_slices(box)])


CHUNKS = (2, 4, 3)


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory):
    """An array of many chunks of 96 bytes, some of which are cut by its end."""
    directory = tmp_path_factory.mktemp("small") / "item"
    array = np.random.default_rng(0).integers(0, 1 << 30, (7, 9, 5), np.int32)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave({"a": array}))
    shutil.rmtree(directory / "a")
    kvstore = {"driver": "file", "path": f"{directory}/a/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"shape": array.shape, "chunks": CHUNKS, "dtype": "<i4"}}
    ts.open(spec, create=True).result().write(array).result()
    return directory, array


@pytest.mark.parametrize(
    ("megabytes", "is_remote", "expected"),
    [((1, 2), False, 64), ((1, 40), False, 160), ((1, 200), False, 256), ((1,), True, 256), ((), False, 64)],
    ids=["small", "large", "beyond_the_limit", "remote", "none"],
)
def test_memory_for_decoding_follows_the_largest_chunk(megabytes, is_remote, expected, monkeypatch):
    monkeypatch.setattr(executor, "_THREADS", 2)

    class Chunked(ValueLeaf):
        chunks = (1 << 20,)

    leaves = []
    for size in megabytes:
        leaf = Chunked(np.zeros(1, np.uint8), "a")
        leaf.chunks, leaf.is_remote = (size << 20,), is_remote
        leaves.append(leaf)
    assert executor.decoding_bytes(leaves, 256 << 20) == expected << 20
    assert executor.decoding_bytes(leaves, 16 << 20) == 16 << 20


class OrbaxLeaf(LeafSuite):
    ocdbt = True
    zarr3 = False

    @pytest.fixture
    def expected(self):
        return LARGE

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=self.ocdbt, use_zarr3=self.zarr3)) as checkpointer:
            save_args = {"x": ocp.SaveArgs(chunk_byte_size=1 << 19)}
            checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"x": expected}, save_args=save_args))
        with ot.open_checkpoint(tmp_path / "item") as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is TensorStoreLeaf
            yield leaf


class TestTensorStoreDatabase(OrbaxLeaf):
    pass


class TestTensorStoreZarr(OrbaxLeaf):
    ocdbt = False


class TestTensorStoreZarr3(OrbaxLeaf):
    ocdbt = False
    zarr3 = True


class TestBrokenArrayOfOrbax(BrokenLeafSuite):
    @pytest.fixture
    def leaf(self, tmp_path):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"x": ARRAY, "y": ARRAY}))
        (tmp_path / "item/x/.zarray").write_text("{}")
        with ot.open_checkpoint(tmp_path / "item") as checkpoint:
            yield leaf_of(checkpoint, "x")


def test_leaves_read_together_are_all_begun_before_one_is_waited_for(tmp_path, monkeypatch):
    """A wait wakes the event loop from another thread, which costs more than a small read."""
    count = 1 << 16  # more than what is decoded from a database by us
    arrays = {f"a{i}": np.arange(i, i + count) for i in range(8)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave(arrays))
    begun: list[object] = []

    class _Commit:
        """A commit that is done when all leaves have begun, and cannot be awaited."""

        def __init__(self, commit):
            self.result = commit.result

        def done(self):
            return len(begun) == len(arrays)

    class _Buffer:
        def __init__(self, buffer, **settings):
            self.array = ts.array(buffer, **settings)

        def write(self, source):
            begun.append(source)
            written = self.array.write(source)
            return SimpleNamespace(copy=written.copy, commit=_Commit(written.commit))

    async def read(leaves, outs):
        stats = ReadStats()
        first = next(iter(leaves.values()))
        await first.read_into([Request(((0, 3),), np.empty(3, first.dtype))], stats)  # compares the files
        leaves = {name: leaf for name, leaf in leaves.items() if type(leaf) is TensorStoreLeaf}
        doubles = SimpleNamespace(array=_Buffer, TensorStore=ts.TensorStore)
        monkeypatch.setattr("orbax_t5x.readers.tensorstore_leaf.ts", doubles)
        await wait_all(leaf.read_into([Request(((0, count),), outs[name])], stats) for name, leaf in leaves.items())

    with ot.open_checkpoint(tmp_path / "step") as checkpoint:
        outs = {name: np.empty_like(values) for name, values in arrays.items()}
        asyncio.run(read({name: leaf_of(checkpoint, name) for name in arrays}, outs))
    assert all(np.array_equal(outs[name], values) for name, values in arrays.items())
    assert len(begun) == len(arrays)
