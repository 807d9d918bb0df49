"""Bundles that TensorFlow wrote, and sound ones of the hand-made writer: every value, any box, all ways to name one."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_writer import Bundle, bundle_of, header, np_dtype
from tests.support.format_suites import BundleSuite

BUNDLES = [
    "dtype_zoo",
    "lm_transformer",
    "partitioned",
    "t5_1_0_bf16",
    "t5_1_1_bf16_snappy",
    "t5_1_1_f32",
    "t5_1_1_perlayer_rel",
]


class TestOneShard(BundleSuite):
    pass


class TestSeveralShards(BundleSuite):
    shards = 3


class TestBigEndian(BundleSuite):
    shards = 2
    big_endian = True


class TestPartitionedVariables(BundleSuite):
    """Every array of at least one dimension lies in two slices along its first one."""

    def write(self, directory, arrays):
        bundle = Bundle(2)
        for name, array in arrays.items():
            if array.ndim and len(array) > 1:
                rest = [Extent(0, -1)] * (array.ndim - 1)
                bundle.add_sliced(name, array, [[Extent(0, 1), *rest], [Extent(1, len(array) - 1), *rest]])
            else:
                bundle.add(name, array)
        return bundle.write(directory)


def expected_values(directory: Path) -> dict[str, np.ndarray]:
    """Every value with its true dtype, from what TensorFlow gave."""
    values = np.load(directory / "expected.npz")
    expected = {}
    for name, meta in json.loads((directory / "expected_meta.json").read_text())["tensors"].items():
        if meta["dtype"] == "string":
            flat = np.array(meta["value"], object).reshape(-1).tolist()
            expected[name] = np.empty(meta["shape"], object)
            expected[name].reshape(-1)[:] = [text.encode("latin-1") for text in flat]
        else:
            expected[name] = values[name].astype(np_dtype(meta["dtype"]))
    return expected


def test_the_goldens_are_all_here(goldens: Path) -> None:
    assert sorted(path.name for path in (goldens / "tf_bundle").iterdir() if path.is_dir()) == BUNDLES


@pytest.mark.parametrize("name", BUNDLES)
def test_goldens_read_bit_exact(goldens: Path, name: str) -> None:
    directory = goldens / "tf_bundle" / name
    expected = expected_values(directory)
    with open_tf_bundle(directory) as checkpoint:
        assert list(checkpoint.leaves) == sorted(expected)
        for leaf_name, value in expected.items():
            leaf = leaf_of(checkpoint, leaf_name)
            assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype), leaf_name
            assert same_bits(read_whole(leaf), value), leaf_name
        index = next(directory.glob("*.index"))
        assert checkpoint.index_bytes == index.stat().st_size + (directory / "checkpoint").stat().st_size


@pytest.mark.parametrize("name", BUNDLES)
def test_any_boxes_of_the_goldens(goldens: Path, name: str) -> None:
    random = np.random.default_rng(0)
    directory = goldens / "tf_bundle" / name
    with open_tf_bundle(directory) as checkpoint:
        for leaf_name, value in expected_values(directory).items():
            leaf = leaf_of(checkpoint, leaf_name)
            for _ in range(3):
                ends = [np.sort(random.integers(0, size + 1, (2, 2)), 1) for size in value.shape]
                boxes = [tuple((int(pair[k, 0]), int(pair[k, 1])) for pair in ends) for k in range(2)]
                reading = read_boxes(leaf, boxes, "full")
                assert reading.verified is True
                for box, out in zip(boxes, reading.arrays, strict=True):
                    part = np.empty(out.shape, out.dtype)
                    part[...] = value[box_slices(box)]
                    assert same_bits(out, part), (leaf_name, box)


def test_views_of_leaves_read(goldens: Path) -> None:
    with open_tf_bundle(goldens / "tf_bundle/t5_1_1_f32") as checkpoint:
        name = "decoder/block_000/layer_000/SelfAttention/k"
        value = expected_values(goldens / "tf_bundle/t5_1_1_f32")[name]
        assert same_bits(np.asarray(checkpoint.leaves[name]), value)
        assert same_bits(np.asarray(checkpoint.leaves[name][3:7, ::2].T), value[3:7, ::2].T.copy())


def test_metadata(goldens: Path) -> None:
    with open_tf_bundle(goldens / "tf_bundle/t5_1_1_f32") as checkpoint:
        assert checkpoint.format == "tf_bundle"
        assert checkpoint.step == 1_000_000
        assert checkpoint.path == str(goldens / "tf_bundle/t5_1_1_f32/model.ckpt-1000000")
        assert checkpoint.metadata == {
            "writer": "TensorFlow",
            "version": 1,
            "min_consumer": 0,
            "endianness": "little",
            "num_shards": 2,
            "shard_bytes": [45568, 30088],
        }


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("model.ckpt-0", 0),
        ("model.ckpt-1000000", 1_000_000),
        ("zoo.ckpt", None),
        ("a-1b", None),
        ("x-" + "9" * 30, None),
    ],
)
def test_the_step_is_in_the_name(tmp_path: Path, name: str, step: int | None) -> None:
    prefix = bundle_of({"global_step": np.int64(7).reshape(())}).write(tmp_path, name)
    assert open_tf_bundle(prefix).step == step


# -- naming a bundle


# -- layouts


ARRAYS = {
    "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "b/c": np.array(7, np.int64),
    "b/d": np.zeros((0, 5), np.float16),
    "c64": np.array([1 + 2j, -3j], np.complex64),
    "bits": np.array([True, False, True]),
    "bf": np.arange(5).astype(np_dtype("bfloat16")),
    "f8": np.arange(5).astype(np_dtype("float8_e4m3fn")),
    "i4": np.arange(-3, 4).astype(np_dtype("int4")),
}


@pytest.mark.slow
@given(st.integers(1, 5), st.booleans(), st.integers(1, 300), st.integers(1, 20), st.booleans())
@settings(max_examples=settings.default.max_examples // 4)
def test_layout_changes_no_value(tmp_path_factory, shards, big_endian, block_bytes, interval, snappy) -> None:
    bundle = bundle_of(ARRAYS, shards, big_endian=big_endian)
    directory = tmp_path_factory.mktemp("bundle")
    prefix = bundle.write(directory, block_bytes=block_bytes, restart_interval=interval, snappy=snappy)
    with open_tf_bundle(prefix) as checkpoint:
        assert checkpoint.metadata["endianness"] == ("big" if big_endian else "little")
        assert sorted(checkpoint.leaves) == sorted(ARRAYS)
        for name, value in ARRAYS.items():
            assert same_bits(read_whole(leaf_of(checkpoint, name)), value), name


# -- partitioned variables


# -- bytes


def test_rows_cost_their_bytes_and_the_index(tmp_path: Path) -> None:
    arrays = {f"layer_{n}/w": np.random.default_rng(n).random((256, 96), np.float32) for n in range(20)}
    with open_tf_bundle(bundle_of(arrays, 2).write(tmp_path)) as checkpoint:
        read = wanted = 0
        for name, value in arrays.items():
            reading = read_boxes(leaf_of(checkpoint, name), [((32, 64), (0, 96))])
            assert same_bits(reading.arrays[0], value[32:64])
            read += reading.stats.bytes_read + reading.stats.gap_bytes
            wanted += value[32:64].nbytes
        assert read == wanted
        index = next(tmp_path.glob("*.index")).stat().st_size
        assert checkpoint.index_bytes == index


def test_opening_reads_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = bundle_of(ARRAYS, 3).write(tmp_path)
    opened = []
    real = os.open

    def watch(path, *args, **kwargs):
        opened.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", watch)
    open_tf_bundle(prefix).close()
    assert not [path for path in opened if ".data-" in str(path)] and opened


def test_a_claim_of_many_shards_costs_no_look_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of({"a": ARRAYS["a"]})
    bundle.header = header(100_000)
    prefix = bundle.write(tmp_path)
    shard = f"{prefix}.data-00000-of-00001"
    os.rename(shard, f"{prefix}.data-00000-of-100000")
    looked = []
    file = LocalFiles.file
    monkeypatch.setattr(LocalFiles, "file", lambda self, name: (looked.append(name), file(self, name))[1])
    with open_tf_bundle(prefix) as checkpoint:
        assert sorted(looked) == [f"{prefix.name}.data-00000-of-100000", f"{prefix.name}.index"]
        assert np.array_equal(read_whole(leaf_of(checkpoint, "a")), ARRAYS["a"])
        sizes = checkpoint.metadata["shard_bytes"]
        assert (len(sizes), sizes[0], set(sizes[1:])) == (100_000, ARRAYS["a"].nbytes, {None})


def test_leaves_of_a_closed_checkpoint_are_not_read(tmp_path: Path) -> None:
    checkpoint = open_tf_bundle(bundle_of(ARRAYS).write(tmp_path))
    leaf = leaf_of(checkpoint, "a")
    read_whole(leaf)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        read_boxes(leaf)


def test_a_checkpoint_closes_when_nobody_holds_it(tmp_path: Path, descriptors: set[int]) -> None:
    prefix = bundle_of(ARRAYS).write(tmp_path)
    checkpoint = open_tf_bundle(prefix)
    leaf = leaf_of(checkpoint, "a")
    read_whole(leaf)
    assert len(descriptors) == 1
    del checkpoint
    assert same_bits(read_whole(leaf), ARRAYS["a"])
    del leaf
    assert descriptors.all_closed()


@pytest.mark.parametrize("limits", [Limits(entries=7), Limits(index_bytes=60), Limits(block_bytes=60)])
def test_limits(tmp_path: Path, limits: Limits) -> None:
    with pytest.raises(LimitExceededError, match="Limits"):
        open_tf_bundle(bundle_of(ARRAYS).write(tmp_path), limits=limits)
