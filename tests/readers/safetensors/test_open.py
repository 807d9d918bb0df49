"""Safetensors checkpoints, written by the format's own library and by Transformers (goldens)."""

import json
import shutil

import hypothesis
import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.limits import Limits
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.testing.leaf_reads import assert_same, bytes_read_by_process, leaf_of, read
from orbax_t5x.testing.reader_suite import ReaderSuite
from tests.support.format_suites import SafetensorsIndexSuite, SafetensorsSuite, save_safetensors
from tests.support.safetensors_files import container, tensor


class TestOneFile(SafetensorsSuite):
    pass


class TestDirectoryWithIndex(SafetensorsIndexSuite):
    pass


class TestFilesWithoutIndex(ReaderSuite):
    def write(self, directory, arrays):
        for k in range(2):
            save_safetensors(directory / f"part{k}.safetensors", dict(list(arrays.items())[k::2]))
        return directory


def test_a_model_saved_by_transformers(goldens):
    directory = goldens / "safetensors" / "t5_1_1"
    with (
        ot.open_checkpoint(directory) as checkpoint,
        np.load(goldens / "safetensors" / "t5_1_1_expected.npz") as expected,
    ):
        assert checkpoint.format == "safetensors"
        assert checkpoint.step is None
        # The tied names are one tensor in the checkpoint.
        assert set(expected.files) - set(checkpoint.leaves) == {
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        }
        for name, lazy in checkpoint.leaves.items():
            assert_same(lazy.get(), expected[name])
        config = json.loads((directory / "config.json").read_text())
        assert checkpoint.metadata["config"] == config
        assert {"tie_word_embeddings", "d_model"} <= set(config)
        assert checkpoint.metadata["index"]["total_size"] == 339328
        assert len(checkpoint.metadata["files"]) == 6


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00002-of-00006.safetensors"])
def test_an_index_or_a_shard_by_its_own_path(goldens, name):
    with (
        ot.open_checkpoint(goldens / "safetensors" / "t5_1_1" / name) as checkpoint,
        np.load(goldens / "safetensors" / "t5_1_1_expected.npz") as expected,
    ):
        assert len(checkpoint.leaves) == (65 if name.endswith("json") else 12)
        for leaf, lazy in checkpoint.leaves.items():
            assert_same(lazy.get(), expected[leaf])


@pytest.mark.slow
@hypothesis.given(
    arrays=st.dictionaries(
        st.text('ab./\\"é\u2028\n😀 ', max_size=8),
        hnp.arrays(
            st.sampled_from([np.float32, np.int64, np.uint8, np.float16, np.complex64]),
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        ),
        max_size=6,
    ),
    # An empty one, without tensors, is written as invalid JSON.
    metadata=st.none() | st.dictionaries(st.text("ab", max_size=5), st.text('é"', max_size=5), min_size=1, max_size=3),
)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 4)
def test_what_the_library_writes_is_read(tmp_path_factory, arrays, metadata):
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata)
    with ot.open_checkpoint(path) as checkpoint:
        assert dict(checkpoint.leaves).keys() == arrays.keys()
        for name, expected in arrays.items():
            assert_same(checkpoint.leaves[name].get(), expected)
        assert checkpoint.metadata["file_metadata"] == {"model.safetensors": metadata or {}}


@pytest.mark.parametrize(
    ("dtype", "ml_dtype"),
    [
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_float8(tmp_path, dtype, ml_dtype):
    data = bytes(range(256))
    header = json.dumps({"x": {"dtype": dtype, "shape": [256], "data_offsets": [0, 256]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.leaves["x"].get(), np.frombuffer(data, ml_dtype))


def test_only_the_asked_ranges_are_read(tmp_path):
    array = np.random.default_rng(0).random((1 << 12, 1 << 10), np.float32)
    save_safetensors(tmp_path / "model.safetensors", {"w": array, "other": array})
    with ot.open_checkpoint(tmp_path) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        out = np.empty((8, 1 << 10), np.float32)
        before = bytes_read_by_process()
        stats = read(leaf, [Request(((100, 108), (0, 1 << 10)), out)])
        assert bytes_read_by_process() - before < out.nbytes + 4096
        assert stats.bytes_read == out.nbytes
        assert_same(out, array[100:108])


def test_a_single_model_file_goes_before_an_index(tmp_path):
    save_safetensors(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "other.safetensors"}}))
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.leaves) == ["a"]


def test_the_trainers_step(tmp_path):
    directory = tmp_path / "checkpoint-500"
    directory.mkdir()
    save_safetensors(directory / "model.safetensors", {"a": np.ones(2, np.float32)})
    with ot.open_checkpoint(directory) as checkpoint:
        assert checkpoint.step == 500


def test_a_snapshot_of_the_hub_cache(tmp_path):
    """Files of a snapshot are links to blobs of the same model; everything else stays inside the directory."""
    model = tmp_path / "models--google--t5"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    blob = "a" * 64
    save_safetensors(model / "blobs" / blob, {"w": np.arange(3, dtype=np.float32)})
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    (model / "blobs" / ("b" * 40)).write_text('{"tie_word_embeddings": false}')
    (snapshot / "config.json").symlink_to(f"../../blobs/{'b' * 40}")
    for path in (snapshot, snapshot / "model.safetensors"):
        with ot.open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), [0, 1, 2])
            assert checkpoint.metadata["config"] == {"tie_word_embeddings": False}


def test_a_file_behind_a_link_that_the_caller_named(tmp_path):
    save_safetensors(tmp_path / "real.safetensors", {"w": np.arange(3, dtype=np.float32)})
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "model.safetensors"
    link.symlink_to(tmp_path / "real.safetensors")
    with ot.open_checkpoint(link) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), [0, 1, 2])
    with pytest.raises(ot.errors.UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(tmp_path / "links")


def test_a_config_that_cannot_be_read_does_not_hide_the_tensors(tmp_path):
    save_safetensors(tmp_path / "model.safetensors", {"w": np.arange(3, dtype=np.float32)})
    (tmp_path / "config.json").write_text("{")
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.metadata["config"] is None
        assert "config.json" in checkpoint.metadata["config_error"]
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), [0, 1, 2])


@pytest.mark.parametrize("end", [".safetensors", ".bin", ".msgpack"])
def test_a_part_without_its_siblings_is_an_error(goldens, tmp_path, end):
    """A model without the layers of another file would look like a smaller one."""
    source = {
        ".safetensors": "safetensors/t5_1_1/model-00001-of-00006.safetensors",
        ".bin": "torch/t5_1_1_bf16/pytorch_model-00001-of-00002.bin",
        ".msgpack": "flax_msgpack/t5_1_1/flax_model.msgpack",
    }[end]
    part, other = (tmp_path / f"model-0000{number}-of-00002{end}" for number in (1, 2))
    shutil.copy(goldens / source, part)
    with pytest.raises(
        ot.errors.CorruptCheckpointError, match=f"one of 2 parts of a model, and '{other.name}' is missing"
    ):
        ot.open_checkpoint(part)
    shutil.copy(goldens / source, other)
    with ot.open_checkpoint(part) as checkpoint, ot.open_checkpoint(goldens / source) as alone:
        assert checkpoint.leaves.keys() == alone.leaves.keys()
    shutil.copy(goldens / source, tmp_path / f"model-00003-of-00002{end}")
    ot.open_checkpoint(tmp_path / f"model-00003-of-00002{end}").close()


def test_numbered_files_without_an_index_are_one_whole_set(tmp_path):
    """A download or an upload under way is no model."""
    arrays = {f"{index}": np.full(3, index, np.float32) for index in range(3)}
    names = [f"model-{index + 1:05}-of-00003.safetensors" for index in range(3)]
    for name, (leaf, array) in zip(names, arrays.items(), strict=True):
        with pytest.raises(ot.errors.CheckpointError):
            ot.open_checkpoint(tmp_path)
        safetensors.numpy.save_file({leaf: array}, tmp_path / name)
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.leaves.keys() == arrays.keys()
    safetensors.numpy.save_file({"other": np.ones(3)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ot.errors.CorruptCheckpointError, match="several models"):
        ot.open_checkpoint(tmp_path)
    (tmp_path / names[0]).rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ot.errors.CorruptCheckpointError, match="2 of 3 files"):
        ot.open_checkpoint(tmp_path)


GOOD = {"a": tensor(0, 8, [2]), "b": tensor(8, 12, [])}
DATA = bytes(range(12))
CORRUPT = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length 2^64 - 1": b"\xff" * 8 + b"{}",
    "length 1 TiB": (1 << 40).to_bytes(8, "little") + b"{}",
    "length above the format's 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
    "length beyond the file": (3).to_bytes(8, "little") + b"{}",
    "length 0": bytes(8),
    "not a brace": container(b' {"a": 1}'),
    "byte order mark": container(b"\xef\xbb\xbf{}"),
    "a list": container("[]"),
    "a string": container('"{"'),
    "no JSON": container("{"),
    "more JSON behind": container("{}{}"),
    "not UTF-8": container(b'{"\xff": 1}'),
    "100,000 deep": container('{"a":' * 100_000),
    "100,000 brackets": container('{"a":' + "[" * 100_000),
    "NaN": container('{"a": NaN}'),
    "the same name twice": container('{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 8, [2])),) * 2), bytes(8)),
    "the same key twice": container(
        '{"a": {"dtype": "F32", "dtype": "I32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "half a character": container(json.dumps({"\ud800": tensor(0, 4, [])}), bytes(4)),
    "metadata of numbers": container({"__metadata__": {"a": 1}}),
    "metadata is a list": container({"__metadata__": []}),
    "trailing bytes": container(GOOD, DATA + b"x"),
    "data cut": container(GOOD, DATA[:-1]),
    "no data": container(GOOD),
    "overlap": container({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, DATA),
    "the same range twice": container({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, bytes(8)),
    "hole": container({"a": tensor(0, 4, []), "b": tensor(8, 12, [])}, DATA),
    "hole at the start": container({"a": tensor(4, 8, [])}, bytes(8)),
    "end before begin": container({"a": tensor(8, 0, [2])}, bytes(8)),
    "negative offset": container({"a": tensor(-4, 4, [2])}, bytes(8)),
    "float offset": container('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}', bytes(8)),
    "bool offset": container('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [false, true]}}', bytes(1)),
    "three offsets": container({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, bytes(8)),
    "no offsets": container({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "offset 2^64": container({"a": tensor(0, 1 << 64, [2])}, bytes(8)),
    "offset of 10,000 digits": container(
        '{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, %s]}}' % ("9" * 10_000)
    ),
    "negative size": container({"a": tensor(0, 8, [-2])}, bytes(8)),
    "two negative sizes": container({"a": tensor(0, 8, [-2, -1])}, bytes(8)),
    "float size": container({"a": tensor(0, 8, [2.0])}, bytes(8)),
    "bool size": container({"a": tensor(0, 4, [True])}, bytes(4)),
    "shape is a number": container({"a": tensor(0, 8, 2)}, bytes(8)),
    "shape is null": container({"a": tensor(0, 8, None)}, bytes(8)),
    "shape too small": container({"a": tensor(0, 8, [1])}, bytes(8)),
    "shape too large": container({"a": tensor(0, 8, [3])}, bytes(8)),
    "product overflows to the size": container({"a": tensor(0, 0, [1 << 33, 1 << 31, 4])}),
    "sub-byte misaligned": container({"a": tensor(0, 1, [3], "F4")}, bytes(1)),
    "dtype is a number": container({"a": tensor(0, 8, [2], 5)}, bytes(8)),
    "no dtype": container({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "entry is a list": container({"a": []}),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_corrupt_headers(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        ot.open_checkpoint(path)
    assert caught.value.path == str(path)


def test_limits(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container({"a" * 100: tensor(0, 4, [1] * 33), "b": tensor(4, 8, [])}, bytes(8)))
    for limits in (Limits(), Limits(rank=64, header_bytes=99), Limits(rank=64, entries=1)):
        with pytest.raises(LimitExceededError, match="Limits"):
            ot.open_checkpoint(path, limits=limits)
    with ot.open_checkpoint(path, limits=Limits(rank=64)) as checkpoint:
        assert len(checkpoint.leaves) == 2


def accepted_by_library(content: bytes) -> dict[str, bytes] | None:
    try:
        return {name: bytes(said["data"]) for name, said in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


def accepted_by_us(path) -> dict[str, bytes] | None:
    try:
        with ot.open_checkpoint(path, format="safetensors") as checkpoint:
            return {name: lazy.get().tobytes() for name, lazy in checkpoint.leaves.items()}
    except CheckpointError:
        return None


_NUMBER = st.integers(-2, 20) | st.sampled_from([0, 4, 8, 12, 1 << 40, 1 << 63, True, 1.5, None, "4"])


@st.composite
def headers(draw):
    """Headers near the good one: entries with sizes and offsets that fit or do not."""
    header = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["a", "b", "c", "", "__metadata__"]))
        part = draw(st.sampled_from(["shape", "data_offsets", "dtype", "whole"]))
        if part == "whole":
            header[name] = draw(
                st.none() | st.dictionaries(st.sampled_from(["dtype", "x"]), st.text("F32", max_size=3))
            )
        elif isinstance(header.get(name), dict):
            header[name][part] = draw(
                st.sampled_from(["F32", "I8", "F64", "BOOL", "F4", "Q9"])
                if part == "dtype"
                else st.lists(_NUMBER, max_size=3)
            )
    return header


@pytest.mark.slow
@hypothesis.example(header={"__metadata__": None, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": {}, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": {"a": None}, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": False, **GOOD}, size=len(DATA))
@hypothesis.given(header=headers(), size=st.integers(0, 24))
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
def test_we_accept_what_the_library_accepts(tmp_path_factory, header, size):
    """Differential: the same files, the same bytes; unreadable dtypes are ours to refuse, leaf by leaf."""
    content = container(header, bytes(range(size)))
    path = tmp_path_factory.getbasetemp() / "differential.safetensors"
    path.write_bytes(content)
    theirs, ours = accepted_by_library(content), accepted_by_us(path)
    if theirs is None:
        assert ours is None
    elif any(isinstance(said, dict) and said.get("dtype") in ("F4", "Q9") for said in header.values()):
        assert ours is None
    else:
        # A bool byte other than 0 and 1 has no value of its own.
        bools = {name for name, said in header.items() if isinstance(said, dict) and said.get("dtype") == "BOOL"}
        assert ours is not None and ours.keys() == theirs.keys()
        assert all(ours[name] == theirs[name] for name in theirs if name not in bools)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
def test_any_change_of_a_byte_is_an_error_or_harmless(tmp_path_factory, data):
    content = bytearray(container({"__metadata__": {"format": "np"}, **GOOD}, DATA))
    position = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "delete", "insert", "cut"]))
    if kind == "flip":
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "delete":
        del content[position]
    elif kind == "insert":
        content.insert(position, data.draw(st.integers(0, 255)))
    else:
        del content[position:]
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    theirs, ours = accepted_by_library(bytes(content)), accepted_by_us(path)
    if theirs is None:
        assert ours is None
    elif ours is not None:
        assert ours == theirs
