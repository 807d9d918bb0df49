"""Opening a native T5X step: what is known without opening arrays, and when TensorStore is asked."""

import gzip
import json
import math
import os
from pathlib import Path

import flax.serialization
import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.readers.array_kind import ArrayKind
from orbax_t5x.readers.t5x import open as open_module
from orbax_t5x.readers.t5x.specs import as_bfloat16, parse_zarr_metadata
from tests.support.t5x_steps import GOOD, array, broken, link, save, spec

DTYPES = [np.dtype(kind) for kind in ("bool", "int8", "uint16", "int64", "float16", "float32", "complex64")]


def zarray(shape, chunks, dtype="<f4", **changes):
    """`.zarray` as TensorStore writes it."""
    said = {"chunks": list(chunks), "compressor": {"id": "gzip", "level": 1}, "dtype": dtype, "fill_value": None}
    said |= {"filters": None, "order": "C", "shape": list(shape), "zarr_format": 2}
    return json.dumps(said | changes)


def step_of(tmp_path, documents):
    """A step whose arrays have metadata and no chunks."""
    specs = {}
    for name, document in documents.items():
        (tmp_path / "checkpoint_1" / name).mkdir(parents=True)
        (tmp_path / "checkpoint_1" / name / ".zarray").write_text(document)
        kvstore = {"driver": "file", "path": f"{name}/"}
        specs[name] = {"driver": "zarr", "kvstore": kvstore, "metadata": {}}
    tree = {"version": 3, "optimizer": specs}
    (tmp_path / "checkpoint_1" / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return tmp_path / "checkpoint_1"


@pytest.fixture
def openings(monkeypatch):
    """The specs with which the reader has TensorStore open arrays."""
    seen = []

    opened = ts.open

    def counting(spec, **keywords):
        seen.append(spec)
        return opened(spec, **keywords)

    monkeypatch.setattr(ts, "open", counting)
    return seen


@given(st.data(), st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, max_side=40))
def test_the_layout_is_what_tensorstore_says(data, dtype, shape):
    chunks = data.draw(st.tuples(*[st.integers(1, 50)] * len(shape)))
    order = data.draw(st.sampled_from(["C", "F"]))
    is_bfloat16 = dtype == np.uint16 and data.draw(st.booleans())
    document = zarray(shape, chunks, dtype.str, order=order)
    metadata = parse_zarr_metadata(document.encode(), "file", ot.Limits())
    metadata = as_bfloat16(metadata) if is_bfloat16 else metadata
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    opened = ts.open(spec, open=True, assume_metadata=True).result()
    data = json.dumps(metadata).encode()
    kind = ArrayKind(data, zarr3=False, absent_is_fill=False, context=ts.Context())
    assert kind.shape == tuple(opened.shape) == tuple(metadata["shape"])
    assert kind.chunk == kind.shard == tuple(opened.chunk_layout.read_chunk.shape or ()) == tuple(metadata["chunks"])
    assert kind.dtype == (ml_dtypes.bfloat16 if is_bfloat16 else dtype)


def test_small_arrays_are_opened_once_for_each_metadata(tmp_path, openings):
    shapes = {f"layer_{number}": (4, (3, 5, 7)[number % 3]) for number in range(6)}
    values = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    step = step_of(tmp_path, {name: zarray(value.shape, (2, 3)) for name, value in values.items()})
    for name, value in values.items():
        spec = {"driver": "zarr", "kvstore": f"file://{step}/{name}/"}
        ts.open(spec, open=True).result().write(value).result()
    openings.clear()
    with ot.open_checkpoint(step) as checkpoint:
        assert len(openings) == 3
        assert {name: leaf.shape for name, leaf in checkpoint.leaves.items()} == {k: v.shape for k, v in values.items()}
        for _ in range(2):
            for name, value in values.items():
                np.testing.assert_array_equal(checkpoint.leaves[name][1:].get(), value[1:])
    assert len(openings) == 3


def test_metadata_of_the_same_bytes_are_parsed_once_and_damage_is_each_leafs_own(tmp_path, monkeypatch):
    parsed = []

    def counting(data, path, limits):
        parsed.append(Path(path).parent.name)
        return parse_zarr_metadata(data, path, limits)

    monkeypatch.setattr(open_module, "parse_zarr_metadata", counting)
    good, other, bad = zarray((4, 3), (2, 3)), zarray((4, 5), (2, 5)), zarray((4, 3), (2, 0))
    documents = {"a": good, "b": bad, "c": good, "d": bad, "e": other, "f": good}
    with ot.open_checkpoint(step_of(tmp_path, documents)) as checkpoint:
        shapes = {name: checkpoint.leaves[name].shape for name in "acef"}
        assert shapes == {"a": (4, 3), "c": (4, 3), "e": (4, 5), "f": (4, 3)}
        errors = [checkpoint.leaves[name].leaves()[0].error for name in "bd"]
    assert [(error.leaf, Path(error.path).parent.name) for error in errors] == [("b", "b"), ("d", "d")]
    assert parsed == ["a", "b", "d", "e"]


@pytest.mark.parametrize(
    "changes",
    [{"compressor": {"id": "gzip", "level": 77}}, {"dtype": "<i4", "fill_value": 1.5}, {"fill_value": True}],
    ids=["level", "fill", "fill_bool"],
)
def test_what_tensorstore_refuses_is_known_before_reading(tmp_path, changes):
    metadata = json.loads(zarray((4, 3), (2, 3))) | changes
    with pytest.raises(ValueError):
        ts.open({"driver": "zarr", "kvstore": "memory://", "metadata": metadata}, create=True).result()
    step = step_of(tmp_path, {"a_good": zarray((4, 3), (2, 3)), "bad": json.dumps(metadata)})
    with ot.open_checkpoint(step) as checkpoint:
        (leaf,) = checkpoint.leaves["bad"].leaves()
        assert isinstance(leaf.error, (CorruptCheckpointError, UnsupportedCheckpointError))
        (good,) = checkpoint.leaves["a_good"].leaves()
        assert good.error is None


def test_sizes_that_tensorstore_cannot_count_are_known_before_reading(tmp_path):
    sizes = {"a": 7, "just": (1 << 62) - 1, "too_many": (1 << 63) - 1}
    documents = {name: zarray((size,), (min(size, 1 << 20),), "|u1") for name, size in sizes.items()}
    with ot.open_checkpoint(step_of(tmp_path, documents)) as checkpoint:
        errors = {name: view.leaves()[0].error for name, view in checkpoint.leaves.items()}
    refused = {}
    for name, document in documents.items():
        metadata = {**json.loads(document)}
        try:
            ts.open({"driver": "zarr", "kvstore": "memory://", "metadata": metadata}, create=True).result()
        except ValueError:
            refused[name] = True
    assert {name for name, error in errors.items() if error is not None} >= refused.keys()
    assert errors["a"] is None and refused


def test_metadata_behind_a_link_inside_the_step_are_read(tmp_path):
    step = step_of(tmp_path, {"a": zarray((4, 3), (2, 3)), "b": zarray((5, 3), (2, 3))})
    (step / "a" / ".zarray").rename(step / "kept")
    (step / "a" / ".zarray").symlink_to("../kept")
    (step / "b").rename(step / "elsewhere")
    (step / "b").symlink_to("elsewhere")
    with ot.open_checkpoint(step) as checkpoint:
        assert [math.prod(leaf.shape) for leaf in checkpoint.leaves.values()] == [12, 15]


def test_a_state_in_the_cache_of_the_hub_has_its_arrays_beside_its_link(tmp_path):
    """The bytes of the file itself are a blob, beside which there are no arrays; another link is followed."""
    step = step_of(tmp_path / "models--org--name" / "snapshots" / ("c" * 40), {"a": zarray((4, 3), (2, 3))})
    blob = tmp_path / "models--org--name" / "blobs" / ("b" * 64)
    (tmp_path / "link").symlink_to(step / "checkpoint")
    for path in (tmp_path / "link", step / "checkpoint"):
        with ot.open_checkpoint(path) as checkpoint:
            assert checkpoint.leaves["a"].leaves()[0].error is None
    blob.parent.mkdir()
    (step / "checkpoint").rename(blob)
    (step / "checkpoint").symlink_to(f"../../../blobs/{blob.name}")
    with ot.open_checkpoint(step / "checkpoint") as checkpoint:
        assert (checkpoint.step, checkpoint.leaves["a"].leaves()[0].error) == (1, None)


@pytest.mark.parametrize(
    ("place", "target"), [("bad", "../outside"), ("bad/.zarray", "../../outside/.zarray"), ("bad/0.0", "../../secret")]
)
def test_links_out_of_the_checkpoint(step, place, target):
    save(step, spec())
    link(step / place, target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad", "bad/.zarray", "bad/0.0"])
def test_dangling_links(step, place):
    save(step, spec())
    link(step / place, "nowhere")
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("target", ["../../secret", "../../../secret"])
def test_a_link_below_a_directory_of_chunks(step, target):
    array(step / "deep", dimension_separator="/")
    save(step, spec("deep/"))
    link(step / "deep" / "0" / "0", target + "" if target.count("..") == 3 else "../" + target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad/.zarray", "bad/0.0", "bad/0/0"])
def test_pipes(step, place):
    save(step, spec())
    path = step / place
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    broken(step, CorruptCheckpointError, "not a regular file|FIFO")


def test_a_pipe_or_a_directory_in_place_of_the_array(step):
    save(step, spec())
    for file in (step / "bad").iterdir():
        file.unlink()
    broken(step, CorruptCheckpointError, "missing")
    (step / "bad" / ".zarray").mkdir()
    broken(step, CorruptCheckpointError, "directory")
    (step / "bad" / ".zarray").rmdir()
    (step / "bad").rmdir()
    broken(step, CorruptCheckpointError, "missing")
    os.mkfifo(step / "bad")
    broken(step, CorruptCheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["short", "long", "flipped", "cut", "bomb", "empty", "gone"])
def test_chunks(step, damage):
    save(step, spec())
    path = step / "bad" / "0.0"
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-6] ^= 1  # of the crc
    new = {
        "short": gzip.compress(GOOD.tobytes()[:-1]),
        "long": gzip.compress(GOOD.tobytes() + b"\0"),
        "flipped": bytes(flipped),
        "cut": data[: len(data) // 2],
        "bomb": gzip.compress(bytes(1 << 28), 1),
        "empty": b"",
    }
    path.unlink()
    if damage in new:
        path.write_bytes(new[damage])
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_uint16_is_bfloat16_in_old_versions_alone(step, version):
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    said = {"shape": [2, 3], "chunks": [2, 3], "dtype": "<u2", "compressor": None}
    place = {"driver": "file", "path": f"{step}/words/"}
    ts.open({"driver": "zarr", "kvstore": place, "metadata": said}, create=True).result().write(bits).result()
    leaves = {"bad": spec("words/", dtype="uint16"), "good": spec("good/")}
    tree = {"version": version, "optimizer": leaves} if version else {"target": leaves}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    if version == 3:
        broken(step, UnsupportedCheckpointError, "uint16")
        return
    with ot.open_checkpoint(step) as checkpoint:
        lazy = checkpoint.leaves["bad" if version else "target/bad"]
        assert lazy.dtype.name == "bfloat16"
        assert lazy.get().tobytes() == bits.tobytes()


def test_two_leaves_in_one_directory(step):
    for place in ("bad/", "./bad", "bad//"):
        save(step, spec(), another=spec(place))
        with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
            ot.open_checkpoint(step)
    (step / "also").symlink_to("bad")
    save(step, spec(), another=spec("also"))
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(step)
