"""Names of a PyTorch file's pickle become data; arguments that are none of theirs are refused."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.extras.torch_zip.values import Name, Opaque, OrderedNode, StorageNode, TensorNode
from orbax_t5x.files.limits import Limits
from orbax_t5x.testing.leaf_reads import leaf_of
from tests.support.torch_files import Op, SavedTensor, call, name, opcodes, ordered, pickled


def parsed(data, **limits):
    return parse_pickle(data, SimpleNamespace(path="file", limits=Limits(**limits)))


def test_names_become_data():
    tensor = parsed(pickled(SavedTensor("7", "float32", 6, 1, (2, 2), (2, 1))))
    assert tensor == TensorNode(StorageNode("float32", "7", 6), 1, [2, 2], [2, 1], "float32", None)
    tensor = parsed(pickled(SavedTensor("7", "float8_e5m2", 6, 1, (2,), (1,))))
    assert tensor == TensorNode(StorageNode(None, "7", 6), 1, [2], [1], "float8_e5m2", None)
    parameter = call(
        name("torch._utils", "_rebuild_parameter"), opcodes(SavedTensor("0", "int8", 1, 0, (), ())), True, None
    )
    assert parsed(pickled(parameter)).storage == StorageNode("int8", "0", 1)
    assert parsed(pickled(name("torch", "bfloat16"))) == Name("torch.bfloat16")
    assert parsed(pickled(call(name("torch", "Size"), (2, 3)))) == [2, 3]
    assert parsed(pickled(call(name("torch", "device"), "cuda", 1))) == "cuda:1"
    found = parsed(pickled(ordered({"a": 1})))
    assert type(found) is OrderedNode and found == {"a": 1}


READ = {
    "w": [[0, 1, 2], [3, 4, 5]],
    "complex": 1 + 2j,
    "bytes": b"x\xff",
    "bytearray": b"ab",
    "counter/a": 2,
    "counter/b": 1,
    "layout": b"torch.strided",
    "buffer": [0, 1, 2, 3],
    "parameter": [0, 1],
    "attribute": [0, 1, 2],
    "defaultdict/a/0": 1,
    "keys/named": [1, 1],
}
UNREAD = {
    "set": "'__builtin__.set'",
    "quantized": "a quantized tensor",
    "channels": "a quantized tensor",
    "sparse": "a sparse tensor",
    "csr": "a sparse tensor",
    "nested": "a nested tensor",
    "jagged": "a nested tensor",
    "meta": "a tensor without values",
    "namespace": "'argparse.Namespace'",
    "numpy scalar": "multiarray.scalar'",
    "numpy array": "multiarray._reconstruct'",
    "path": "'pathlib.PurePosixPath'",
    "date": "'datetime.datetime'",
    "range": "'__builtin__.xrange'",
    "keys/<a tuple>": "a key that is a tuple",
    "keys/<a number>": "a key that is a float",
}


def test_what_stands_beside_tensors_is_read_or_listed(goldens):
    """All that torch takes with `weights_only`, and what it refuses: nothing of it is made, and no tensor is lost."""
    path = goldens / "torch" / "neighbours.pt"
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves.keys() == READ.keys() | UNREAD.keys()
        for leaf, value in READ.items():
            assert checkpoint.leaves[leaf].get().tolist() == value, leaf
        for leaf, said in UNREAD.items():
            error = leaf_of(checkpoint, leaf).error
            assert type(error) is UnsupportedCheckpointError and said in str(error) and error.leaf == leaf
    target = {"w": np.zeros((2, 3), np.float32)}
    assert ot.restore(path, target, strict=False)["w"].tolist() == READ["w"]
    kept = ot.restore(path, None, [ot.transforms.Keep(("w", "counter/.*"))])
    assert kept["w"].tolist() == READ["w"] and kept["counter"]["a"] == 2
    with pytest.raises(UnsupportedCheckpointError, match="Drop"):
        ot.restore(path, None)


def test_a_tensor_of_a_class_of_its_own_is_not_taken_for_its_numbers():
    hidden = opcodes(SavedTensor("0", "float32", 2, 0, (2,), (1,)))
    arguments = Op(hidden[hidden.index(b"(", 20) : -1])
    made = call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("bitsandbytes.nn", "Params4bit"),
        arguments,
        {},
    )
    found = parsed(pickled({"plain": hidden, "own": made}))
    assert isinstance(found["plain"], TensorNode)
    assert isinstance(found["own"], Opaque) and "Params4bit" in found["own"].what


@pytest.mark.parametrize(
    "made",
    [
        call(name("torch._utils", "_rebuild_tensor_v2"), 1, 2),
        call(name("torch._utils", "_rebuild_tensor_v2"), "storage", 0, (), (), False, {}),
        call(name("torch._utils", "_rebuild_tensor_v3"), None, 0, (), (), False, {}, name("torch", "Size")),
        call(name("torch._utils", "_rebuild_parameter"), 1, True, {}),
        call(name("torch", "Size"), 3),
        call(name("torch", "device"), 3),
        call(name("torch", "device"), "cuda", 0.5),
        call(name("collections", "OrderedDict"), [1]),
        Op(name("collections", "OrderedDict") + opcodes([]) + b"R"),
    ],
)
def test_arguments_that_do_not_fit(made):
    with pytest.raises(CorruptCheckpointError, match=r"arguments|no tuple"):
        parsed(pickled(made))


def test_what_is_shared_stays_shared():
    one = ["once"]
    found = parsed(pickle.dumps({"a": one, "b": one}, 2))
    assert found["a"] is found["b"]
    one.append(one)
    found = parsed(pickle.dumps(one, 2))
    assert found[1] is found


@pytest.mark.parametrize(
    "data", [b"(" * 900_000, b"]" * 900_000, b"N" + b"q\0" * 900_000, b")" + b"\x85" * 900_000, b"N0" * 900_000]
)
def test_bombs_are_errors(data):
    with pytest.raises(CheckpointError):
        parsed(b"\x80\x02" + data)


def test_limits():
    data = pickled({str(number): (number,) for number in range(100)})
    parsed(data)
    with pytest.raises(LimitExceededError, match=r"Limits\.entries = 10"):
        parsed(data, entries=10)
