"""PyTorch's files: the goldens that torch wrote, whole and by range, and what is refused with the way out."""

import json
import pickle
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.lazy.box import box_slices, full_box
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from tests.support.format_suites import TorchIndexSuite, TorchSuite
from tests.support.http_store import serving
from tests.support.torch_files import (
    Op,
    SavedTensor,
    archive,
    call,
    kinds,
    name,
    opcodes,
    ordered,
    pickled,
    save_torch,
    saved_arrays,
)

TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


class TestOneFile(TorchSuite):
    pass


class TestDirectoryWithIndex(TorchIndexSuite):
    pass


@pytest.mark.parametrize("place", ["", "pytorch_model.bin"])
def test_a_t5_whole(goldens, place):
    with (
        ot.open_checkpoint(goldens / "torch" / "t5_1_1" / place) as checkpoint,
        np.load(goldens / "safetensors" / "t5_1_1_expected.npz") as expected,
    ):
        assert (checkpoint.format, checkpoint.step) == ("torch", None)
        assert set(checkpoint.leaves) == set(expected.files)
        for name, lazy in checkpoint.leaves.items():
            assert_same(lazy.get(), expected[name])
            assert read_boxes(leaf_of(checkpoint, name), None, "touched").verified


@pytest.mark.parametrize("where", ["here", "over http"])
def test_an_eighth_of_each_array(goldens, where):
    """By range: no byte beyond those of the box is read but for gaps below 4 KiB."""
    root = goldens / "torch" / "t5_1_1"
    with serving(root) as store, np.load(goldens / "safetensors" / "t5_1_1_expected.npz") as expected:
        with ot.open_checkpoint(root if where == "here" else store.url) as checkpoint:
            assert len(checkpoint.leaves) == 68
            for name in checkpoint.leaves:
                value = expected[name]
                for axis in range(value.ndim):
                    box = list(full_box(value.shape))
                    box[axis] = (value.shape[axis] // 8, value.shape[axis] // 4)
                    found = read_boxes(leaf_of(checkpoint, name), [tuple(box)])
                    assert_same(found.arrays[0], value[box_slices(tuple(box))])
                    assert found.stats.bytes_read == found.arrays[0].nbytes
                    assert found.stats.bytes_read == value.nbytes // 8 or value.shape[axis] % 8
                    assert found.stats.gap_bytes == 0 if axis == 0 else found.stats.gap_bytes < value.nbytes
                    assert found.verified is False


def test_a_t5_in_several_files(goldens):
    directory = goldens / "torch" / "t5_1_1_bf16"
    for path in (directory, directory / "pytorch_model.bin.index.json"):
        with (
            ot.open_checkpoint(path) as checkpoint,
            np.load(goldens / "safetensors" / "t5_1_1_expected.npz") as expected,
        ):
            assert set(expected.files) - set(checkpoint.leaves) == set(TIED)
            for name, lazy in checkpoint.leaves.items():
                assert_same(lazy.get(), expected[name].astype(ml_dtypes.bfloat16))
            assert len(checkpoint.metadata["files"]) == 2
            assert checkpoint.metadata["index"] == {"total_size": 169664}
    with ot.open_checkpoint(directory / "pytorch_model-00002-of-00002.bin") as checkpoint:
        assert 0 < len(checkpoint.leaves) < 65


@pytest.mark.parametrize("stem", ["kinds", "training"])
def test_every_kind_of_tensor(goldens, stem):
    expected = kinds(goldens, stem)
    with ot.open_checkpoint(next((goldens / "torch").glob(f"{stem}.pt*"))) as checkpoint:
        for name, value in expected.items():
            assert_same(checkpoint.leaves[name].get(), value)
        assert stem == "training" or checkpoint.leaves.keys() == expected.keys()


def test_what_is_no_tensor(goldens):
    with ot.open_checkpoint(goldens / "torch" / "training.pth") as checkpoint:
        tree = checkpoint.tree()
        assert (tree["nothing"], tree["empty"]) == (None, {})
        assert {
            name: lazy.get().item() for name, lazy in tree.items() if name in ("epoch", "best", "done", "seed")
        } == {"epoch": 3, "best": 0.25, "done": False, "seed": 2**63}
        assert tree["name"].get().item() == b"tiny"
        assert tree["optimizer"]["param_groups"]["0"]["betas"]["1"].get().item() == 0.999
        assert [tree["shape"][axis].get().item() for axis in "01"] == [2, 3]
        assert not any("_metadata" in name for name in checkpoint.leaves)


def test_the_other_byte_order(goldens):
    with (
        ot.open_checkpoint(goldens / "torch" / "big.pt") as big,
        ot.open_checkpoint(goldens / "torch" / "little.pt") as little,
    ):
        assert list(big.leaves) == list(little.leaves) == ["c", "w"]
        np.testing.assert_array_equal(little.leaves["w"].get(), np.arange(12, dtype=np.float32).reshape(3, 4).T)
        for name, lazy in little.leaves.items():
            assert_same(big.leaves[name].get(), lazy.get())
    assert {leaf.status for leaf in ot.verify(goldens / "torch" / "big.pt").leaves} == {"ok"}


def test_a_file_without_checksums(goldens):
    path = goldens / "torch" / "without_crc.pt"
    assert {leaf.status for leaf in ot.verify(path).leaves} == {"no checksum"}
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["c"].get().tolist() == [1 + 2j, 3 - 4j]


def test_forms_that_are_refused(goldens, tmp_path):
    said = {"scripted.pt": r"TorchScript[\s\S]*state_dict"}
    for file, text in said.items():
        for format in (None, "torch"):
            with pytest.raises(UnsupportedCheckpointError, match=text) as caught:
                ot.open_checkpoint(goldens / "torch" / file, format=format)
            assert caught.value.path == str(goldens / "torch" / file)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(UnsupportedCheckpointError, match=r"torch\.save did not write[\s\S]*as safetensors"):
        ot.open_checkpoint(tmp_path)
    with ot.open_checkpoint(goldens / "torch" / "conjugated.pt") as checkpoint:
        checkpoint.leaves["w"].get()
        with pytest.raises(UnsupportedCheckpointError, match="resolve_conj") as caught:
            checkpoint.leaves["c"].get()
        assert caught.value.leaf == "c"


@pytest.mark.slow
def test_names_of_hugging_face_go_through_the_same_rules(goldens, tmp_path):
    """A `.bin` becomes T5X's model as the safetensors of the same model do, by the pack and by "auto"."""
    bin_file, files = goldens / "torch" / "t5_1_1", goldens / "safetensors" / "t5_1_1"
    for source in (bin_file, files):
        ot.convert(source, tmp_path / source.parent.name, ot.rules.hf_t5_to_t5x())
    different = [
        leaf.name for leaf in ot.diff(tmp_path / "torch", tmp_path / "safetensors").leaves if leaf.status != "equal"
    ]
    assert different == [], "the head of the .bin is the embedding's storage"
    with ot.open_checkpoint(tmp_path / "safetensors") as checkpoint:
        target = {name: jax.ShapeDtypeStruct(view.shape, view.dtype) for name, view in checkpoint.leaves.items()}
        pack = ot.rules.hf_t5_to_t5x(tie_word_embeddings=True)
        for source, transforms in ((bin_file, [pack]), (goldens / "torch" / "t5_1_1_bf16", "auto")):
            assert ot.plan_restore(source, target, transforms).bytes_to_read
        for name, value in ot.restore(bin_file, target, [pack]).items():
            assert_same(np.asarray(value), checkpoint.leaves[name].get())
    back = tmp_path / "back"
    ot.convert(tmp_path / "torch", back, ot.rules.t5x_to_hf_t5(), format="safetensors")
    found = {leaf.name: leaf.status for leaf in ot.diff(bin_file, back).leaves}
    assert {name for name, status in found.items() if status != "equal"} <= set(TIED)


def test_damage_is_found(goldens, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    data = bytearray((goldens / "torch" / "t5_1_1" / "pytorch_model.bin").read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    (damaged,) = [leaf for leaf in ot.verify(path).leaves if leaf.status != "ok"]
    assert damaged.status == "damaged" and "crc32 " in damaged.reason
    with pytest.raises(CorruptCheckpointError, match="crc32 ") as caught:
        ot.restore(path, None)
    assert caught.value.leaf == damaged.name
    ot.restore(path, None, verify="off")


def test_an_index_that_names_something_else(tmp_path):
    save_torch(tmp_path / "a.bin", {"w": np.ones(2, np.float32)})
    index = tmp_path / "pytorch_model.bin.index.json"
    for file, error in (("../a.bin", UnsafeCheckpointError), ("a.pt", CorruptCheckpointError)):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(error):
            ot.open_checkpoint(tmp_path)


def test_the_trainers_step_and_its_configuration(tmp_path):
    directory = tmp_path / "checkpoint-500"
    directory.mkdir()
    save_torch(directory / "pytorch_model.bin", {"w": np.ones(2, np.float32)})
    (directory / "config.json").write_text('{"d_model": 8}')
    with ot.open_checkpoint(directory) as checkpoint:
        assert (checkpoint.step, checkpoint.metadata["config"]) == (500, {"d_model": 8})


def test_one_tensor_and_a_list(tmp_path):
    tensor = SavedTensor("0", "int16", 6, 1, (2, 2), (2, 1))
    stored = {"0": np.arange(6, dtype=np.int16).tobytes()}
    for value, names in ((tensor, [""]), ([tensor, {"a": tensor}], ["0", "1/a"]), (ordered({"x": tensor}), ["x"])):
        (tmp_path / "model").write_bytes(archive(pickled(value), stored))
        with ot.open_checkpoint(tmp_path / "model") as checkpoint:
            assert list(checkpoint.leaves) == names
            for lazy in checkpoint.leaves.values():
                assert lazy.get().tolist() == [[1, 2], [3, 4]]


def test_two_spellings_of_one_name(tmp_path):
    (tmp_path / "model.pt").write_bytes(archive(pickled({"a": {"b": 1}, "a/b": 2})))
    with pytest.raises(CorruptCheckpointError, match="two leaves"):
        ot.open_checkpoint(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes(archive(pickled({0: 1, "0": 2})))
    with pytest.raises(CorruptCheckpointError, match="twice"):
        ot.open_checkpoint(tmp_path / "model.pt")


def test_a_directory_with_an_adapter_alone(tmp_path):
    save_torch(tmp_path / "adapter_model.bin", {"w": np.arange(3, dtype=np.float32)})
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, [*checkpoint.leaves]) == ("torch", ["w"])


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
        with pytest.raises(LimitExceededError, match=r"Limits\.entries"):
            ot.open_checkpoint(tmp_path / "model.pt")


def test_the_form_before_1_6_is_named_under_any_name(goldens, tmp_path):
    data = (goldens / "torch" / "before_1_6.pt").read_bytes()
    for file in ("weights", "pytorch_model.bin", "a.pt"):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(UnsupportedCheckpointError, match="save it again with torch"):
            ot.open_checkpoint(tmp_path / file)
    # A pickle that is none of torch's.
    (tmp_path / "other").write_bytes(pickle.dumps({"w": 1}, 2))
    with pytest.raises(UnsupportedCheckpointError, match="a pickle"):
        ot.open_checkpoint(tmp_path / "other")
