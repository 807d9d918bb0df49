"""The tree in the pickle of a PyTorch file, by a loop over its opcodes that can make nothing but data.

Python's unpickler calls what a pickle names. This loop has no way to call or import anything: a name is compared with
a list, and what is on it becomes data (a storage, a tensor, a container); any other name, and every opcode that would
make an object, is an UnsafeCheckpointError. Pure: bytes in, a tree out.

Time and memory are bounded by the file: operations, objects and entries of the memo each by its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from orbax_t5x.errors import (
    CorruptCheckpointError,
    Fix,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.storage.limits import Limits

# An object takes some 100 bytes of memory, an entry of the stack 8; a file of small tensors has fewer than these.
_FREE_OBJECTS = 1 << 17
_FILE_BYTES_PER_OBJECT = 16
_FREE_OPERATIONS = 1 << 18
_FILE_BYTES_PER_OPERATION = 8
# No name on the list is longer.
_LONGEST_NAME_BYTES = 256
_SHOWN_BYTES = 200
_MAX_PROTOCOL = 5
_FIX = Fix("in PyTorch, save only tensors: torch.save(model.state_dict(), path), or write safetensors")

_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
    }.items()
} | {"torch.storage.UntypedStorage": None, "torch.storage._UntypedStorage": None}
_SIGNED = ("int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "complex64", "complex128")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {
    f"torch.{name}"
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", *_SIGNED, *_FLOAT8, "complex32", "float4_e2m1fn_x2")
}


class Tuple(list[Any]):
    """A tuple of the pickle; a list, so that trees are made of dicts and lists."""

    __slots__ = ()


class OrderedNode(dict[str, Any]):
    """An OrderedDict of the pickle."""

    __slots__ = ()


class Name(NamedTuple):
    """A name on the list, such as "torch.FloatStorage"; nothing was imported."""

    text: str


class StorageNode(NamedTuple):
    """A storage: `dtype` is None where it has bytes; `elements` is how many it has, or bytes."""

    dtype: str | None
    key: str
    elements: int


class TensorNode(NamedTuple):
    """A tensor as its pickle describes it; nothing in it was compared with anything yet."""

    storage: StorageNode
    offset: Any
    shape: Any
    strides: Any
    dtype: str | None
    metadata: Any


Node: TypeAlias = (
    "dict[str, Node] | list[Node] | TensorNode | StorageNode | Name | str | bytes | bool | int | float | None"
)


def parse(data: bytes, path: str, file_bytes: int, limits: Limits) -> Node:
    """Parses a pickle.

    Args:
      data: all of it.
      path: the file, for errors.
      file_bytes: the size of the file, which bounds how much the pickle may make.
      limits: of which `entries` bounds it, too.

    Raises:
      UnsafeCheckpointError: it would call or import something, which the error names.
      CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError: see the text.
    """
    return _Machine(data, path, file_bytes, limits).run()


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, data: bytes, path: str, file_bytes: int, limits: Limits):
        self._data = data
        self._path = path
        self._limits = limits
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._is_old = False
        self._objects = min(2 * limits.entries, _FREE_OBJECTS + file_bytes // _FILE_BYTES_PER_OBJECT)
        self._operations = min(2 * limits.entries, _FREE_OPERATIONS + file_bytes // _FILE_BYTES_PER_OPERATION)

    def run(self) -> Node:
        """Runs all opcodes; returns what is left on the stack."""
        data, opcodes = self._data, _OPCODES
        for _ in range(self._operations):
            if self._at >= len(data):
                raise self._corrupt("its pickle ends before its last opcode")
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            opcode = opcodes.get(code)
            if opcode is None:
                raise self._corrupt(
                    f"its pickle has the opcode {bytes([code])!r} at byte {self._at - 1}, which is none"
                )
            opcode(self)
        else:
            raise self._too_many("operations", self._operations)
        if len(self._stack) != 1 or self._marks or self._at != len(data):
            raise self._corrupt("its pickle does not end with one value")
        if self._is_old:
            raise UnsupportedCheckpointError("its pickle is of protocol 0, and torch.save writes 2", path=self._path)
        return self._stack[0]

    # -- errors

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._path)

    def _too_many(self, what: str, most: int) -> LimitExceededError:
        return LimitExceededError(
            f"more than {most} {what} in its pickle: more than a file of this size needs, or Limits.entries = "
            f"{self._limits.entries} allows",
            path=self._path,
        )

    def _unsafe(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"its pickle {what}, which no tensor needs; nothing was imported or called", path=self._path, fix=_FIX
        )

    def refuse(self, name: str) -> NoReturn:
        """Refuses an opcode that makes objects."""
        raise self._unsafe(f"has the opcode {name}")

    # -- the stack

    def take(self, size: int) -> bytes:
        """Takes the next bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise self._corrupt(f"its pickle claims {size} bytes at {self._at}, and has {len(self._data)} in all")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        """Takes the next byte."""
        if self._at >= len(self._data):
            raise self._corrupt("its pickle ends within an opcode")
        self._at += 1
        return self._data[self._at - 1]

    def number(self, code: str) -> int:
        """Takes the next number, in the format of `struct`."""
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def push(self, value: Any) -> None:
        """Pushes a value that takes no memory of its own."""
        self._stack.append(value)

    def make(self, value: Any) -> None:
        """Pushes a new object."""
        self._objects -= 1
        if self._objects < 0:
            raise self._too_many("objects", _FREE_OBJECTS)
        self._stack.append(value)

    def pop(self) -> Any:
        """Pops a value above the last mark."""
        self.top()
        return self._stack.pop()

    def top(self) -> Any:
        """Returns the value on top, above the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._corrupt(f"its pickle takes a value at byte {self._at - 1} where there is none")
        return self._stack[-1]

    def mark(self) -> None:
        """Marks the stack."""
        self._objects -= 1
        if self._objects < 0:
            raise self._too_many("objects", _FREE_OBJECTS)
        self._marks.append(len(self._stack))

    def pop_mark(self) -> list[Any]:
        """Pops all above the last mark, and the mark."""
        if not self._marks:
            raise self._corrupt(f"its pickle takes a mark at byte {self._at - 1} where there is none")
        first = self._marks.pop()
        values = self._stack[first:]
        del self._stack[first:]
        return values

    # -- the memo

    def put(self, index: int) -> None:
        """Remembers the value on top; Python's picklers number them in order."""
        value = self.top()
        if index == len(self._memo):
            self._memo.append(value)
        elif index < len(self._memo):
            self._memo[index] = value
        else:
            raise self._corrupt(f"its pickle remembers a value as {index} after {len(self._memo)} others")

    def put_next(self) -> None:
        """Remembers the value on top under the next number."""
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        """Pushes a value that was remembered."""
        if index >= len(self._memo):
            raise self._corrupt(f"its pickle takes the value {index}, and remembered {len(self._memo)}")
        self._stack.append(self._memo[index])

    # -- values

    def text(self, size: int) -> None:
        """Pushes text."""
        try:
            self.make(self.take(size).decode())
        except UnicodeDecodeError:
            raise self._corrupt(f"a text of its pickle before byte {self._at} is not UTF-8") from None

    def bytes(self, size: int) -> None:
        """Pushes bytes."""
        self.make(self.take(size))

    def long(self, size: int) -> None:
        """Pushes an integer of any size; one that is no number of an array is refused with its leaf."""
        if not 0 <= size <= _LONGEST_NAME_BYTES:
            raise LimitExceededError(f"an integer of {size} bytes in its pickle", path=self._path)
        self.make(int.from_bytes(self.take(size), "little", signed=True))

    def protocol(self) -> None:
        """Checks the version of the pickle."""
        if (version := self.byte()) > _MAX_PROTOCOL:
            raise self._corrupt(f"its pickle is of protocol {version}, and there are {_MAX_PROTOCOL}")

    def frame(self) -> None:
        """Checks that a frame is inside the pickle."""
        size = self.number("<Q")
        if size > len(self._data) - self._at:
            raise self._corrupt(f"its pickle has a frame of {size} bytes at {self._at}, beyond its end")

    def tuple(self, size: int) -> None:
        """Pushes a tuple of the last values."""
        values = [self.pop() for _ in range(size)]
        self.make(Tuple(reversed(values)))

    def append(self, values: list[Any]) -> None:
        """Appends to the list on top."""
        if self._is_old:
            return
        if type(top := self.top()) is not list:
            raise self._corrupt("its pickle appends to what is no list")
        top.extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Sets items of the dict on top."""
        if self._is_old:
            return
        top = self.top()
        if not isinstance(top, dict) or len(values) % 2:
            raise self._corrupt("its pickle sets items of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise UnsupportedCheckpointError(
                    f"a key is {_described(key)}; names are made of text and integers", path=self._path, fix=_FIX
                )
            name = str(key)
            if name in top:
                raise self._corrupt(f"the key {name[:_SHOWN_BYTES]!r} is twice in one dict")
            top[name] = value

    # -- protocol 0, of which only what calls something is looked for

    def old_line(self) -> None:
        """Skips the value in a line, which becomes None."""
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise self._corrupt(f"its pickle has a line at byte {self._at} that does not end")
        self._at = end + 1
        self._is_old = True
        self.push(None)

    def old_put(self) -> None:
        """Skips the number under which a value is remembered."""
        self.old_line()
        self.pop()

    def old_container(self) -> None:
        """Skips the values of a list or a dict, which becomes None."""
        self.pop_mark()
        self._is_old = True
        self.push(None)

    # -- names, and what they make

    def name(self) -> None:
        """Pushes a name of the list that stands in two lines."""
        parts: list[str] = []
        for _ in range(2):
            end = self._data.find(b"\n", self._at, self._at + _LONGEST_NAME_BYTES)
            if end < 0:
                shown = self._data[self._at : self._at + _SHOWN_BYTES]
                raise self._unsafe(f"names {shown.decode(errors='backslashreplace')!r}")
            parts.append(self.take(end - self._at).decode(errors="backslashreplace"))
            self._at += 1
        self._push_name(*parts)

    def stack_name(self) -> None:
        """Pushes a name of the list that is on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._corrupt("its pickle has a name that is no text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        # A dot inside would make two spellings of one name.
        if "." in name or not (text in _STORAGES or text in _DTYPES or text in _CALLS):
            raise self._unsafe(f"names {text[:_SHOWN_BYTES]!r}")
        self.make(Name(text))

    def reduce(self) -> None:
        """Replaces a name and its arguments by what they describe."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or called.text not in _CALLS:
            raise self._unsafe(f"calls {_described(called)}")
        try:
            if type(arguments) is not Tuple:
                raise TypeError
            self.make(_CALLS[called.text](*arguments))
        except (TypeError, ValueError):
            raise self._corrupt(f"its pickle has {called.text} with arguments that are none of it") from None

    def build(self) -> None:
        """Ignores the attributes of an OrderedDict, such as a state dict's `_metadata`."""
        state, built = self.pop(), self.top()
        if type(built) is not OrderedNode or not isinstance(state, dict):
            raise self._unsafe(f"sets the state of {_described(built)}")

    def persistent(self) -> None:
        """Replaces the description of a storage by the storage."""
        match self.pop():
            case ["storage", Name(text), str(key), str(), int(count)] if text in _STORAGES and count >= 0:
                self.make(StorageNode(_STORAGES[text], key, count))
            case other:
                raise self._unsafe(f"refers to {_described(other)}, which is no storage,")


def _described(value: Any) -> str:
    if isinstance(value, Name):
        return repr(value.text)
    names = {Tuple: "a tuple", OrderedNode: "an OrderedDict", TensorNode: "a tensor", StorageNode: "a storage"}
    return names.get(type(value), f"a {type(value).__name__}")


# -- what names on the list describe: functions of data, that raise TypeError or ValueError


def _ordered_dict() -> OrderedNode:
    return OrderedNode()


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None) -> Any:
    if not isinstance(storage, StorageNode) or storage.dtype is None:
        raise TypeError
    return TensorNode(storage, offset, shape, strides, storage.dtype, metadata)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    if not isinstance(storage, StorageNode) or not isinstance(dtype, Name) or dtype.text not in _DTYPES:
        raise TypeError
    return TensorNode(storage, offset, shape, strides, dtype.text.removeprefix("torch."), metadata)


def _parameter(tensor: Any, grad: Any, hooks: Any) -> Any:
    if not isinstance(tensor, TensorNode):
        raise TypeError
    return tensor


def _size(sizes: Any) -> Any:
    if type(sizes) is not Tuple:
        raise TypeError
    return sizes


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or type(index) not in (int, type(None)):
        raise TypeError
    return kind if index is None else f"{kind}:{index}"


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
}
_STOP = ord(".")
_Opcode: TypeAlias = Callable[[_Machine], Any]
_OPCODES: dict[int, _Opcode] = {
    0x80: lambda m: m.protocol(),
    0x95: lambda m: m.frame(),
    ord("("): lambda m: m.mark(),
    ord("0"): lambda m: m.pop(),
    ord("1"): lambda m: m.pop_mark(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.byte()),
    ord("M"): lambda m: m.make(m.number("<H")),
    ord("J"): lambda m: m.make(m.number("<i")),
    0x8A: lambda m: m.long(m.byte()),
    0x8B: lambda m: m.long(m.number("<i")),
    ord("G"): lambda m: m.make(m.number(">d")),
    0x8C: lambda m: m.text(m.byte()),
    ord("X"): lambda m: m.text(m.number("<I")),
    0x8D: lambda m: m.text(m.number("<Q")),
    ord("C"): lambda m: m.bytes(m.byte()),
    ord("B"): lambda m: m.bytes(m.number("<I")),
    0x8E: lambda m: m.bytes(m.number("<Q")),
    ord(")"): lambda m: m.make(Tuple()),
    0x85: lambda m: m.tuple(1),
    0x86: lambda m: m.tuple(2),
    0x87: lambda m: m.tuple(3),
    ord("t"): lambda m: m.make(Tuple(m.pop_mark())),
    ord("]"): lambda m: m.make([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_mark()),
    ord("}"): lambda m: m.make({}),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("q"): lambda m: m.put(m.byte()),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.put_next(),
    ord("h"): lambda m: m.get(m.byte()),
    ord("j"): lambda m: m.get(m.number("<I")),
    ord("c"): lambda m: m.name(),
    0x93: lambda m: m.stack_name(),
    ord("R"): lambda m: m.reduce(),
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.persistent(),
    **{code: lambda m: m.old_line() for code in b"SVILFg"},
    **{code: lambda m: m.old_container() for code in b"ld"},
    ord("p"): lambda m: m.old_put(),
    ord("P"): lambda m: m.refuse("PERSID"),
    ord("i"): lambda m: m.refuse("INST"),
    ord("o"): lambda m: m.refuse("OBJ"),
    0x81: lambda m: m.refuse("NEWOBJ"),
    0x92: lambda m: m.refuse("NEWOBJ_EX"),
    0x82: lambda m: m.refuse("EXT1"),
    0x83: lambda m: m.refuse("EXT2"),
    0x84: lambda m: m.refuse("EXT4"),
}
