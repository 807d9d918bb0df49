"""NumPy's archives, written by NumPy: stored members by range, compressed ones whole, and what is refused."""

import io
import os
import zipfile

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from tests.support.format_suites import NpzSuite


class TestStored(NpzSuite):
    pass


class TestCompressed(NpzSuite):
    save = staticmethod(np.savez_compressed)


SAVES = [np.savez, np.savez_compressed]
ROWS = np.random.default_rng(4).integers(0, 100, (64, 48)).astype(np.float32)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_eighth_of_an_array(tmp_path, save, order):
    save(tmp_path / "a.npz", w=np.asarray(ROWS, order=order), big=ROWS.astype(">i4"))
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        for name, expected in (("w", ROWS), ("big", ROWS.astype(np.int32))):
            for box in (((8, 16), (0, 48)), ((0, 64), (6, 12))):
                found = read_boxes(leaf_of(checkpoint, name), [box])
                assert_same(found.arrays[0], expected[box[0][0] : box[0][1], box[1][0] : box[1][1]])
                assert found.stats.bytes_read == ROWS.nbytes // 8
        verified = read_boxes(leaf_of(checkpoint, "w")).verified
        assert verified is (True if save is np.savez else None)
    assert {leaf.status for leaf in ot.verify(tmp_path / "a.npz").leaves} == {"ok"}


def test_a_model_of_slashes(tmp_path):
    """As Big Vision and Scenic name their arrays; restored, and converted to Orbax and back."""
    values = {"params/Transformer/encoder/kernel": ROWS, "params/bias": ROWS[0]}
    np.savez(tmp_path / "model.npz", **values)
    with ot.open_checkpoint(tmp_path / "model.npz") as checkpoint:
        assert checkpoint.format == "npz"
        assert list(checkpoint.tree()["params"]) == ["Transformer", "bias"]
    target = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}
    for name, value in ot.restore(tmp_path / "model.npz", target).items():
        assert_same(np.asarray(value), values[name])
    ot.convert(tmp_path / "model.npz", tmp_path / "orbax")
    assert {leaf.status for leaf in ot.diff(tmp_path / "model.npz", tmp_path / "orbax").leaves} == {"equal"}


def test_arrays_that_are_none_of_numbers(tmp_path, monkeypatch):
    class Hostile:
        def __reduce__(self):
            return os.system, ("touch executed",)

    monkeypatch.chdir(tmp_path)
    fields, text = np.zeros(2, [("x", "f4")]), np.array("text")
    np.savez(tmp_path / "a.npz", good=ROWS, bad=np.array([Hostile()], object), fields=fields, text=text)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("readme", b"text")
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        assert_same(checkpoint.leaves["good"].get(), ROWS)
        for name, error in (
            *(("bad", UnsafeCheckpointError), ("fields", UnsupportedCheckpointError)),
            *(("text", UnsupportedCheckpointError), ("readme", UnsupportedCheckpointError)),
        ):
            with pytest.raises(error) as caught:
                checkpoint.leaves[name].get()
            assert caught.value.leaf == name
    assert os.listdir(tmp_path) == ["a.npz"]


def damaged(save, old, new):
    made = io.BytesIO()
    save(made, w=ROWS)
    data = made.getvalue()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        array = archive.read("w.npy").replace(old, new, 1)
    again = io.BytesIO()
    with zipfile.ZipFile(
        again, "w", zipfile.ZIP_DEFLATED if save is np.savez_compressed else zipfile.ZIP_STORED
    ) as file:
        file.writestr("w.npy", array)
    return again.getvalue()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(64, 48), ", b"(64, 49), "),
        (b"(64, 48), }                       ", b"(4611686018427387904, 4611686018), }"[:34]),
        (b"\x93", b"\x94"),
        (b"False", b"exit()"),
        (b"\x76\x00", b"\xff\xff"),
    ],
)
def test_damaged_arrays(tmp_path, save, old, new):
    (tmp_path / "a.npz").write_bytes(damaged(save, old, new))
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint, pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.leaves["w"].get()
    assert (caught.value.leaf, caught.value.path) == ("w", str(tmp_path / "a.npz"))


@pytest.mark.parametrize("save", SAVES)
def test_a_flipped_bit(tmp_path, save):
    save(tmp_path / "a.npz", w=ROWS)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[1000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    assert [leaf.status for leaf in ot.verify(tmp_path / "a.npz").leaves] == ["damaged"]
    with pytest.raises(CorruptCheckpointError, match=r"crc32|decompress"):
        ot.restore(tmp_path / "a.npz", None)


def test_a_bomb(tmp_path):
    """What a member decompresses to is bounded by the limits, and by what it says of itself."""
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(1 << 22, np.uint8))
    assert (tmp_path / "a.npz").stat().st_size < 10_000
    with ot.open_checkpoint(tmp_path / "a.npz", limits=ot.Limits(chunk_bytes=1 << 20)) as checkpoint:
        assert checkpoint.leaves["w"].shape == (1 << 22,)
        with pytest.raises(LimitExceededError, match=r"Limits\.chunk_bytes") as caught:
            checkpoint.leaves["w"][:3].get()
        assert caught.value.leaf == "w"
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        assert not checkpoint.leaves["w"].get().any()


def test_a_file_without_arrays_and_a_file_of_another_name(tmp_path):
    np.savez(tmp_path / "none.npz")
    assert not ot.open_checkpoint(tmp_path / "none.npz").leaves
    np.savez(tmp_path / "a.npz", w=ROWS)
    (tmp_path / "a.npz").rename(tmp_path / "weights")
    with ot.open_checkpoint(tmp_path / "weights") as checkpoint:
        assert checkpoint.format == "npz"
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
        ot.open_checkpoint(tmp_path / "weights", format="torch")
