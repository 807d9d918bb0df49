"""PyTorch's form before 1.6: torch's own files by value and by range, and damaged ones as typed errors."""

import pickle

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from tests.support.http_store import serving
from tests.support.torch_files import Op, SavedTensor, call, kinds, name, opcodes, pickled, sequential

WHOLE = SavedTensor("7", "float32", 6, 0, (2, 3), (3, 1))
PART = SavedTensor("7", "float32", 6, 1, (2,), (3,))
OTHER = SavedTensor("9", "int16", 2, 0, (2,), (1,))
STORED = {"7": (6, np.arange(6, dtype=np.float32).tobytes()), "9": (2, np.array([5, -6], np.int16).tobytes())}
TREE = {"a": WHOLE, "b": {"c": PART, "d": OTHER}, "epoch": 3}


def save(path, tree=TREE, storages=STORED, **options):
    path.write_bytes(sequential(pickled(tree), storages, **options))
    return path


@pytest.mark.parametrize("where", ["here", "over http"])
def test_the_values_are_those_that_torch_loads(goldens, where):
    expected = kinds(goldens, "kinds")
    with serving(goldens / "torch") as store:
        path = goldens / "torch" / "sequential.pt" if where == "here" else f"{store.url}/sequential.pt"
        with ot.open_checkpoint(path) as checkpoint:
            assert checkpoint.format == "torch" and checkpoint.leaves["epoch"].get() == 3
            assert "argparse.Namespace" in str(leaf_of(checkpoint, "args").error)
            names = [leaf for leaf in checkpoint.leaves if leaf in expected]
            assert len(names) == 27
            for leaf in names:
                assert_same(checkpoint.leaves[leaf].get(), expected[leaf])


def test_the_form_is_told_by_its_first_bytes_and_any_name(goldens, tmp_path):
    data = (goldens / "torch" / "before_1_6.pt").read_bytes()
    with ot.open_checkpoint(goldens / "torch" / "little.pt") as new:
        for file in ("weights", "pytorch_model.bin", "a.pt"):
            (tmp_path / file).write_bytes(data)
            with ot.open_checkpoint(tmp_path / file) as old:
                assert old.leaves.keys() == new.leaves.keys()
                for leaf, value in new.leaves.items():
                    assert_same(old.leaves[leaf].get(), value.get())
    # A pickle that is none of torch's.
    (tmp_path / "other").write_bytes(pickle.dumps({"w": 1}, 2))
    with pytest.raises(UnsupportedCheckpointError, match="a pickle"):
        ot.open_checkpoint(tmp_path / "other")


def test_a_box_reads_its_own_bytes(tmp_path):
    rows = np.arange(1 << 18, dtype=np.float32).reshape(256, 1024)
    big = SavedTensor("0", "float32", rows.size, 0, rows.shape, (1024, 1))
    path = save(tmp_path / "m.bin", {"w": big, "text": "x" * (1 << 21)}, {"0": (rows.size, rows.tobytes())})
    with ot.open_checkpoint(path) as checkpoint:
        found = read_boxes(leaf_of(checkpoint, "w"), [((8, 16), (0, 1024))])
        assert_same(found.arrays[0], rows[8:16])
        assert found.stats.bytes_read == 8 * 4096 and found.stats.gap_bytes == 0
    with pytest.raises(LimitExceededError, match="index_bytes"):
        ot.open_checkpoint(path, limits=ot.Limits(index_bytes=1 << 20))
    assert {leaf.status for leaf in ot.verify(path).leaves} <= {"no checksum", "ok"}


def test_files_of_python_2_and_older_rebuilders(tmp_path):
    """An OrderedDict's items were arguments, its texts bytes; tensors had no gradient."""

    def text(value):
        return Op(b"U" + bytes([len(value)]) + value.encode())

    storage = Op(opcodes(("storage", name("torch", "FloatStorage"), text("7"), text("cpu"), 6, None)) + b"Q")
    tensor = call(name("torch._utils", "_rebuild_tensor"), storage, 0, (2, 3), (3, 1))
    tree = call(name("collections", "OrderedDict"), [[text("w"), tensor]])
    with ot.open_checkpoint(save(tmp_path / "m.pt", tree, {"7": STORED["7"]})) as checkpoint:
        assert checkpoint.leaves["w"].get().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_part_of_a_storage_is_listed_and_the_rest_is_read(tmp_path):
    part = Op(opcodes(("storage", name("torch", "FloatStorage"), "7", "cpu", 6, ("8", 1, 2))) + b"Q")
    tensor = call(name("torch._utils", "_rebuild_tensor_v2"), part, 0, (2,), (1,), False, {})
    with ot.open_checkpoint(save(tmp_path / "m.pt", {"part": tensor, "d": OTHER})) as checkpoint:
        assert checkpoint.leaves["d"].get().tolist() == [5, -6]
        assert "a part of a storage" in str(leaf_of(checkpoint, "part").error)


def test_every_cut_is_a_typed_error(tmp_path):
    data = sequential(pickled(TREE), STORED)
    for end in range(len(data)):
        (tmp_path / "m.pt").write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(tmp_path / "m.pt", format="torch")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"keys": ["7"]}, CorruptCheckpointError, "list of storages"),
        ({"keys": ["7", "9", "9"]}, CorruptCheckpointError, "list of storages"),
        ({"keys": "79"}, CorruptCheckpointError, "list of storages"),
        ({"version": 1002}, UnsupportedCheckpointError, "1001"),
        ({"tree": {"a": WHOLE._replace(count=1 << 62), "d": OTHER}}, CorruptCheckpointError, "it was cut"),
        ({"tree": {"a": WHOLE, "b": WHOLE._replace(count=5), "d": OTHER}}, CorruptCheckpointError, "two types"),
        ({"tree": {"a": call(name("os", "system"), "touch executed")}}, UnsafeCheckpointError, "os.system"),
    ],
)
def test_what_contradicts_itself_is_a_typed_error(tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        ot.open_checkpoint(save(tmp_path / "m.pt", **options))
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt"]


def test_a_count_that_is_not_the_tensors_is_an_error_of_the_leaf(tmp_path):
    path = save(tmp_path / "m.pt", storages={"7": (5, STORED["7"][1]), "9": STORED["9"]})
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["b/d"].get().tolist() == [5, -6]
        with pytest.raises(CorruptCheckpointError, match="has 5 elements") as caught:
            checkpoint.leaves["a"].get()
        assert caught.value.leaf == "a"
