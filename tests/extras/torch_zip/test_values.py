"""Names of a PyTorch file's pickle become data; arguments that are none of theirs are refused."""

import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.extras.torch_zip.values import Name, OrderedNode, StorageNode, TensorNode
from orbax_t5x.storage.limits import Limits
from tests.support.torch_files import Op, SavedTensor, call, name, opcodes, ordered, pickled


def parsed(data):
    return parse_pickle(data, "file", len(data), Limits())


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
    with pytest.raises(CorruptCheckpointError, match="arguments"):
        parsed(pickled(made))
