"""PyTorch's files: the goldens that torch wrote, whole and by range, and what is refused with the way out."""

import json
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.lazy.box import box_slices, full_box
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from tests.support.format_suites import TorchIndexSuite, TorchSuite
from tests.support.http_store import serving
from tests.support.torch_files import SavedTensor, archive, kinds, ordered, pickled, save_torch

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
    for name, text in said.items():
        for format in (None, "torch"):
            with pytest.raises(UnsupportedCheckpointError, match=text) as caught:
                ot.open_checkpoint(goldens / "torch" / name, format=format)
            assert caught.value.path == str(goldens / "torch" / name)
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
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "a.bin"}}))
    with pytest.raises(CorruptCheckpointError, match="in no file"):
        ot.open_checkpoint(index)


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
