"""convert to safetensors: the files that Transformers would write, which the format's own library reads."""

import json
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.lazy import chunks
from orbax_t5x.operations.convert import safetensors_layout
from tests.support.conversions import GOLDENS, names_in
from tests.support.memory_checkpoint import AwaitedLeaf, FailingLeaf, checkpoint

MIB = 1 << 20


def assert_equals(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape, name
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def some_arrays():
    rng = np.random.default_rng(0)
    arrays = {
        f"{np.dtype(dtype).name}.weight": rng.integers(0, 2, (3, 5)).astype(dtype)
        for dtype in ("bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "int64", "uint64")
    }
    arrays |= {"float32": rng.standard_normal((7, 3), np.float32), "float64": rng.standard_normal(9)}
    arrays |= {"bf16": rng.standard_normal(5).astype(ml_dtypes.bfloat16)}
    return arrays | {"rank0": np.float32(4).reshape(()), "empty": np.zeros((0, 3), np.float32), "ünïcode/é": np.ones(1)}


@pytest.mark.slow
def test_a_file_is_the_one_that_the_library_writes_byte_for_byte(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(3, np.float32), "c": np.ones(5, np.int8)}
    report = ot.convert(checkpoint(arrays), tmp_path / "out", format="safetensors")
    assert names_in(tmp_path) == ["out"] and names_in(tmp_path / "out") == ["model.safetensors"]
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert (report.leaves, report.bytes, report.skipped) == (3, 41, {}) and report.format == "safetensors"


def test_every_dtype_is_read_by_the_library_and_by_us(tmp_path):
    arrays = some_arrays()
    ot.convert(checkpoint(arrays), tmp_path / "out", format="safetensors")
    assert_equals(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), arrays)
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert_equals({name: view.get() for name, view in opened.leaves.items()}, arrays)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_views_are_written_as_numpy_has_them(tmp_path):
    a, b = np.arange(24.0).reshape(2, 3, 4), np.arange(6, dtype=np.float32)

    def change(state, target):
        return {"t": state["a"].transpose(2, 0, 1), "s": ot.stack([state["b"], state["b"]], 0), "c": state["b"][1::2]}

    ot.convert(checkpoint({"a": a, "b": b}), tmp_path / "out", change, format="safetensors", memory_limit_bytes=MIB)
    loaded = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert_equals(loaded, {"t": a.transpose(2, 0, 1), "s": np.stack([b, b]), "c": b[1::2]})


@settings(max_examples=15)
@given(st.data())
def test_arrays_equal_numpy_for_any_chunking(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(bool)]))
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    stored = tuple(data.draw(st.integers(1, max(1, size))) for size in shape) if data.draw(st.booleans()) else None
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    source = checkpoint({"w": AwaitedLeaf("w", array, stored), "v": array.T})
    directory = tmp_path_factory.mktemp("c") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "LEAST_BLOCK_BYTES", 1)
        limit = data.draw(st.integers(1, 4000))
        ot.convert(source, directory, format="safetensors", memory_limit_bytes=limit)
    loaded = safetensors.numpy.load_file(directory / "model.safetensors")
    assert_equals(loaded, {"w": array, "v": array.T})


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [None, 10_000])
def test_hugging_face_to_t5x_and_back_has_equal_bytes(tmp_path, monkeypatch, max_bytes):
    source = GOLDENS / "safetensors" / "t5_1_1"
    if max_bytes is not None:
        monkeypatch.setattr(safetensors_layout, "MAX_FILE_BYTES", max_bytes)
    ot.convert(source, tmp_path / "t5x", ot.rules.hf_t5_to_t5x())
    ot.convert(tmp_path / "t5x", tmp_path / "hf", ot.rules.t5x_to_hf_t5(), format="safetensors")

    def tensors(directory):
        files = directory.glob("*.safetensors")
        return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}

    assert_equals(tensors(tmp_path / "hf"), tensors(source))


def test_dtype_is_for_parameters_and_without_their_prefix_for_all_floats(tmp_path):
    arrays = {"target/w": np.ones(3, np.float32), "state/v": np.ones(3, np.float32), "target/n": np.ones(3, np.int32)}
    ot.convert(checkpoint(arrays), tmp_path / "named", format="safetensors", dtype="bfloat16")
    loaded = safetensors.numpy.load_file(tmp_path / "named" / "model.safetensors")
    assert {name: array.dtype.name for name, array in loaded.items()} == {
        "target/w": "bfloat16",
        "state/v": "float32",
        "target/n": "int32",
    }
    arrays = {"shared.weight": np.ones(3, np.float32), "n": np.ones(3, np.int32)}
    ot.convert(checkpoint(arrays), tmp_path / "all", format="safetensors", dtype="float16")
    loaded = safetensors.numpy.load_file(tmp_path / "all" / "model.safetensors")
    assert {name: array.dtype.name for name, array in loaded.items()} == {"shared.weight": "float16", "n": "int32"}
    with pytest.raises(RestorePlanError, match="int8"):
        ot.convert(checkpoint(arrays), tmp_path / "x", format="safetensors", dtype="int8")


def test_what_cannot_be_stored_is_named_or_left_out(tmp_path):
    source = GOLDENS / "tf_bundle" / "dtype_zoo"
    with pytest.raises(UnsupportedCheckpointError, match="nothing was written") as raised:
        ot.convert(source, tmp_path / "out", format="safetensors")
    report = ot.convert(source, tmp_path / "out", format="safetensors", on_unsupported="skip")
    assert report.skipped and names_in(tmp_path) == ["out"]
    assert any(name in str(raised.value) for name in report.skipped)
    with ot.open_checkpoint(source) as opened:
        expected = {name: view.get() for name, view in opened.leaves.items() if name not in report.skipped}
        types = {opened.leaves[name].dtype.name for name in report.skipped}
    assert types <= {"object", "int4", "uint4", "complex128", "int2", "uint2"} and "object" in types
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert_equals({name: view.get() for name, view in opened.leaves.items()}, expected)


def test_the_name_of_the_metadata_is_no_leaf(tmp_path):
    with pytest.raises(UnsupportedCheckpointError, match="own metadata"):
        ot.convert(checkpoint({"__metadata__": np.ones(2)}), tmp_path / "out", format="safetensors")


def test_only_what_such_a_conversion_writes_is_replaced(tmp_path):
    old, new = checkpoint({"a": np.zeros(3)}), checkpoint({"b": np.ones(3)})
    ot.convert(old, tmp_path / "out", format="safetensors")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(CheckpointIOError, match="overwrite=True"):
        ot.convert(new, tmp_path / "out", format="safetensors")
    ot.convert(new, tmp_path / "out", format="safetensors", overwrite=True)
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointIOError, match="remove it yourself"):
        ot.convert(old, tmp_path / "out", format="safetensors", overwrite=True)
    with pytest.raises(CheckpointIOError, match="remove it yourself"):
        ot.convert(old, tmp_path / "out", overwrite=True)
    assert safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors").keys() == {"b"}


def test_a_failure_leaves_nothing(tmp_path):
    leaves = {f"w{i:03}": np.ones((64, 128)) for i in range(50)}
    leaves["w003"] = FailingLeaf("w003", np.ones((64, 128)), CorruptCheckpointError("damaged", path="/p", leaf="w003"))
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        ot.convert(checkpoint(leaves, AwaitedLeaf), tmp_path / "p" / "out", format="safetensors")
    assert names_in(tmp_path) == []


def test_a_large_leaf_takes_bounded_memory_and_a_full_disk_is_a_typed_error(tmp_path):
    size = 192 * MIB
    header = json.dumps({"w": {"dtype": "U8", "shape": [size // 1024, 1024], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    code = f"""
        import errno, resource, signal, jax, orbax_t5x as ot
        ot.TrainStateHandler()
        jax.devices()
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak()
        source, limit = {str(tmp_path / "big.safetensors")!r}, {16 * MIB}
        ot.convert(source, {str(tmp_path / "out")!r}, format="safetensors", memory_limit_bytes=limit)
        print(peak() - before)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            ot.convert(source, {str(tmp_path / "full")!r}, format="safetensors")
        except ot.errors.CheckpointIOError as error:
            print(errno.errorcode[error.errno])
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=800, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    growth, code = done.stdout.split()
    assert int(growth) < 16 * MIB + 64 * MIB and code == "EFBIG"
    assert names_in(tmp_path) == ["big.safetensors", "out"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > size
