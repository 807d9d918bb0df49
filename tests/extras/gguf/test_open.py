"""GGUF files of llama.cpp's own writer (golden) and by hand: names, shapes, values, and what a directory holds."""

import json
import struct
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.extras.gguf import open as open_module
from orbax_t5x.extras.gguf.open import read_header
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, random_box, read_boxes
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support import gguf_files as files
from tests.support.format_suites import GgufSuite
from tests.support.gguf_files import F32, header, pair, quantized, tensor, text, write_gguf

W = np.arange(64, dtype=np.float32).reshape(2, 32)


class TestFile(GgufSuite):
    pass


def test_a_model_of_llama_cpp(goldens):
    path = goldens / "gguf" / "t5_mixed.gguf"
    dtypes = set()
    with ot.open_checkpoint(path) as checkpoint, np.load(goldens / "gguf" / "t5_mixed_expected.npz") as expected:
        assert (checkpoint.format, checkpoint.step) == ("gguf", None)
        assert checkpoint.leaves.keys() == {*expected.files, "test.q4"}
        for name in expected.files:
            lazy = checkpoint.leaves[name]
            dtypes.add(lazy.dtype)
            assert lazy.shape == expected[name].shape
            np.testing.assert_array_equal(lazy.get().astype(expected[name].dtype), expected[name])
            if lazy.ndim == 2:
                np.testing.assert_array_equal(lazy[1:, 1:3].get().astype(expected[name].dtype), expected[name][1:, 1:3])
        with pytest.raises(UnsupportedCheckpointError, match="quantized as Q4_0; F32, F16, BF16 and Q8_0") as caught:
            checkpoint.leaves["test.q4"].get()
        assert (caught.value.path, caught.value.leaf) == (str(path), "test.q4")
        about = checkpoint.metadata
        assert (about["version"], about["general.architecture"], about["general.name"]) == (3, "t5", "tiny")
        assert (about["t5.embedding_length"], about["test.small"], about["test.flag"]) == (32, [1, 2, 3], True)
        assert about["tokenizer.ggml.tokens"] == about["tokenizer.ggml.scores"] == "(an array of 300 values)"
        json.dumps(about)
    assert {np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64)} <= dtypes


def test_a_restore_of_what_was_quantized(goldens):
    path = goldens / "gguf" / "t5_mixed.gguf"
    with np.load(goldens / "gguf" / "t5_mixed_expected.npz") as expected:
        target = {name: np.zeros_like(expected[name]) for name in expected.files if name.endswith("weight")}
        restored = ot.restore(path, target, ot.transforms.Keep((r".*weight",)))
        for name in target:
            assert_same(restored[name], expected[name])


def test_directories(tmp_path):
    files.write_gguf(tmp_path / "weights.gguf", {"w": W})
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, list(checkpoint.leaves)) == ("gguf", ["w"])
    files.write_gguf(tmp_path / "others.gguf", {"w": W})
    with pytest.raises(UnsupportedCheckpointError, match=r"open one of others\.gguf, weights\.gguf"):
        ot.open_checkpoint(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no GGUF files"):
        ot.open_checkpoint(empty, format="gguf")


def test_parts_of_one_model(tmp_path):
    for part in (1, 2):
        name = f"t5-0000{part}-of-00002.gguf"
        files.write_gguf(tmp_path / name, {f"w{part}": W}, metadata={"split.no": part})
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.leaves) == ["w1", "w2"]
        assert len(checkpoint.metadata["files"]) == 2
    files.write_gguf(tmp_path / "t5-00002-of-00002.gguf", {"w1": W})
    with pytest.raises(CorruptCheckpointError, match="is in 't5-00001"):
        ot.open_checkpoint(tmp_path)
    (tmp_path / "t5-00002-of-00002.gguf").unlink()
    with pytest.raises(CorruptCheckpointError, match="1 of the 2 parts"):
        ot.open_checkpoint(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"'t5-00002-of-00002\.gguf' is missing"):
        ot.open_checkpoint(tmp_path / "t5-00001-of-00002.gguf")
    files.write_gguf(tmp_path / "t5.gguf", {"w": W})
    with pytest.raises(UnsupportedCheckpointError, match="several GGUF files"):
        ot.open_checkpoint(tmp_path)


def test_a_pointer_of_git_lfs(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UnsupportedCheckpointError, match="git lfs pull"):
        ot.open_checkpoint(tmp_path / "model.gguf")


def test_a_part_opens_as_the_whole(tmp_path):
    for number, name in enumerate("abc", 1):
        files.write_gguf(tmp_path / f"m-{number:05}-of-00003.gguf", {name: np.arange(3, dtype=np.float32)})
    for number in (1, 3):
        with ot.open_checkpoint(tmp_path / f"m-{number:05}-of-00003.gguf") as checkpoint:
            assert list(checkpoint.leaves) == ["a", "b", "c"]
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ot.errors.CorruptCheckpointError, match=r"'m-00002-of-00003\.gguf' is missing"):
        ot.open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


NUMBERS = [(0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -9), (4, "I", 1 << 31), (5, "i", -1), (6, "f", 0.5)]
NUMBERS += [(7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1)]


def parsed(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data)
    with closing(LocalFiles(tmp_path)) as files:
        return read_header(files.file("m.gguf"))


@pytest.mark.parametrize(("code", "form", "value"), NUMBERS)
def test_numbers_alone_and_in_arrays(tmp_path, code, form, value):
    packed = struct.pack(f"<{form}", value)
    alone = text("one") + struct.pack("<I", code) + packed
    several = text("two") + struct.pack("<IIQ", 9, code, 2) + packed * 2
    metadata = parsed(tmp_path, header([], [alone, several])).metadata
    assert metadata == {"one": value, "two": [value, value]}
    assert type(metadata["one"]) is type(value)


def test_texts_and_arrays(tmp_path):
    pairs = [pair("text", "é"), pair("list", [["a", "b"], ["c"]]), pair("long", "x" * 70_000)]
    pairs += [pair("many", ["token"] * 300), pair("numbers", [1] * 300), pair("bad", "?")]
    data = header([tensor("w", (2, 3), F32, 0)], [*pairs[:-1], text("bad") + struct.pack("<I", 8) + text(b"\xff")])
    found = parsed(tmp_path, data + bytes(32))
    assert found.metadata == {
        "text": "é",
        "list": [["a", "b"], ["c"]],
        "long": "(a text of 70000 bytes)",
        "many": "(an array of 300 values)",
        "numbers": "(an array of 300 values)",
        "bad": "\ufffd",
    }
    assert found.tensors == [("w", (2, 3), F32, len(data))]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_the_data_begin_at_the_alignment(tmp_path, alignment):
    data = header([tensor("w", (2,), F32, 0)], [pair("general.alignment", alignment)])
    start = parsed(tmp_path, data + bytes(8192)).tensors[0].start
    assert start % alignment == 0 and 0 <= start - len(data.rstrip(b"\0")) < alignment + 32


def reference(array):
    blocks = np.frombuffer(quantized(array), np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
    return (blocks["scale"].astype(np.float32)[:, None] * blocks["values"].astype(np.float32)).reshape(array.shape)


SHAPES = [(32,), (3, 64), (2, 3, 96), (5, 2, 1, 32)]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def written(request, tmp_path_factory):
    array = np.random.default_rng(1).normal(size=request.param).astype(np.float32)
    path = write_gguf(tmp_path_factory.mktemp("q8") / "m.gguf", {"before": array, "w": array}, q8=["w"])
    return path, reference(array)


class TestLeaf(LeafSuite):
    @pytest.fixture
    def expected(self, written):
        return written[1]

    @pytest.fixture
    def leaf(self, written):
        return leaf_of(ot.open_checkpoint(written[0]), "w")


@pytest.mark.parametrize("shape", [(40, 320), (3, 3200), (1, 32 * 400), (7, 11, 64)], ids=str)
def test_slabs_read_no_block_twice(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(open_module, "_SLAB_BYTES", 2000)
    array = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    expected = reference(array)
    rng = np.random.default_rng(3)
    with ot.open_checkpoint(write_gguf(tmp_path / "m.gguf", {"w": array}, q8=["w"])) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        assert leaf.bytes_of((tuple((0, size) for size in shape),)) == array.size // 32 * 34
        for _ in range(10):
            boxes = [random_box(rng, shape) for _ in range(3)]
            reading = read_boxes(leaf, boxes)
            for box, found in zip(boxes, reading.arrays, strict=True):
                assert_same(found, expected[box_slices(box)])
            assert reading.stats.bytes_read == leaf.bytes_of(tuple(boxes))


def test_an_eighth_reads_an_eighth(tmp_path):
    array = np.random.default_rng(4).normal(size=(64, 512)).astype(np.float32)
    with ot.open_checkpoint(write_gguf(tmp_path / "m.gguf", {"w": array}, q8=["w"])) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        for box in (((8, 16), (0, 512)), ((0, 64), (64, 128))):
            assert read_boxes(leaf, [box]).stats.bytes_read == array.size // 8 // 32 * 34


def test_scales_that_are_no_numbers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"w": np.ones((1, 32), np.float32)}, q8=["w"])
    data = path.read_bytes()
    path.write_bytes(data[:-34] + np.float16(np.inf).tobytes() + bytes(32))
    with ot.open_checkpoint(path) as checkpoint:
        assert np.isnan(checkpoint.leaves["w"].get()).all()
