"""Tensors whose description does not fit their storage are errors of their leaf; the others are read."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.testing.leaf_reads import leaf_of
from tests.support.torch_files import Op, SavedTensor, archive, call, name, opcodes, pickled, saved_arrays

GOOD = SavedTensor("0", "float32", 6, 0, (2, 3), (3, 1))
STORED = {"0": np.arange(6, dtype=np.float32).tobytes(), "short": bytes(8)}


def save(path, value, **members):
    path.write_bytes(archive(pickled(value), STORED, **members))
    return path


BROKEN = {
    "a negative size": GOOD._replace(shape=(-2, 3)),
    "a negative stride": GOOD._replace(strides=(-3, 1)),
    "a negative offset": GOOD._replace(offset=-1),
    "a size of 2**63": GOOD._replace(shape=(1 << 63,), strides=(1,)),
    "a stride of 2**63": GOOD._replace(strides=(1 << 63, 1)),
    "an offset of 2**63": GOOD._replace(offset=1 << 63),
    "sizes whose product overflows": GOOD._replace(shape=(1 << 31,) * 3, strides=(0, 0, 0)),
    "no numbers": GOOD._replace(shape=(2.0, True), strides=(3, 1)),
    "no tuple": GOOD._replace(shape=7),
    "strides for another rank": GOOD._replace(strides=(1,)),
    "beyond the storage": GOOD._replace(offset=1),
    "beyond the storage by a stride": GOOD._replace(strides=(4, 1)),
    "elements that overlap": GOOD._replace(shape=(3, 3), strides=(1, 1)),
    "no storage": GOOD._replace(key="9"),
    "a storage that is no storage": GOOD._replace(key="../byteorder"),
    "a storage that is too short": GOOD._replace(key="short"),
    "a count of 2**62": GOOD._replace(count=1 << 62),
}


@pytest.mark.parametrize("bad", BROKEN.values(), ids=BROKEN.keys())
def test_descriptions_that_do_not_fit(tmp_path, bad):
    path = save(tmp_path / "model.pt", {"bad": bad, "good": GOOD})
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["good"].get().tolist() == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(CorruptCheckpointError) as caught:
            checkpoint.leaves["bad"].get()
        assert (caught.value.path, caught.value.leaf) == (str(path), "bad")
    assert {leaf.name: leaf.status for leaf in ot.verify(path).leaves} == {"bad": "damaged", "good": "ok"}


def test_too_many_dimensions(tmp_path):
    path = save(tmp_path / "model.pt", {"bad": GOOD._replace(shape=(1,) * 40, strides=(0,) * 40)})
    with ot.open_checkpoint(path) as checkpoint, pytest.raises(LimitExceededError, match="40 dimensions"):
        checkpoint.leaves["bad"].get()


def test_a_tensor_of_petabytes_is_one_number(tmp_path):
    """A stride of 0 takes nothing of the file; the names are listed, a box is read, and the whole is refused."""
    path = save(tmp_path / "model.pt", {"huge": GOOD._replace(shape=(1 << 25, 1 << 25), strides=(0, 0), offset=5)})
    with ot.open_checkpoint(path) as checkpoint:
        huge = checkpoint.leaves["huge"]
        assert huge.shape == (1 << 25, 1 << 25)
        assert huge[7, 5:9].get().tolist() == [5, 5, 5, 5]
        with pytest.raises(LimitExceededError):
            huge.get()


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2"])
def test_types_that_numpy_lacks(tmp_path, dtype):
    stored = Op(opcodes(("storage", name("torch.storage", "UntypedStorage"), "0", "cpu", 24)) + b"Q")
    tensor = call(name("torch._utils", "_rebuild_tensor_v3"), stored, 0, (2,), (1,), False, {}, name("torch", dtype))
    with ot.open_checkpoint(save(tmp_path / "model.pt", {"a": tensor, "b": stored, "n": 1 << 64})) as checkpoint:
        for leaf, said in (("a", dtype), ("b", "storage"), ("n", "64 bits")):
            with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
                checkpoint.leaves[leaf].get()
            assert caught.value.leaf == leaf


@pytest.mark.parametrize("order", [b"little", b"big"])
def test_every_type_in_both_orders(tmp_path, order):
    rng = np.random.default_rng(2)
    names = (
        "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e5m2".split()
    )
    arrays = {kind: (rng.integers(0, 2, (3, 5))).astype(getattr(ml_dtypes, kind, kind)) for kind in names}
    tensors, storages = saved_arrays(arrays)
    if order == b"big":
        storages = {
            tensors[kind].key: arrays[kind].view(f"u{arrays[kind].itemsize}").byteswap().tobytes() for kind in names
        }
    (tmp_path / "model.pt").write_bytes(archive(pickled(tensors), storages, byteorder=order))
    with ot.open_checkpoint(tmp_path / "model.pt") as checkpoint:
        for kind, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.leaves[kind].get(), array)


def test_a_byte_order_that_is_none(tmp_path):
    with pytest.raises(CorruptCheckpointError, match="byteorder"):
        ot.open_checkpoint(save(tmp_path / "model.pt", {"a": GOOD}, byteorder=b"middle"))


def _directed(one, levels, width=31):
    """Opcodes of lists of lists of one object: few bytes name it very often."""
    data, number = one + b"q\x000", 0
    for _ in range(levels):
        data += b"](" + b"h" + bytes([number]) + (b"h" + bytes([number])) * (width - 1) + b"e"
        number += 1
        data += b"q" + bytes([number]) + b"0"
    return data[:-1]


@pytest.mark.parametrize("kind", ["text", "encoded", "object", "number"])
def test_what_is_shared_takes_its_memory_once(tmp_path, kind):
    """29,791 leaves of one object of 200 KB: a copy for each would take 6 GB."""
    text = opcodes("x" * 200_000)
    one = {
        "text": text,
        "encoded": call(name("_codecs", "encode"), "x" * 200_000, "latin1"),
        "object": call(name("builtins", "set"), []),
        "number": b"\x8a\xff" + b"\x7f" * 255,
    }[kind]
    beside = opcodes(GOOD)
    pickle = b"\x80\x02](" + _directed(one, 3) + beside + b"e."
    (tmp_path / "model.pt").write_bytes(archive(pickle, STORED))
    tracemalloc.start()
    with ot.open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert len(checkpoint.leaves) == 31**3 + 1
        leaves = [leaf_of(checkpoint, leaf) for leaf in ("0/0/0/0", "0/30/30/30")]
        if kind in ("text", "encoded"):
            assert {len(checkpoint.leaves[leaf.name].get().item()) for leaf in leaves} == {200_000}
        else:
            assert all(leaf.error.leaf == leaf.name for leaf in leaves)
        taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 128 << 20


def test_one_budget_bounds_names_texts_and_errors(tmp_path):
    path = save(tmp_path / "model.pt", {"a": "x" * 50_000, "b": GOOD})
    for bound in (10_000, 50_000):
        with pytest.raises(LimitExceededError, match="metadata_bytes"):
            ot.open_checkpoint(path, limits=ot.Limits(metadata_bytes=bound))
    with ot.open_checkpoint(path, limits=ot.Limits(metadata_bytes=1 << 17)) as checkpoint:
        assert len(checkpoint.leaves["a"].get().item()) == 50_000


def test_calls_that_copy_what_is_shared_are_bounded(tmp_path):
    """An OrderedDict of 1,000 items, and bytes of a text, made again and again from the same object."""
    items = opcodes([[str(number), number] for number in range(1000)])
    for shared, function in (
        (Op(items), name("collections", "OrderedDict")),
        (opcodes("x" * 100_000), name("_codecs", "encode")),
    ):
        last = opcodes("latin1") if b"encode" in function else b""
        again = b"h\x01" + b"(h\x00" + last + b"tR0"
        pickle = b"\x80\x02" + shared + b"q\x000" + function + b"q\x010" + again * 20_000 + opcodes(GOOD) + b"."
        (tmp_path / "model.pt").write_bytes(archive(pickle, STORED))
        with pytest.raises(LimitExceededError, match=r"more than \d+ objects"):
            ot.open_checkpoint(tmp_path / "model.pt")
