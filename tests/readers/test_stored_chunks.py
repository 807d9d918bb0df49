"""Arrays of which most chunks are not stored: the work of a read follows its box and the stored chunks, never the grid.

The oracle of what was visited is TensorStore's own count of the chunks that it read; of the values, NumPy.
"""

import json
import math

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.lazy import box_slices
from orbax_t5x.readers import array_kind
from orbax_t5x.readers.array_kind import ChunkKeys
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes
from tests.support.array_strategies import boxes
from tests.support.http_store import serving
from tests.support.t5x_steps import GOOD, array, save, spec

FILL = 2.5


class Grid:
    """A checkpoint with the leaf "bad" in chunks that are not stored, and "good"; `array` writes chunks of "bad"."""

    def write_good(self, root):
        raise NotImplementedError

    def spec(self, shape, chunk):
        raise NotImplementedError

    def __init__(self, root, shape, chunk):
        self.path = self.write_good(root)
        self.array = ts.open(self.spec(list(shape), list(chunk)), create=True, delete_existing=True).result()


class T5X(Grid):
    separator = "."

    def write_good(self, root):
        step = root / "checkpoint_1"
        step.mkdir(parents=True)
        array(step / "good")
        save(step, spec(metadata={}))
        return step

    def spec(self, shape, chunk):
        metadata = {"shape": shape, "chunks": chunk, "dtype": "<f4", "fill_value": FILL, "compressor": None}
        metadata["dimension_separator"] = self.separator
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{self.path}/bad/"}, "metadata": metadata}


class T5XNested(T5X):
    separator = "/"


class Zarr3(Grid):
    ocdbt = False
    encoding = ("default", "/")
    shard = 1

    def write_good(self, root):
        item = root / "item"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=self.ocdbt, use_zarr3=True)) as checkpointer:
            checkpointer.save(item, args=ocp.args.PyTreeSave({"bad": np.zeros(4, np.float32), "good": GOOD}))
        metadata = json.loads((item / "_METADATA").read_text())
        (item / "_METADATA").write_text(json.dumps(metadata | {"store_array_data_equal_to_fill_value": False}))
        return item

    def spec(self, shape, chunk):
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.shard > 1:
            codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": chunk, "codecs": codecs}}]
        grid = {"name": "regular", "configuration": {"chunk_shape": [self.shard * size for size in chunk]}}
        name, separator = self.encoding
        encoding = {"name": name, "configuration": {"separator": separator}}
        metadata = {"shape": shape, "chunk_grid": grid, "chunk_key_encoding": encoding, "codecs": codecs}
        kvstore = {"driver": "file", "path": f"{self.path}/"}
        kvstore = (
            {"driver": "ocdbt", "base": kvstore, "path": "bad/"}
            if self.ocdbt
            else kvstore | {"path": f"{self.path}/bad/"}
        )
        return {
            "driver": "zarr3",
            "kvstore": kvstore,
            "metadata": {**metadata, "data_type": "float32", "fill_value": FILL},
        }


class Zarr3Database(Zarr3):
    ocdbt = True


class Zarr3Encoded(Zarr3):
    encoding = ("v2", "/")


class Zarr3Sharded(Zarr3):
    shard = 2


GRIDS = [T5X, T5XNested, Zarr3, Zarr3Database, Zarr3Encoded, Zarr3Sharded]


def visits():
    """Counts the chunks that TensorStore has read, or has looked for, in this process."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/cache/chunk_cache/reads")
    return sum(metric["values"][0]["value"] for metric in metrics)


@pytest.mark.parametrize("kind", GRIDS)
def test_a_billion_chunks_cost_nothing(kind, tmp_path):
    grid = kind(tmp_path, (10**9,), (1,))
    stored = 2 * grid.shard if isinstance(grid, Zarr3) else 2
    grid.array[[5, 900_000_000]].write([5.0, 9.0]).result()
    with ot.open_checkpoint(grid.path) as checkpoint:
        leaf = leaf_of(checkpoint, "bad")
        before = visits()
        reading = read_boxes(leaf, [((0, 100_000),), ((899_999_000, 900_000_001),), ((10**9 - 1, 10**9),)])
        assert visits() - before <= 2 * stored
        expected = np.full(100_000, FILL, np.float32)
        expected[5] = 5
        np.testing.assert_array_equal(reading.arrays[0], expected)
        np.testing.assert_array_equal(reading.arrays[1], [*[FILL] * 1000, 9])
        np.testing.assert_array_equal(reading.arrays[2], [FILL])
        assert reading.stats.fill_chunks == (100_000 + 1001 + 1 - 2 if stored == 2 else 50_000 + 501 + 1 - 2)
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), GOOD)


@pytest.mark.parametrize("kind", [T5X, Zarr3])
def test_every_call_that_reads_all(kind, tmp_path):
    grid = kind(tmp_path, (1000, 1000), (1, 1))
    grid.array[7, 8].write(1.0).result()
    expected = np.full((1000, 1000), FILL, np.float32)
    expected[7, 8] = 1
    before = visits()
    np.testing.assert_array_equal(ot.restore(grid.path, None)["bad"], expected)
    assert ot.verify(grid.path).status != "damaged"
    assert ot.diff(grid.path, grid.path).equal
    ot.convert(grid.path, tmp_path / "out", format="safetensors")
    assert visits() - before < 40
    np.testing.assert_array_equal(ot.restore(tmp_path / "out", None)["bad"], expected)


@pytest.fixture(scope="module", params=GRIDS)
def half_stored(request, tmp_path_factory):
    """A grid of chunks that its shape cuts, with half of them stored at random, and its values."""
    grid = request.param(tmp_path_factory.mktemp("grid"), (7, 9, 5), (2, 4, 3))
    rng = np.random.default_rng(0)
    value = rng.random((7, 9, 5)).astype(np.float32)
    steps = [grid.shard * size for size in (2, 4, 3)] if isinstance(grid, Zarr3) else [2, 4, 3]
    for corner in np.ndindex(*[math.ceil(size / step) for size, step in zip((7, 9, 5), steps, strict=True)]):
        chunk = tuple(slice(index * step, (index + 1) * step) for index, step in zip(corner, steps, strict=True))
        if rng.random() < 0.5:
            grid.array[
                tuple(slice(at.start, min(at.stop, size)) for at, size in zip(chunk, (7, 9, 5), strict=True))
            ] = value[chunk]
        else:
            value[chunk] = FILL
    with ot.open_checkpoint(grid.path) as checkpoint:
        yield leaf_of(checkpoint, "bad"), value


@settings(max_examples=15)
@given(st.data())
def test_any_boxes(half_stored, data):
    leaf, value = half_stored
    wanted = data.draw(st.lists(boxes(value.shape), min_size=1, max_size=4))
    for out, box in zip(read_boxes(leaf, wanted).arrays, wanted, strict=True):
        np.testing.assert_array_equal(out, value[box_slices(box)])


@pytest.mark.parametrize("kind", [T5X, Zarr3, Zarr3Encoded])
@pytest.mark.parametrize("is_stored", [False, True])
def test_rank_0(kind, is_stored, tmp_path):
    grid = kind(tmp_path, (), ())
    if is_stored:
        grid.array.write(7.0).result()
    with ot.open_checkpoint(grid.path) as checkpoint:
        reading = read_boxes(leaf_of(checkpoint, "bad"), [()])
    assert (reading.arrays[0], reading.stats.fill_chunks) == (7 if is_stored else FILL, not is_stored)


def test_files_that_are_no_chunks_are_passed_over(tmp_path):
    grid = T5X(tmp_path, (100,), (1,))
    grid.array[3].write(3.0).result()
    for name in ("03", "٣", "-1", "100", "1.1", "a", "9" * 30, "c", "4.tmp"):
        (grid.path / "bad" / name).write_bytes(b"no chunk")
    with ot.open_checkpoint(grid.path) as checkpoint:
        expected = np.where(np.arange(100) == 3, 3, FILL)
        np.testing.assert_array_equal(checkpoint.leaves["bad"].get(), expected)


def test_a_server_is_asked_for_each_chunk_up_to_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(array_kind, "_MOST_REQUESTED_CHUNKS", 100)
    grid = T5X(tmp_path, (10**9,), (1,))
    grid.array[3].write(3.0).result()
    with serving(grid.path.parent) as store, ot.open_checkpoint(f"{store.url}/checkpoint_1") as checkpoint:
        leaf = checkpoint.leaves["bad"]
        np.testing.assert_array_equal(leaf[:50].get(), np.where(np.arange(50) == 3, 3, FILL))
        before = len(store.log)
        with pytest.raises(ot.errors.LimitExceededError, match=r"leaf 'bad'.*101 chunks.*more than 100"):
            leaf[:101].get()
        assert len(store.log) - before <= 1


@given(st.sampled_from([("", "."), ("", "/"), ("c", "/"), ("c", ".")]), st.data())
def test_keys_and_indices_are_inverse(form, data):
    keys = ChunkKeys(*form)
    grid = data.draw(st.lists(st.integers(1, 12), max_size=3))
    indices = [[data.draw(st.integers(0, count - 1)) for count in grid] for _ in range(3)]
    found = keys.indices([*map(keys.key, indices), ".zarray", "zarr.json"], grid)
    assert found.tolist() == sorted({tuple(index): index for index in indices}.values())
    assert found.shape == (len(found), len(grid))
