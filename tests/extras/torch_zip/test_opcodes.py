"""The pickle of a PyTorch file: what is data is read as Python's own unpickler reads it, and nothing else is done."""

import contextlib
import io
import itertools
import os
import pickle
import random
from types import NoneType, SimpleNamespace

import pytest

from orbax_t5x.errors import CheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.extras.torch_zip.values import CALLS, Name, Opaque, OrderedNode, StorageNode, TensorNode, Tuple
from orbax_t5x.files.limits import Limits
from tests.support.hostile_pickles import hostile_pickle
from tests.support.torch_files import Op, SavedTensor, call, name, opcodes, ordered, pickled

PICKLES = 500


def parsed(data, **limits):
    return parse_pickle(data, SimpleNamespace(path="file", limits=Limits(**limits)))


DATA = {dict, OrderedNode, list, Tuple, TensorNode, StorageNode, Name, Opaque, str, bytes, bool, int, float, NoneType}


def nodes(tree):
    stack = [tree]
    while stack:
        yield (node := stack.pop())
        if isinstance(node, (dict, list)):
            stack += node.values() if isinstance(node, dict) else node


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


ARGUMENTS = [
    None,
    3,
    -(2**2000),
    1.5,
    "text",
    Op(b"C\x05bytes"),
    [1],
    {"a": 1},
    (),
    ((),),
    ([("a", 1)],),
    SavedTensor("0", "float32", 1, 0, (1,), (1,)),
]


@pytest.mark.parametrize("called", CALLS)
def test_calls_with_any_arguments_are_read_or_refused(called):
    module, _, text = called.rpartition(".")
    tuples = [(), *((one,) for one in ARGUMENTS), *itertools.product(ARGUMENTS, repeat=2)]
    tuples += [(one,) * count for one in ARGUMENTS for count in range(3, 9)]
    for given in [*ARGUMENTS, *tuples]:
        with contextlib.suppress(CheckpointError):
            assert type(parsed(pickled(Op(opcodes(name(module, text)) + opcodes(given) + b"R")))) in DATA | {complex}


def _with_pure_python(value, protocol):
    made = io.BytesIO()
    pickle._Pickler(made, protocol).dump(value)
    return made.getvalue()


def test_numbers_are_keys():
    assert parsed(pickle.dumps({0: "a", -3: "b", "c": 1}, 2)) == {"0": "a", "-3": "b", "c": 1}
    for keys in ({1.5: 0}, {None: 0}, {(1,): 0}, {True: 0}):
        with pytest.raises(CheckpointError, match=r"a key is a"):
            parsed(pickle.dumps(keys, 2))


@pytest.mark.slow
def test_hostile_pickles(tmp_path, monkeypatch):
    """None is executed, none hangs, and what would call something is refused by its name or stays unread data."""
    monkeypatch.chdir(tmp_path)
    for seed in range(PICKLES):
        made = hostile_pickle(seed)
        try:
            kinds = {type(node) for node in nodes(parsed(made.data))}
            assert kinds <= DATA and (TensorNode in kinds or Opaque not in kinds), seed
        except CheckpointError as error:
            assert isinstance(error, (UnsafeCheckpointError, UnsupportedCheckpointError)) or not made.calls, seed
            assert error.path == "file" and len(str(error)) < 1000
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [("os", "system", "'os.system'"), ("builtins", "eval", "'builtins.eval'"), ("torch", "load", "'torch.load'")],
)
def test_the_name_is_said(module, text, said):
    with pytest.raises(UnsafeCheckpointError, match=rf"names {said}[\s\S]*state_dict"):
        parsed(pickled({"w": call(name(module, text), "touch executed")}))


def test_protocol_0():
    with pytest.raises(UnsafeCheckpointError):
        parsed(b"(Nios\nsystem\n.")
    for value in ({"a": [1, 2.5, "x"]}, (1, 1 << 70), "x"):
        with pytest.raises(UnsupportedCheckpointError, match="opcode"):
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
