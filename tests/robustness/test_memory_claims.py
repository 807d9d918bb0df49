"""Arrays that claim more memory than there is, and broken ones, are typed errors that name the leaf."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from tests.support.bundle_writer import bundle_of, entry
from tests.support.hostile_files import huge_chunk, safetensors_of

_TIB = 1 << 40
GOOD = np.arange(6, dtype=np.float32)


def every_way(path: Path, name: str):
    """All ways to ask for a leaf; each is called with nothing."""
    with ot.open_checkpoint(path) as checkpoint:
        view = checkpoint.leaves[name]
        yield view.get
        yield view[...].get
        yield ot.stack([view, view]).get
        if view.ndim:
            yield view[:0].get
    yield lambda: ot.restore(path, None)
    yield lambda: ot.plan_restore(path, None).execute()


BROKEN = {
    "unknown dtype, no element": (entry(9999, (0, 3)), UnsupportedCheckpointError),
    "reference dtype, no element": (entry(101, (0, 3)), UnsupportedCheckpointError),
    "dtype 0, no element": (entry(0, (0, 3)), UnsupportedCheckpointError),
    "size for no element": (entry(1, (0, 3), size=16), CorruptCheckpointError),
    "far shard, no element": (entry(1, (0, 3), shard=9), CorruptCheckpointError),
    "a claim of 12 TiB": (entry(1, (_TIB, 3), size=16), CorruptCheckpointError),
    "zeros and 2**62": (entry(1, (0, 1 << 62)), CorruptCheckpointError),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_leaf_raises_its_error_whatever_shape_it_claims(case, tmp_path):
    value, kind = BROKEN[case]
    bundle = bundle_of({"good": GOOD})
    bundle.entries[b"bad"] = value
    prefix = bundle.write(tmp_path)
    for read in every_way(prefix, "bad"):
        with pytest.raises(kind) as caught:
            read()
        assert caught.value.leaf == "bad" and caught.value.path
    target = {"good": jax.ShapeDtypeStruct(GOOD.shape, GOOD.dtype)}
    assert np.array_equal(ot.restore(prefix, target, strict=False)["good"], GOOD)


@pytest.mark.parametrize("shape", [[0, 1 << 62, 2], [0, (1 << 63) - 1, 4], [1 << 31, 0, 1 << 32]])
def test_shapes_that_cannot_be_counted_are_refused_for_their_leaf(shape, tmp_path):
    bad = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
    good = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    header = json.dumps({"bad": bad, "good": good}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + GOOD.tobytes())
    for read in every_way(path, "bad"):
        with pytest.raises(CorruptCheckpointError, match="more bytes than can be counted") as caught:
            read()
        assert caught.value.leaf == "bad"
    with ot.open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.leaves["good"].get(), GOOD)


def test_a_record_of_a_skipped_leaf_that_cannot_be_counted_is_refused_for_that_leaf(tmp_path):
    skipped = {"bad": {"shape": [0, 1 << 62], "dtype": "float32"}, "empty": {"shape": [0, 3], "dtype": "float32"}}
    metadata: Any = {"orbax_t5x": {"version": 1, "skipped": skipped}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"good": GOOD}, custom_metadata=metadata))
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        assert checkpoint.leaves["empty"].get().shape == (0, 3)
        with pytest.raises(CorruptCheckpointError, match="more bytes than can be counted") as caught:
            checkpoint.leaves["bad"].get()
    assert caught.value.leaf == "bad"


CHUNKED = ("zarr2", "zarr3", "zarr3 shard index", "ocdbt", "t5x")


@pytest.mark.parametrize("kind", CHUNKED)
def test_a_chunk_beyond_the_bound_is_refused_and_its_leaf_listed(kind, tmp_path):
    gib = 1 << 30
    huge_chunk(tmp_path / "step", kind, 10 * gib)
    with ot.open_checkpoint(tmp_path / "step") as checkpoint:
        view = checkpoint.leaves["a"]
        assert view.nbytes in (10 * gib, 10 * gib // 16)
        for read in (view[:1].get, lambda: ot.restore(checkpoint, None)):
            with pytest.raises(LimitExceededError, match=f"takes more than {2 * gib} bytes") as caught:
                read()
            assert caught.value.leaf == "a" and (caught.value.path or "").startswith(str(tmp_path / "step"))


def test_memory_that_the_system_refuses_is_a_limit_that_names_the_leaf(tmp_path, monkeypatch):
    """As under RLIMIT_AS, where the limit is not exceeded by one array alone."""
    path = safetensors_of(tmp_path / "model.safetensors", [4, 1 << 20], 1 << 22)
    empty = np.empty

    def scarce(shape, dtype=float, *more, **named):
        if np.prod(shape) * np.dtype(dtype).itemsize >= 1 << 21:
            raise MemoryError("no such memory")
        return empty(shape, dtype, *more, **named)

    with ot.open_checkpoint(path) as checkpoint:
        view = checkpoint.leaves["a"]
        monkeypatch.setattr(np, "empty", scarce)
        for read in (view.get, lambda: ot.restore(checkpoint, None)):
            with pytest.raises(LimitExceededError, match="no such memory") as caught:
                read()
            assert caught.value.leaf == "a" and caught.value.path == str(path)
        # The result fits, what the cast needs beside it does not.
        narrow = view[0].astype("float64").astype("uint8")
        for read in (narrow.get, lambda: ot.plan_restore({"s": checkpoint}, None, [cast_row]).execute()):
            with pytest.raises(LimitExceededError, match="no such memory") as caught:
                read()
            assert caught.value.leaf and caught.value.path == str(path)


def cast_row(state, target):
    """A transform whose result is small and whose way there is not."""
    return {"s": {"row": state["s"]["a"][0].astype("float64").astype("uint8")}}
