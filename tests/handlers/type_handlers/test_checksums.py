"""Checksums beside what is saved: google_crc32c is the oracle of their values, NumPy of what a restore may return."""

import itertools
import json
import shutil

import google_crc32c
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.handlers.type_handlers.checksums import written_boxes
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.box_sums import BoxSums, array_crc, compare, sums_of
from orbax_t5x.readers.orbax.checksums import CHECKSUMS_FILE, encode_checksums, parse_checksums
from orbax_t5x.storage.limits import Limits
from tests.support.saving import save

LAYOUTS = {
    "ocdbt": {},
    "ocdbt-zarr3": {"use_zarr3": True},
    "zarr2": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


def sharding(*axes):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def values(seed=0):
    """Host values of all kinds; those that become sharded arrays are named so."""
    rng = np.random.default_rng(seed)
    return {
        "sharded": rng.normal(size=(16, 32)).astype(np.float32),
        "replicated": rng.normal(size=(16, 8)).astype(ml_dtypes.bfloat16),
        "nested": {
            "numpy": rng.integers(-9, 9, (5, 7)),
            "big": np.arange(4, dtype=">f4"),
            "bool": np.array([True, False]),
        },
        "four": rng.integers(-8, 8, 16).astype(ml_dtypes.int4),
        "scalar": 7,
        "real": 1.5,
    }


def tree(seed=0):
    made = values(seed)
    made["sharded"] = jax.device_put(made["sharded"], sharding("data", "model"))
    made["replicated"] = jax.device_put(made["replicated"], sharding())
    return {**made, "four": jnp.asarray(made["four"]), "key": jax.random.key(3), "text": "wörds", "none": None}


def restored(path, verify="touched", target=None, **keywords):
    plan = ot.plan_restore(path, target, **keywords)
    return plan.execute(verify=verify), plan.report


def entries(path):
    return json.loads((path / CHECKSUMS_FILE).read_text())["leaves"]


def box_crcs(entry, array):
    """What the boxes of an entry hold by google_crc32c, from the whole array."""
    for edges in entry["boxes"]:
        index = tuple(slice(edges[at], edges[at + 1]) for at in range(0, len(edges), 2))
        yield google_crc32c.value(np.ascontiguousarray(array[index]).tobytes())


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_saved_has_checksums_and_is_verified(tmp_path, options, kind):
    path = save(tmp_path / "item", tree(), options, kind)
    saved = entries(path)
    assert sorted(saved) == sorted(
        ["sharded", "replicated", "nested.numpy", "nested.big", "nested.bool", "four", "scalar", "real", "key", "text"]
    )
    assert len(saved["sharded"]["boxes"]) == 8 and len(saved["replicated"]["boxes"]) == 1
    host = values()
    for key, array in {"sharded": host["sharded"], "replicated": host["replicated"], **host["nested"]}.items():
        entry = saved.get(key) or saved[f"nested.{key}"]
        assert entry["crc32c"] == list(box_crcs(entry, array.astype(array.dtype.newbyteorder("="))))
    _, report = restored(path)
    assert len(report.verified) == len(saved) and report.without_checksum == report.unverified == ()
    with ocp.StandardCheckpointer() as checkpointer:
        stock = checkpointer.restore(path)
    np.testing.assert_array_equal(stock["sharded"], host["sharded"])
    assert not list(path.glob("_CHECKSUMS.process_*"))


def test_a_dtype_of_the_save_is_summed_as_it_is_stored(tmp_path):
    array = np.random.default_rng(0).normal(size=(300, 7)).astype(np.float32)
    array.view(np.uint32)[0] = 0x7F800001 + np.arange(7, dtype=np.uint32)  # NaNs of several bits
    item = {"params": {"host": array, "device": jax.device_put(array, sharding("data")), "row": array[0]}}
    path = save(tmp_path / "item", item, dtype=jnp.bfloat16)
    assert entries(path)["params.host"]["dtype"] == "bfloat16"
    _, report = restored(path)
    assert len(report.verified) == 3


@pytest.mark.parametrize("axes", [(), ("data",), ("model",), (None, "model"), ("data", "model"), (("data", "model"),)])
def test_what_is_written_of_an_array_are_the_shards_that_jax_calls_replica_0(axes):
    array = jax.device_put(np.zeros((16, 32)), sharding(*axes))
    own = {
        shard.device: tuple(side.indices(size)[:2] for side, size in zip(shard.index, array.shape, strict=True))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }
    assert written_boxes(array.sharding, array.shape) == own


def test_a_caller_may_write_over_arrays_at_once(tmp_path):
    array = np.arange(1000.0)
    with ocp.AsyncCheckpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ot.args.TrainStateSave({"a": array}))
        array[:] = -1
    values, report = restored(tmp_path / "item")
    np.testing.assert_array_equal(values["a"], np.arange(1000.0))
    assert report.verified == ("a",)


def test_conversions_sum_what_they_stream(tmp_path):
    first = save(tmp_path / "first", tree())
    ot.convert(first, tmp_path / "second", [ot.transforms.Drop(["text"])], memory_limit_bytes=1 << 20)
    assert set(entries(tmp_path / "second")) == set(entries(first)) - {"text"}
    _, report = restored(tmp_path / "second")
    assert len(report.verified) == len(entries(first)) - 1


def test_checksums_can_be_left_out(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(3)}, {"checksums": False})
    assert not (path / CHECKSUMS_FILE).exists()
    assert restored(path)[1].without_checksum == ("a",)


@pytest.mark.parametrize("axes", [("data",), (None, "model"), (None, ("data", "model")), ("model", "data")])
def test_any_sharding_that_reads_a_whole_leaf_verifies_it(tmp_path, axes):
    path = save(tmp_path / "item", tree())
    target = {"sharded": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharding(*axes))}
    found, report = restored(path, target=target, strict=False)
    np.testing.assert_array_equal(found["sharded"], values()["sharded"])
    assert report.verified == ("sharded",)


def test_a_part_is_unverified_until_the_rest_is_read(tmp_path):
    path = save(tmp_path / "item", {"a": values()["sharded"]})
    some = {"transforms": [ot.transforms.Slice("a", np.s_[3:7, 2:30])], "is_resuming": False}
    _, report = restored(path, **some)
    assert (report.verified, report.unverified) == ((), ("a",))
    _, report = restored(path, "full", **some)
    assert (report.verified, report.unverified) == (("a",), ())
    _, report = restored(path, "off", **some)
    assert report.verified == report.unverified == ()


# -- damage


def flipped(path, rng, work):
    """A copy of an item with one bit flipped in a file of its data, and that file."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(path, work)
    files = sorted(file for file in work.rglob("*") if file.is_file() and is_data(file.relative_to(work)))
    sizes = np.array([file.stat().st_size for file in files])
    file = files[rng.choice(len(files), p=sizes / sizes.sum())]
    data = bytearray(file.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)
    return file


def is_data(file):
    return file.name in {"manifest.ocdbt", "_strings.json", CHECKSUMS_FILE} or len(file.parts) > 1


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_no_flipped_bit_gives_another_value(tmp_path, options):
    """Damage is found, or it changed no value: 100 flips of each layout; a run of 10,000 found none either."""
    host = {"a": np.random.default_rng(1).normal(size=(64, 24)).astype(np.float32), "b": np.arange(40, dtype=np.int16)}
    path = save(tmp_path / "item", host, options)
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(100):
        file = flipped(path, rng, tmp_path / "flipped")
        try:
            found, _ = restored(tmp_path / "flipped")
        except CheckpointError:
            refused += 1
        else:
            assert same(found, host), file
    assert refused > 50


def test_damage_names_the_leaf_and_both_checksums(tmp_path):
    path = save(
        tmp_path / "item", {"a": np.zeros(100), "b": np.ones(5)}, {"use_ocdbt": False, "use_compression": False}
    )
    (chunk,) = [file for file in (path / "a").iterdir() if file.name == "0"]
    data = bytearray(chunk.read_bytes())
    data[17] ^= 4
    chunk.write_bytes(data)
    array = np.frombuffer(bytes(data), np.float64)
    stored, found = google_crc32c.value(bytes(800)), google_crc32c.value(array.tobytes())
    with pytest.raises(CorruptCheckpointError, match=rf"crc32c {found:#010x}, stored is {stored:#010x}") as caught:
        restored(path)
    assert (caught.value.leaf, caught.value.path) == ("a", str(path))
    np.testing.assert_array_equal(restored(path, "off")[0]["a"], array)
    with ot.open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(np.asarray(checkpoint.leaves["b"]), 1)
        with pytest.raises(CorruptCheckpointError):
            np.asarray(checkpoint.leaves["a"])


# -- the file of checksums


def test_checksums_of_another_tree_are_an_error_that_names_both(tmp_path):
    path = save(tmp_path / "item", {"mine": np.ones(3), "both": np.ones(3)})
    other = save(tmp_path / "other", {"theirs": np.ones(3), "both": np.ones(3)})
    shutil.copy(other / CHECKSUMS_FILE, path)
    with pytest.raises(
        CorruptCheckpointError, match=r"another tree: they name 'theirs'.*; the item has 'mine'"
    ) as caught:
        restored(path)
    assert caught.value.path == str(path / CHECKSUMS_FILE)
    np.testing.assert_array_equal(restored(path, "off")[0]["mine"], 1)


def test_checksums_of_another_shape_or_dtype_are_an_error_that_names_both(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones((2, 3), np.float32)})
    other = save(tmp_path / "other", {"a": np.ones((3, 2), np.int32)})
    shutil.copy(other / CHECKSUMS_FILE, path)
    with pytest.raises(CorruptCheckpointError, match=r"int32\[3, 2\].*float32\[2, 3\]"):
        restored(path)


def test_a_leaf_that_was_added_later_has_no_checksum(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(3), "b": np.ones(3)})
    sums = parse_checksums((path / CHECKSUMS_FILE).read_bytes(), "", Limits())
    (path / CHECKSUMS_FILE).write_bytes(encode_checksums({"a": sums["a"]}))
    _, report = restored(path)
    assert (report.verified, report.without_checksum) == (("a",), ("b",))


def sealed(**leaf):
    """A file with one leaf, changed, whose own checksum holds."""
    entry = {"shape": [4], "dtype": "float32", "boxes": [[0, 2], [2, 4]], "crc32c": [1, 2], **leaf}
    return sealed_file({"a": entry})


def sealed_file(leaves, **change):
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return json.dumps({"version": 1, "leaves": leaves, "crc32c": google_crc32c.value(text.encode()), **change}).encode()


HOSTILE = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "a key twice": b'{"version":1,"version":1,"leaves":{},"crc32c":0}',
    "deep": b"[" * 100_000,
    "no leaves": b'{"version":1,"crc32c":0}',
    "leaves are a list": sealed_file([]),
    "its own checksum": sealed_file({}, crc32c=5),
    "its own checksum is text": sealed_file({}, crc32c="5"),
    "version 0": sealed_file({}, version=0),
    "version true": sealed_file({}, version=True),
    "another key": sealed_file({}, more=1),
    "an entry is a list": sealed_file({"a": []}),
    "more in an entry": sealed(more=1),
    "negative shape": sealed(shape=[-4]),
    "shape of floats": sealed(shape=[4.0]),
    "shape of booleans": sealed(shape=[True]),
    "endless rank": sealed(shape=[1] * 40, boxes=[[0, 1] * 40], crc32c=[1]),
    "dtype of objects": sealed(dtype="object"),
    "dtype is a list": sealed(dtype=["f4"]),
    "dtype of records": sealed(dtype="f4,f4"),
    "no dtype": sealed(dtype="floaty"),
    "string with a shape": sealed(dtype="string"),
    "no boxes": sealed(boxes=[], crc32c=[]),
    "a hole": sealed(boxes=[[0, 2], [3, 4]]),
    "an overlap": sealed(boxes=[[0, 3], [2, 4]]),
    "a box outside": sealed(boxes=[[0, 2], [2, 5]]),
    "a box backwards": sealed(boxes=[[2, 0], [2, 4]]),
    "an empty box": sealed(boxes=[[0, 4], [4, 4]]),
    "half a side": sealed(boxes=[[0, 2], [2]]),
    "too few checksums": sealed(crc32c=[1]),
    "too large a checksum": sealed(crc32c=[1, 1 << 32]),
    "a checksum of text": sealed(crc32c=[1, "2"]),
    "a grid too fine": sealed(
        shape=[1 << 40, 1 << 40],
        boxes=[[at, at + 1, at, at + 1] for at in range(5000)],
        crc32c=[0] * 5000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_of_checksums_is_a_typed_error_and_never_ok(tmp_path, data):
    path = save(tmp_path / "item", {"a": np.ones(4, np.float32)})
    (path / CHECKSUMS_FILE).write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        restored(path)
    assert caught.value.path == str(path / CHECKSUMS_FILE)
    np.testing.assert_array_equal(restored(path, "off")[0]["a"], 1)


def test_a_later_version_is_unsupported():
    with pytest.raises(UnsupportedCheckpointError, match="version is 2"):
        parse_checksums(sealed_file({}, version=2), "file", Limits())


# -- sums of boxes


@st.composite
def grids(draw):
    """A shape, and boxes that tile it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(itertools.pairwise(marks)) for marks in cuts]
    return tuple(shape), tuple(itertools.product(*sides))


@hypothesis.given(grid=grids(), data=st.data(), dtype=st.sampled_from(["float32", "int4", "uint8", "complex64"]))
def test_reads_that_tile_an_array_verify_its_boxes_and_find_any_change(grid, data, dtype):
    shape, boxes = grid
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    cut = [tuple(slice(*side) for side in box) for box in boxes]
    mask = 15 if dtype == "int4" else 255
    crcs = [google_crc32c.value(bytes(byte & mask for byte in array[index].tobytes())) for index in cut]
    sums = BoxSums(shape, dtype, boxes, tuple(crcs))
    assert [array_crc(array[index]) for index in cut] == crcs
    marks = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(itertools.pairwise(edges)) for edges in marks]
    reads = [Request(box, array[tuple(slice(*side) for side in box)].copy()) for box in itertools.product(*sides)]
    # As one process reads them, and as several processes read one each.
    for parts in (list(sums_of(reads, sums)), [part for read in reads for part in sums_of([read], sums)]):
        assert compare(parts, sums) == ([], None)
        assert compare(parts[1:], sums).uncovered or len(parts) > len(boxes)
    spoiled = data.draw(st.sampled_from(reads))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in spoiled.out.shape)
    spoiled.out[place] = np.asarray(spoiled.out[place] + np.asarray(1, dtype)).astype(dtype)
    assert compare(list(sums_of(reads, sums)), sums).mismatch is not None
