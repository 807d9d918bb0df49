"""convert: any checkpoint becomes a plain Orbax item, in bounded memory, and nothing half-made is ever seen."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CorruptCheckpointError,
    LimitExceededError,
    RestorePlanError,
    UnsupportedCheckpointError,
)
from orbax_t5x.provenance import records as provenance
from tests.support.conversions import BUNDLES, GOLDENS, assert_equals, flat, names_in, record_of
from tests.support.memory_checkpoint import FailingLeaf, checkpoint
from tests.support.recorded_chains import entries_of
from tests.support.saving import stock

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_are_translated(tmp_path, name):
    """T5X's own importer says what the names and values are."""
    translate = ot.transforms.Translate()
    ot.convert(GOLDENS / "tf_bundle" / name, tmp_path / "out", translate)
    restored = flat(stock(tmp_path / "out"))
    types = json.loads((GOLDENS / "importer" / f"{name}.json").read_text())
    with np.load(GOLDENS / "importer" / f"{name}.npz") as values:
        expected = {leaf: values[leaf] for leaf in values.files}
    # T5X invents these without a state to look at; here they exist only where a target has them.
    expected = {leaf: array for leaf, array in expected.items() if leaf in restored or array.shape != (1,)}
    assert restored.keys() == expected.keys(), types
    for leaf, array in expected.items():
        np.testing.assert_array_equal(np.asarray(restored[leaf], array.dtype), array, err_msg=leaf)
    assert list(provenance.from_metadata(record_of(tmp_path / "out"))) == entries_of([translate])
    # Once is enough: the same chain on what it made changes nothing.
    ot.convert(tmp_path / "out", tmp_path / "again", translate)
    assert flat(stock(tmp_path / "again")).keys() == restored.keys()
    assert record_of(tmp_path / "again") == record_of(tmp_path / "out")


@pytest.mark.slow
def test_safetensors_and_orbax_sources(tmp_path):
    ot.convert(GOLDENS / "safetensors" / "t5_1_1", tmp_path / "hf")
    with ot.open_checkpoint(GOLDENS / "safetensors" / "t5_1_1") as opened:
        expected = {name: view.get() for name, view in opened.leaves.items()}
    assert_equals(flat(stock(tmp_path / "hf")), expected)

    ot.convert(GOLDENS / "t5x_orbax" / "d8_adafactor", tmp_path / "t5x", dtype="bfloat16")
    with np.load(GOLDENS / "t5x_orbax" / "d8_adafactor" / "expected.npz") as values:
        for name, array in flat(stock(tmp_path / "t5x")).items():
            wanted = values[name]
            if name.startswith("target/"):
                assert array.dtype == jnp.bfloat16
                wanted = wanted.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(wanted, np.float32))


def test_several_sources_and_a_function_that_computes(tmp_path):
    def average(state, target, *, is_resuming=False):
        return {"w": ot.stack([state["one"]["w"], state["two"]["w"]], 0), "kept": state["one"]["k"]}

    one = checkpoint({"w": np.arange(6.0).reshape(2, 3), "k": np.ones(1)})
    two = checkpoint({"w": np.zeros((2, 3)), "k": np.ones(1)}, format="tf_bundle")
    ot.convert({"one": one, "two": two}, tmp_path / "out", average)
    restored = stock(tmp_path / "out")
    np.testing.assert_array_equal(restored["w"], np.stack([np.arange(6.0).reshape(2, 3), np.zeros((2, 3))]))
    assert list(provenance.from_metadata(record_of(tmp_path / "out"))) == entries_of([average])


def test_the_report_counts_leaves_and_bytes(tmp_path):
    leaves = {"target/w": np.ones((4, 8), np.float32), "step": np.array(3), "none": np.zeros((0, 2), np.float32)}
    report = ot.convert(checkpoint(leaves), tmp_path / "out", dtype="bfloat16", on_unsupported="skip")
    stored = flat(stock(tmp_path / "out"))
    assert report.leaves == len(stored) == 2
    assert report.bytes == sum(array.nbytes for array in stored.values()) == 4 * 8 * 2 + 8
    assert report.skipped == {"none": ((0, 2), "float32")}
    assert report.destination == str(tmp_path / "out") and report.format == "orbax" and report.seconds > 0
    assert " ".join(str(report).split()).startswith(f"2 leaves (72 B) in {tmp_path}/out, in ")
    assert str(report).endswith("left out, because Orbax cannot store it:\n  none  float32[0,2]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.leaves = 0


def test_an_item_of_a_step_and_limits(tmp_path):
    for item in ("params", "other"):
        ot.convert(checkpoint({item: np.ones(2)}), tmp_path / "step" / item)
    ot.convert(tmp_path / "step", tmp_path / "out", item="other", strict=False)
    assert stock(tmp_path / "out").keys() == {"other"}
    with pytest.raises(LimitExceededError):
        ot.convert(GOLDENS / "tf_bundle" / "t5_1_1_f32", tmp_path / "x", limits=ot.Limits(entries=5))


def test_an_existing_destination_needs_overwrite(tmp_path):
    old, new = checkpoint({"a": np.zeros(3)}), checkpoint({"b": np.ones(3)})
    ot.convert(old, tmp_path / "out")
    with pytest.raises(CheckpointIOError, match="overwrite=True"):
        ot.convert(new, tmp_path / "out")
    assert stock(tmp_path / "out").keys() == {"a"}
    ot.convert(new, tmp_path / "out", overwrite=True)
    assert stock(tmp_path / "out").keys() == {"b"}
    ot.convert(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert stock(tmp_path / "out").keys() == {"b"}
    assert names_in(tmp_path) == ["out"]


def test_parents_are_made_and_taken_back(tmp_path):
    ot.convert(checkpoint({"a": np.zeros(3)}), tmp_path / "x" / "y" / "out")
    assert stock(tmp_path / "x" / "y" / "out").keys() == {"a"}
    broken = checkpoint({"a": FailingLeaf("a", np.zeros(3), CorruptCheckpointError("damaged", path="/p", leaf="a"))})
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        ot.convert(broken, tmp_path / "p" / "q" / "out")
    assert names_in(tmp_path) == ["x"]


def test_usage_errors(tmp_path):
    source = checkpoint({"a": np.zeros(3)})
    with pytest.raises(UnsupportedCheckpointError, match="'orbax' and 'safetensors' are"):
        ot.convert(source, tmp_path / "out", format="msgpack")
    with pytest.raises(ValueError, match="'bar'"):
        ot.convert(source, tmp_path / "out", progress="bars")
    with pytest.raises(UnsupportedCheckpointError, match="http:// is not written; local"):
        ot.convert(source, "http://host/out")
    with pytest.raises(RestorePlanError, match="Cast"):
        ot.convert(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(RestorePlanError):
        ot.convert(source, tmp_path / "out", ot.transforms.Rename([("nothing", "b")]))
    with pytest.raises(ValueError, match="memory_limit_bytes"):
        ot.convert(source, tmp_path / "out", memory_limit_bytes=0)
    with pytest.raises(CheckpointError, match="nowhere"):
        ot.convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(RestorePlanError, match="duplicate"):
        ot.convert(checkpoint({"a/b": np.ones(2), "a.b": np.ones(2)}), tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_url_that_lost_a_slash_is_no_directory(tmp_path, monkeypatch):
    """`pathlib` makes one slash of two."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="pass 'gs://bucket/out' as text"):
        ot.convert(checkpoint({"a": np.zeros(3)}), pathlib.Path("gs://bucket/out"))
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("byte", [100, 3000, -3])
def test_a_damaged_source_leaves_nothing(tmp_path, byte):
    for path in (GOLDENS / "tf_bundle" / "t5_1_1_f32").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = max(tmp_path.glob("*.data-*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[byte] ^= 4
    shard.write_bytes(damaged)
    before = names_in(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="leaf"):
        ot.convert(tmp_path, tmp_path / "out")
    assert names_in(tmp_path) == before


def write_safetensors(path, leaves):
    """A safetensors file; an integer stands for that many bytes of a hole."""
    header, start = {}, 0
    for name, data in leaves.items():
        size = data if isinstance(data, int) else len(data)
        header[name] = {"dtype": "U8", "shape": [size // 1024, 1024], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in leaves.values():
            if isinstance(data, int):
                file.truncate(file.seek(data, os.SEEK_CUR))
            else:
                file.write(data)


def noise(size):
    return np.random.default_rng(0).bytes(size)


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_leaves_larger_than_the_limit_take_bounded_memory(tmp_path):
    """One that is zeros, and one that does not compress: what TensorStore holds of it counts, too."""
    last = noise(128 * MIB)
    write_safetensors(tmp_path / "big.safetensors", {"hole": 256 * MIB, "noise": last})
    limit = 64 * MIB
    process = start(f"""
        import resource, jax, orbax_t5x as ot
        ot.TrainStateHandler()
        jax.devices()
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak()
        ot.convert({str(tmp_path / "big.safetensors")!r}, {str(tmp_path / "out")!r}, memory_limit_bytes={limit})
        print(peak() - before)
    """)
    output, error = process.communicate(timeout=800)
    assert process.returncode == 0, error[-2000:]
    growth = int(output)
    # Beside data on its way: threads and their arenas, compressors, the index.
    assert growth < limit + 64 * MIB, f"{growth / MIB:.0f} MiB under a limit of {limit / MIB:.0f} MiB"
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert opened.leaves["hole"].shape == (MIB // 4, 1024)
        assert not opened.leaves["hole"][-1:].get().any()
        np.testing.assert_array_equal(opened.leaves["noise"].get().reshape(-1), np.frombuffer(last, np.uint8))


@pytest.mark.parametrize("chunks", [1, 10])
def test_an_interrupt_leaves_nothing_behind(tmp_path, chunks):
    write_safetensors(tmp_path / "big.safetensors", {"hole": 8192 * MIB})
    (tmp_path / "out").mkdir()
    process = start(f"""
        import os, signal, sys, threading, orbax_t5x as ot
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits "ignore"
        ot.TrainStateHandler()
        def progress(done, total, leaf):
            os.write(1, b"wrote\\n")
        try:
            ot.convert({str(tmp_path / "big.safetensors")!r}, {str(tmp_path / "out" / "c")!r}, progress=progress)
        except KeyboardInterrupt:
            names = [thread.name for thread in threading.enumerate()]
            print("interrupted", any("write" in name for name in names), flush=True)
    """)
    for _ in range(chunks):
        assert process.stdout.readline() == "wrote\n"
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=800)
    assert output.splitlines()[-1] == "interrupted False", error[-2000:]
    assert names_in(tmp_path / "out") == []


def test_a_full_disk_is_one_typed_error_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk: the system reports it as any other failing write."""
    write_safetensors(tmp_path / "noise.safetensors", {"w": noise(16 * MIB)})
    (tmp_path / "out").mkdir()
    process = start(f"""
        import errno, resource, signal, orbax_t5x as ot
        ot.TrainStateHandler()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            ot.convert({str(tmp_path / "noise.safetensors")!r}, {str(tmp_path / "out" / "c")!r})
        except ot.errors.CheckpointIOError as error:
            print(errno.errorcode[error.errno], error.leaf)
    """)
    output, error = process.communicate(timeout=800)
    assert output.splitlines() == ["EFBIG w"], error[-2000:]
    assert names_in(tmp_path / "out") == []
