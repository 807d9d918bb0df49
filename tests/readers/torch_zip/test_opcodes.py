"""The pickle of a PyTorch file: what is data is read as Python's own unpickler reads it, and nothing else is done."""

import io
import os
import pickle
import random

import pytest

from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.readers.torch_zip.opcodes import Name, OrderedNode, StorageNode, TensorNode, Tuple, parse
from orbax_t5x.storage.limits import Limits
from tests.support.hostile_pickles import hostile_pickle
from tests.support.torch_files import Op, SavedTensor, call, name, opcodes, ordered, pickled

PICKLES = 500


def parsed(data, **limits):
    return parse(data, "file", len(data), Limits(**limits))


def plain(node):
    """A tree with tuples for tuples."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return (
        type(node)(map(plain, node)) if type(node) is list else tuple(map(plain, node)) if type(node) is Tuple else node
    )


VALUES = {
    "a": [1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**200), True, False, None],
    "b": (0.5, -1e300, "", "text", "é😀", "x" * 300, b"", b"bytes" * 100),
    "c": {"d": {}, "e": [], "f": (), "g": (1,), "h": (1, 2), "i": (1, 2, 3), "j": (1, 2, 3, 4)},
    "k": [{"l": list(range(3000))}, {str(number): number for number in range(3000)}],
}


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("write", [pickle.dumps, lambda value, protocol: _with_pure_python(value, protocol)])
def test_data_are_read_as_python_reads_them(protocol, write):
    data = write(VALUES, protocol)
    assert plain(parsed(data)) == VALUES == pickle.loads(data)


def _with_pure_python(value, protocol):
    made = io.BytesIO()
    pickle._Pickler(made, protocol).dump(value)
    return made.getvalue()


def test_what_is_shared_stays_shared():
    one = ["once"]
    found = parsed(pickle.dumps({"a": one, "b": one}, 2))
    assert found["a"] is found["b"]
    one.append(one)
    found = parsed(pickle.dumps(one, 2))
    assert found[1] is found


def test_numbers_are_keys():
    assert parsed(pickle.dumps({0: "a", -3: "b", "c": 1}, 2)) == {"0": "a", "-3": "b", "c": 1}
    for keys in ({1.5: 0}, {None: 0}, {(1,): 0}, {True: 0}):
        with pytest.raises(CheckpointError, match=r"a key is a"):
            parsed(pickle.dumps(keys, 2))


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


def test_hostile_pickles(tmp_path, monkeypatch):
    """None is executed, none hangs, and what would call something is refused by its name."""
    monkeypatch.chdir(tmp_path)
    for seed in range(PICKLES):
        made = hostile_pickle(seed)
        try:
            parsed(made.data)
            assert not made.calls, seed
        except CheckpointError as error:
            assert type(error) is UnsafeCheckpointError or not made.calls, seed
            assert error.path == "file" and len(str(error)) < 1000
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [("os", "system", "'os.system'"), ("builtins", "eval", "'builtins.eval'"), ("torch", "load", "'torch.load'")],
)
def test_the_name_is_said(module, text, said):
    with pytest.raises(UnsafeCheckpointError, match=rf"names {said}[\s\S]*state_dict"):
        parsed(pickled({"w": call(name(module, text), "touch executed")}))


@pytest.mark.parametrize(
    "data",
    [b"cos\nsystem\n(S'touch executed'\ntR.", b"(S'touch executed'\nios\nsystem\n.", b"(I1\nVx\ndp0\n(lp1\ng0\nPx\n."],
)
def test_protocol_0(data):
    with pytest.raises(UnsafeCheckpointError):
        parsed(data)
    for value in ({"a": [1, 2.5, "x"]}, (1, 1 << 70), "x"):
        with pytest.raises(UnsupportedCheckpointError, match="protocol 0"):
            parsed(pickle.dumps(value, 0))


def test_python_would_have_called_it(tmp_path, monkeypatch):
    """The names of the hostile pickles are those that Python's own unpickler asks for."""
    asked = []

    class Asking(pickle.Unpickler):
        def find_class(self, module, text):
            asked.append(f"{module}.{text}")
            raise LookupError

    monkeypatch.chdir(tmp_path)
    for seed in range(60):
        made = hostile_pickle(seed)
        try:
            Asking(io.BytesIO(made.data)).load()
        except Exception:  # whatever it raises: it asked, or there is no name in it
            pass
    assert len(asked) > 20 and {"os.system", "builtins.eval"} & set(asked)


@pytest.mark.parametrize(
    "data", [b"(" * 900_000, b"]" * 900_000, b"N" + b"q\0" * 900_000, b")" + b"\x85" * 900_000, b"N0" * 900_000]
)
def test_bombs_cost_what_the_file_may(data):
    with pytest.raises(LimitExceededError, match=r"more than \d+ (objects|operations)"):
        parsed(b"\x80\x02" + data)


def test_limits():
    data = pickled({str(number): (number,) for number in range(100)})
    parsed(data)
    with pytest.raises(LimitExceededError, match=r"Limits\.entries = 10"):
        parsed(data, entries=10)


def test_every_prefix_and_many_mutations_are_errors_or_values():
    data = pickled({"w": SavedTensor("0", "float32", 6, 0, (2, 3), (3, 1)), "n": [1, 2.5, "x", None], "m": ordered({})})
    generator = random.Random(3)
    mutated = [data[:end] for end in range(len(data))]
    for _ in range(600):
        one = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            at = generator.randrange(len(one))
            one[at : at + generator.randint(0, 2)] = generator.randbytes(generator.randint(0, 2))
        mutated.append(bytes(one))
    for one in mutated:
        try:
            parsed(one)
        except CheckpointError as error:
            assert error.path == "file"
