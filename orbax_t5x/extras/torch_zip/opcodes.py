"""The tree in a PyTorch file's pickle.

A loop over the opcodes makes nothing but data. Python's unpickler calls what a pickle names. This loop has no way to
call or import anything: a name is compared with a list, and what is on it becomes data (a storage, a tensor, a
container). Any other name, and what it would make, is a placeholder that stays unread beside tensors; without tensors
it is an UnsafeCheckpointError. Pure: bytes in, a tree out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from orbax_t5x.errors import LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.extras.torch_zip.values import (
    CALLS,
    DTYPES,
    STORAGES,
    Name,
    Node,
    Opaque,
    OrderedNode,
    PickleStack,
    StorageNode,
    TensorNode,
    Tuple,
    describe_value,
    named_object,
)
from orbax_t5x.files.interface import StoredFile

# No name on the list is longer.
_LONGEST_NAME_BYTES = 256
_SHOWN_BYTES = 200
_MAX_PROTOCOL = 5


def parse_pickle(data: bytes, file: StoredFile) -> Node:
    """Parses a pickle of a file."""
    return _Machine(data, file).run()


def _has_tensor(tree: Node) -> bool:
    """Tests if a tree holds a tensor; visits shared objects once."""
    seen: set[int] = set()
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, TensorNode):
            return True
        if isinstance(node, (dict, list)) and id(node) not in seen:
            seen.add(id(node))
            stack += node.values() if isinstance(node, dict) else node
    return False


class _Machine(PickleStack):
    """Stack that runs a pickle's opcodes."""

    # What the pickle does for the first object that is not made.
    _unread = ""

    def run(self) -> Node:
        """Runs all opcodes; returns the last of the stack."""
        data, opcodes = self._data, _OPCODES
        while True:
            if self._at >= len(data):
                raise self._corrupt("its pickle ends before its last opcode")
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            opcode = opcodes.get(code)
            if opcode is None:
                message = f"its pickle has the opcode {bytes([code])!r} at byte {self._at - 1}, which is not read"
                raise UnsupportedCheckpointError(message, path=self._path)
            opcode(self)
        if len(self._stack) != 1 or self._marks or self._at != len(data):
            raise self._corrupt("its pickle does not end with one value")
        if self._unread and not _has_tensor(self._stack[0]):
            raise self._unsafe(f"{self._unread}, and no tensor is beside that")
        return self._stack[0]

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
        """Pushes an integer; refuses it in arrays if too long."""
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
        if isinstance(top := self.top(), Opaque):
            return
        if type(top) is not list:
            raise self._corrupt("its pickle appends to what is no list")
        top.extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Sets items of the dict on top."""
        top = self.top()
        if isinstance(top, Opaque):
            return
        if not isinstance(top, dict) or len(values) % 2:
            raise self._corrupt("its pickle sets items of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                # Beside tensors the values of all such keys are one leaf, which is unread.
                shown = "a number" if isinstance(key, (bool, float)) else describe_value(key)
                self._unread = self._unread or f"has a dict in which a key is {describe_value(key)}"
                top.setdefault(f"<{shown}>", Opaque(f"a value under a key that is {describe_value(key)}"))
                continue
            name = str(key)
            if name in top:
                raise self._corrupt(f"the key {name[:_SHOWN_BYTES]!r} is twice in one dict")
            top[name] = value

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
        text = f"{module[:_LONGEST_NAME_BYTES]}.{name[:_LONGEST_NAME_BYTES]}"
        # A dot inside would make two spellings of one name.
        if "." in name or not (text in STORAGES or text in DTYPES or text in CALLS):
            self.placeholder(named_object(text[:_SHOWN_BYTES]), f"names {text[:_SHOWN_BYTES]!r}")
        else:
            self.make(Name(text))

    def placeholder(self, made: Opaque, what: str) -> None:
        """Pushes a placeholder of an object not made."""
        self._unread = self._unread or what
        self.make(made)

    def new_object(self, pops: int) -> None:
        """Replaces a class and its arguments by a placeholder."""
        *_, kind = [self.pop() for _ in range(pops)]
        if not isinstance(kind, (Opaque, Name)):
            raise self._unsafe(f"makes an object of {describe_value(kind)}")
        made = kind if isinstance(kind, Opaque) else named_object(kind.text)
        self.placeholder(made, f"makes {made.what}")

    def unread_set(self, values: list[Any]) -> None:
        """Pushes the placeholder of a set."""
        self.placeholder(named_object("builtins.set"), "makes a set")

    def add_items(self, values: list[Any]) -> None:
        """Adds to the set on top, a placeholder."""
        if not isinstance(self.top(), Opaque):
            raise self._corrupt("its pickle adds to what is no set")

    def reduce(self) -> None:
        """Replaces a name and its arguments by their value."""
        arguments, called = self.pop(), self.pop()
        if isinstance(called, Opaque):
            self.make(called)
            return
        if not isinstance(called, Name) or called.text not in CALLS:
            raise self._unsafe(f"calls {describe_value(called)}")
        if type(arguments) is not Tuple:
            raise self._corrupt(f"its pickle calls {called.text} with {describe_value(arguments)}, which is no tuple")
        try:
            made = CALLS[called.text](*arguments)
        except (TypeError, ValueError, OverflowError):
            if inside := [one for one in arguments if isinstance(one, Opaque)]:
                self.make(inside[0])
                return
            if not called.text.startswith(("torch.", "collections.OrderedDict")):
                self.placeholder(named_object(called.text), f"calls {called.text!r}")
                return
            raise self._corrupt(f"its pickle has {called.text} with arguments that are none of it") from None
        # A call may copy what its arguments share: texts, and the items of an OrderedDict.
        is_copy = isinstance(made, (bytes, OrderedNode))
        self.make(made, 1 + (len(made) >> (6 if isinstance(made, bytes) else 0)) if is_copy else 1)

    def build(self) -> None:
        """Ignores the state of a placeholder or OrderedDict."""
        state, built = self.pop(), self.top()
        if isinstance(built, Opaque):
            return
        if type(built) is not OrderedNode or not isinstance(state, dict):
            raise self._unsafe(f"sets the state of {describe_value(built)}")

    def persistent(self) -> None:
        """Replaces the description of a storage by the storage."""
        match self.pop():
            case ["storage", Name(text), str(key), str(), int(count)] if text in STORAGES and count >= 0:
                self.make(StorageNode(STORAGES[text], key, count))
            case ["storage", Opaque() as kind, *_]:
                self.make(kind)
            case ["module", Opaque() as kind, *_]:
                self.make(kind)
            case other:
                raise self._unsafe(f"refers to {describe_value(other)}, which is no storage,")


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
    ord("P"): lambda m: m.refuse("PERSID"),
    ord("i"): lambda m: m.refuse("INST"),
    ord("o"): lambda m: m.refuse("OBJ"),
    0x81: lambda m: m.new_object(2),
    0x92: lambda m: m.new_object(3),
    0x8F: lambda m: m.unread_set([]),
    0x90: lambda m: m.add_items(m.pop_mark()),
    0x91: lambda m: m.unread_set(m.pop_mark()),
    0x96: lambda m: m.bytes(m.number("<Q")),
    0x82: lambda m: m.refuse("EXT1"),
    0x83: lambda m: m.refuse("EXT2"),
    0x84: lambda m: m.refuse("EXT4"),
}
