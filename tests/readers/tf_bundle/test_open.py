"""Bundles that TensorFlow wrote, and sound ones of the hand-made writer: every value, any box, all ways to name one."""

import importlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle, unescape
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_writer import Bundle, bundle_of, header, np_dtype, shard_path
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


@pytest.mark.parametrize("limits", [Limits(entries=7), Limits(index_bytes=60)])
def test_limits(tmp_path: Path, limits: Limits) -> None:
    with pytest.raises(LimitExceededError, match="Limits"):
        open_tf_bundle(bundle_of(ARRAYS).write(tmp_path), limits=limits)


def test_every_way_to_name_one(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = goldens / "tf_bundle/t5_1_1_f32"
    prefix = directory / "model.ckpt-1000000"
    ways = [
        directory,
        f"{directory}/",
        prefix,
        str(prefix),
        f"{prefix}.index",
        shard_path(prefix, 1, 2),
        directory / "checkpoint",
    ]
    for path in ways:
        with open_tf_bundle(path) as checkpoint:
            assert checkpoint.path == str(prefix) and len(checkpoint.leaves) == 143
    monkeypatch.chdir(directory)
    for path in (".", "model.ckpt-1000000", "model.ckpt-1000000.index", "checkpoint"):
        with open_tf_bundle(path) as checkpoint:
            assert checkpoint.path == str(prefix)


def test_a_directory_with_one_bundle_needs_no_checkpoint_file(bundle: Path) -> None:
    assert open_tf_bundle(bundle.parent).step == 5
    bundle_of({"x": np.arange(4)}).write(bundle.parent, "model.ckpt-6")
    with pytest.raises(
        CheckpointNotFoundError, match=r"2 bundles \(model.ckpt-5.index, model.ckpt-6.index\): name one"
    ):
        open_tf_bundle(bundle.parent)


def state(directory: Path, text: str) -> Path:
    (directory / "checkpoint").write_text(text)
    return directory


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "model.ckpt-5"\nall_model_checkpoint_paths: "model.ckpt-5"\n',
        "  model_checkpoint_path : 'model.ckpt-5'",
        'all_model_checkpoint_paths: "other"\nmodel_checkpoint_path: "./model.ckpt-5"',
        'model_checkpoint_path: "model\\056ckpt-5"',
        'model_checkpoint_path: "{run}/model.ckpt-5"',
    ],
)
def test_checkpoint_files(bundle: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    bundle_of({"x": np.arange(4)}).write(bundle.parent, "model.ckpt-6")
    checkpoint = open_tf_bundle(state(bundle.parent, text.replace("{run}", str(bundle.parent))))
    assert checkpoint.step == 5 and "rebased_from" not in checkpoint.metadata
    assert not caplog.records


@given(st.binary(), st.text(), st.booleans())
def test_escapes_are_those_of_protobuf(data: bytes, text: str, as_utf8: bool) -> None:
    text_encoding = importlib.import_module("google.protobuf.text_encoding")
    for value in (data, text.encode(), bytes(range(256))):
        escaped = text_encoding.CEscape(value, as_utf8).encode()
        assert unescape(escaped) == value == text_encoding.CUnescape(escaped.decode())
    assert unescape(rb"\x4A\x4g\a\b\?") == text_encoding.CUnescape(r"\x4A\x4g\a\b?")


@pytest.mark.parametrize("text", [r"\777", r"\q", r"\xg"])
def test_unknown_escapes_are_damage(bundle: Path, text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="no text"):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{text}"'))


def test_a_relative_path_may_go_down(bundle: Path) -> None:
    assert open_tf_bundle(state(bundle.parent.parent, 'model_checkpoint_path: "run/model.ckpt-5"')).step == 5


def test_an_absolute_path_is_rebased_with_a_warning(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    state(bundle.parent, 'model_checkpoint_path: "/data/run/model.ckpt-5"')
    with caplog.at_level(logging.WARNING):
        checkpoint = open_tf_bundle(bundle.parent)
    assert checkpoint.path == str(bundle)
    assert checkpoint.metadata["rebased_from"] == "/data/run/model.ckpt-5"
    assert "/data/run/model.ckpt-5" in caplog.text


def test_an_absolute_path_is_never_followed(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = bundle_of({"secret": np.arange(4)}).write(tmp_path / "other", "model.ckpt-7")
    state(bundle.parent, f'model_checkpoint_path: "{other}"')
    with pytest.raises(CheckpointNotFoundError, match=r"model.ckpt-7.*there is no model.ckpt-7.index"):
        open_tf_bundle(bundle.parent)


@pytest.mark.parametrize("said", ["../../x", "../run/model.ckpt-5", "/a/../b", "a/../../b", "a\\\\..\\\\b"])
def test_a_checkpoint_file_that_leads_upwards_is_unsafe(bundle: Path, said: str) -> None:
    with pytest.raises(UnsafeCheckpointError):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{said}"'))


@pytest.mark.parametrize("said", ["/data/", ".", "./"])
def test_a_checkpoint_file_that_names_no_file(bundle: Path, said: str) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{said}"'))


def test_a_checkpoint_file_of_another_kind_is_not_ours(bundle: Path) -> None:
    (bundle.parent / "checkpoint").write_bytes(b"\x82\xa7version\x03")
    assert open_tf_bundle(bundle.parent).step == 5
    Path(f"{bundle}.index").unlink()
    with pytest.raises(CheckpointNotFoundError, match="no 'checkpoint' file with a model_checkpoint_path, and nothing"):
        open_tf_bundle(bundle.parent)


def test_a_directory_beside_a_bundle_of_the_same_name(bundle: Path) -> None:
    bundle.mkdir()
    assert open_tf_bundle(bundle).path == str(bundle)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nothing.index", tmp_path):
        with pytest.raises(CheckpointNotFoundError, match="no TensorFlow bundle"):
            open_tf_bundle(path)
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(CheckpointNotFoundError, match=r"there is no .*file\.index"):
        open_tf_bundle(tmp_path / "file")


def test_a_shard_without_its_index(bundle: Path) -> None:
    Path(f"{bundle}.index").unlink()
    with pytest.raises(CheckpointNotFoundError, match="index is missing"):
        open_tf_bundle(shard_path(bundle))


def test_symlinks_to_the_files_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    """What the caller names is trusted; what lies beside it is followed only inside."""
    (tmp_path / "link").symlink_to(bundle.parent)
    assert open_tf_bundle(tmp_path / "link").path == str(bundle)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/there.index").symlink_to(f"{bundle}.index")
    assert open_tf_bundle(tmp_path / "elsewhere/there.index").path == str(bundle)
    with pytest.raises(UnsafeCheckpointError):
        open_tf_bundle(tmp_path / "elsewhere/there")


@pytest.mark.parametrize("name", ["model.ckpt-3", "model.ckpt-3-00000-of-00001"])
def test_v1_checkpoints_are_refused_with_a_hint(bundle: Path, name: str) -> None:
    index = Path(f"{bundle}.index")
    index.rename(bundle.parent / name)
    for path in (bundle.parent / name, bundle.parent / "model.ckpt-3"):
        with pytest.raises(UnsupportedCheckpointError, match=r"V1 checkpoint.*write_version"):
            open_tf_bundle(path)
    if name == "model.ckpt-3":
        with pytest.raises(UnsupportedCheckpointError, match="V1 checkpoint"):
            open_tf_bundle(state(bundle.parent, 'model_checkpoint_path: "model.ckpt-3"'))


def test_the_bundles_of_tensorflow(goldens):
    bundles = goldens / "tf_bundle"
    if not bundles.exists():
        pytest.fail("the golden TensorFlow bundles are missing")
    directory = bundles / "t5_1_1_f32"
    prefix = directory / "model.ckpt-1000000"
    for path in (directory, prefix, f"{prefix}.index", directory / "checkpoint"):
        with ot.open_checkpoint(path) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == ("tf_bundle", 1000000)
    with pytest.raises(UnsupportedCheckpointError, match="has no items"):
        ot.open_checkpoint(directory, item="state")


def test_a_damaged_bundle_is_still_one(tmp_path):
    (tmp_path / "model.ckpt-7.index").write_bytes(b"short")
    (tmp_path / "model.ckpt-7.data-00000-of-00001").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.ckpt-7", tmp_path / "model.ckpt-7.index"):
        with pytest.raises(ot.errors.CorruptCheckpointError, match=r"model\.ckpt-7\.index"):
            ot.open_checkpoint(path)
