"""Checksums beside what is saved: google_crc32c is the oracle of their values, NumPy of what a restore may return."""

import json
import shutil

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.handlers.type_handlers.checksums import written_boxes
from orbax_t5x.readers.orbax.metadata import CHECKSUMS_FILE
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- sums of boxes
