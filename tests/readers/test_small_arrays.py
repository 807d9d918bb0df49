"""Small arrays of a database have the values that TensorStore reads; what is not small is TensorStore's."""

import json
import math
import shutil
from pathlib import Path

import cramjam
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CorruptCheckpointError
from orbax_t5x.readers.small_arrays import SmallArrayLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
from tests.support.array_strategies import boxes
from tests.support.http_store import serving

GOLDENS = Path(__file__).parents[1] / "goldens"
ITEMS = sorted(
    str(path.parent.relative_to(GOLDENS))
    for path in GOLDENS.rglob("manifest.ocdbt")
    if (path.parent / "_METADATA").is_file()
)
W = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)


def save(path, tree=None, **options):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, **options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave({"w": W} if tree is None else tree))
    return path


def database(path):
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()


def read_by_tensorstore(path, name, driver):
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
    return ts.open({"driver": driver, "kvstore": kvstore}, open=True).result().read().result()


def rewrite(path, shape, chunk, dtype, *, zarr3, compressed, sharded):
    """Writes another array under the name of "w"."""
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": "w/"}
    if zarr3:
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        codecs += [{"name": "zstd", "configuration": {"level": 1}}] if compressed else []
        if sharded:
            codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": chunk, "codecs": codecs} | sharded}]
        metadata = {"shape": shape, "data_type": dtype, "codecs": codecs}
        metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    else:
        compressor = {"id": "zstd", "level": 1} if compressed else None
        metadata = {"shape": shape, "chunks": chunk, "dtype": dtype, "compressor": compressor}
    spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore, "metadata": metadata}
    return ts.open(spec, create=True, delete_existing=True).result()


FILE_ITEMS = sorted({str(path.parents[1].relative_to(GOLDENS)) for path in GOLDENS.rglob(".zarray")})


@pytest.mark.parametrize("name", FILE_ITEMS)
def test_every_array_of_every_golden_that_is_files(name):
    with ot.open_checkpoint(GOLDENS / name) as checkpoint:
        leaves = [leaf_of(checkpoint, one) for one in checkpoint.leaves]
        small = [leaf for leaf in leaves if isinstance(leaf, SmallArrayLeaf)]
        assert small
        for leaf in small:
            kvstore = {"driver": "file", "path": f"{GOLDENS / name / leaf._place.name}/"}
            expected = np.asarray(ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result())
            found = checkpoint.leaves[leaf.name].get()
            assert found.shape == expected.shape and found.tobytes() == expected.tobytes()


class TestValues:
    @given(data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_values_are_those_of_tensorstore(self, data, tmp_path_factory):
        path = tmp_path_factory.mktemp("item") / "item"
        zarr3 = data.draw(st.booleans())
        save(path, use_zarr3=zarr3)
        shape = data.draw(st.lists(st.integers(1, 9), max_size=3))
        chunk = [data.draw(st.integers(1, size)) for size in shape]
        dtype = data.draw(st.sampled_from([np.float32, np.int8, np.int64, np.complex64, np.bool_, ml_dtypes.bfloat16]))
        name = np.dtype(dtype).name if zarr3 or dtype is ml_dtypes.bfloat16 else np.dtype(dtype).str
        compressed = data.draw(st.booleans())
        sharded = data.draw(st.sampled_from([None, {"index_location": "end"}, {"index_location": "start"}]))
        if shape and data.draw(st.booleans()):
            shape[-1] *= 50  # larger values are not in the tree, but beside it
            chunk[-1] = data.draw(st.sampled_from([20, 50, shape[-1]]))
        array = rewrite(path, shape, chunk, name, zarr3=zarr3, compressed=compressed, sharded=sharded)
        values = np.random.default_rng(data.draw(st.integers(0, 9))).integers(1, 3, shape).astype(dtype)
        array.write(values).result()
        with ot.open_checkpoint(path) as checkpoint:
            view = checkpoint.leaves["w"]
            count = math.prod([-(-size // side) for size, side in zip(shape, chunk, strict=True)])
            if math.prod(chunk) * np.dtype(dtype).itemsize <= 900:  # all of it is in the tree
                is_small = count <= 64 and dtype is not np.bool_
                assert isinstance(leaf_of(checkpoint, "w"), SmallArrayLeaf) == is_small
            expected = read_by_tensorstore(path, "w", "zarr3" if zarr3 else "zarr")
            found = view.get()
            assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
            box = tuple(slice(*side) for side in data.draw(boxes(tuple(shape))))
            assert view[box].get().tobytes() == expected[box].tobytes()

    @pytest.mark.parametrize("name", ITEMS)
    def test_every_value_of_every_golden(self, name):
        item = GOLDENS / name
        metadata = json.loads((item / "_METADATA").read_text())
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        names = {
            key.decode().rpartition("/")[0]
            for key in database(item).list().result()
            if key.endswith((b"/.zarray", b"/zarr.json"))
        }
        with ot.open_checkpoint(item) as checkpoint:
            found = {name.replace("/", "."): view for name, view in checkpoint.leaves.items()}
            assert names <= set(found)
            assert any(isinstance(leaf_of(checkpoint, name), SmallArrayLeaf) for name in checkpoint.leaves)
            for name in names:
                expected = read_by_tensorstore(item, name, driver)
                value = np.asarray(found[name].get())
                assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
                assert value.tobytes() == np.asarray(expected).tobytes()

    def test_over_http_and_locally_alike(self, tmp_path):
        tree = {f"l{number}": W * number for number in range(40)} | {"scalar": np.float32(3)}
        save(tmp_path / "item", tree)
        with serving(tmp_path) as store:
            for path in (tmp_path / "item", f"{store.url}/item"):
                with ot.open_checkpoint(path) as checkpoint:
                    assert all(isinstance(leaf_of(checkpoint, name), SmallArrayLeaf) for name in tree)
                    for name, value in ot.restore(checkpoint, None).items():
                        np.testing.assert_array_equal(value, tree[name])

    def test_a_tree_that_is_one_array(self, tmp_path):
        save(tmp_path / "item", W)
        np.testing.assert_array_equal(ot.restore(tmp_path / "item", W), W)


def test_nothing_is_opened_for_each_array(tmp_path, monkeypatch):
    save(tmp_path / "item", {f"l{number}": W for number in range(300)})
    opened = []
    original = ts.open
    monkeypatch.setattr(ts, "open", lambda *args, **options: opened.append(args) or original(*args, **options))
    ot.restore(tmp_path / "item", None)
    assert len(opened) <= 2


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        bytes(cramjam.zstd.compress(W.tobytes()[:-1])),
        bytes(cramjam.zstd.compress(W.tobytes() + b"0")),
        bytes(cramjam.zstd.compress(W.tobytes()))[:-1],
        bytes(cramjam.zstd.compress(bytes(1 << 26))),
    ],
    ids=["empty", "garbage", "short", "long", "cut", "bomb"],
)
def test_a_chunk_that_is_damaged(tmp_path, value):
    save(tmp_path / "item", {"w": W, "good": W})
    database(tmp_path / "item")["w/0.0"] = value
    with pytest.raises(ValueError):
        read_by_tensorstore(tmp_path / "item", "w", "zarr")
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        with pytest.raises(CorruptCheckpointError) as caught:
            ot.restore(checkpoint, {"w": W, "good": W})
        assert caught.value.leaf == "w" and caught.value.path == str(tmp_path / "item")
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), W)


def test_a_chunk_that_is_missing_is_left_to_tensorstore(tmp_path):
    save(tmp_path / "item", {"w": W, "good": W})
    database(tmp_path / "item").delete_range(ts.KvStore.KeyRange("w/0.0", "w/0.0\0")).result()
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        assert not isinstance(leaf_of(checkpoint, "w"), SmallArrayLeaf)
        with pytest.raises(CorruptCheckpointError) as caught:
            checkpoint.leaves["w"].get()
        assert caught.value.leaf == "w"


def test_files_that_changed_or_vanished_are_gone(tmp_path):
    save(tmp_path / "item")
    for change in ("changed", "vanished"):
        path = shutil.copytree(tmp_path / "item", tmp_path / change)
        with ot.open_checkpoint(path) as checkpoint:
            if change == "changed":
                database(path)["w/0.0"] = b"garbage"
            else:
                shutil.rmtree(path)
            with pytest.raises(CheckpointGoneError):
                ot.restore(checkpoint, {"w": W})
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.slow
def test_every_byte_of_a_local_tree_matters(tmp_path):
    save(tmp_path / "item")
    manifest = tmp_path / "item" / "manifest.ocdbt"
    (node,) = (tmp_path / "item" / "d").iterdir()
    for file in (manifest, node):
        good = file.read_bytes()
        for at in range(0, len(good), 5):
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
            with pytest.raises(CheckpointError):
                ot.open_checkpoint(tmp_path / "item")
        file.write_bytes(good)


def test_a_closed_checkpoint_is_not_read(tmp_path):
    save(tmp_path / "item")
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        view = checkpoint.leaves["w"]
    with pytest.raises(ValueError, match="closed"):
        view.get()
