"""Bounded stack and memo of a parsed pickle.

Time and memory are bounded by the file: operations, objects and entries of the memo each by its size.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from orbax_t5x.errors import CorruptCheckpointError, Fix, LimitExceededError, UnsafeCheckpointError
from orbax_t5x.files.limits import Limits

# An object takes some 100 bytes of memory, an entry of the stack 8; a file of small tensors has fewer than these.
_FREE_OBJECTS = 1 << 17
_FILE_BYTES_PER_OBJECT = 16
_FREE_OPERATIONS = 1 << 18
_FILE_BYTES_PER_OPERATION = 8
_FIX = Fix("in PyTorch, save only tensors: torch.save(model.state_dict(), path), or write safetensors")


class PickleEndsError(CorruptCheckpointError):
    """A pickle that goes on behind the bytes that are at hand."""


class PickleStack:
    """Stack and memo of a pickle, which gives bytes in order."""

    def __init__(self, data: bytes, path: str, file_bytes: int, limits: Limits, at: int = 0):
        self._data = data
        self._path = path
        self._limits = limits
        self._at = at
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._most_objects = min(2 * limits.entries, _FREE_OBJECTS + file_bytes // _FILE_BYTES_PER_OBJECT)
        self._objects = self._most_objects
        self._operations = min(2 * limits.entries, _FREE_OPERATIONS + file_bytes // _FILE_BYTES_PER_OPERATION)

    # -- errors

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._path)

    def _ended(self, message: str) -> PickleEndsError:
        return PickleEndsError(message, path=self._path)

    def _too_many(self, what: str, most: int) -> LimitExceededError:
        return LimitExceededError(
            f"more than {most} {what} in its pickle: more than a file of this size needs, or Limits.entries = "
            f"{self._limits.entries} allows",
            path=self._path,
        )

    def _unsafe(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(f"its pickle {what}; nothing was imported or called", path=self._path, fix=_FIX)

    def refuse(self, name: str) -> NoReturn:
        """Refuses an opcode that makes objects."""
        raise self._unsafe(f"has the opcode {name}")

    # -- the stack

    def take(self, size: int) -> bytes:
        """Takes the next bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise self._ended(f"its pickle claims {size} bytes at {self._at}, and has {len(self._data)} in all")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        """Takes the next byte."""
        if self._at >= len(self._data):
            raise self._ended("its pickle ends within an opcode")
        self._at += 1
        return self._data[self._at - 1]

    def number(self, code: str) -> int:
        """Takes the next number, in the format of `struct`."""
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def push(self, value: Any) -> None:
        """Pushes a value that takes no memory of its own."""
        self._stack.append(value)

    def make(self, value: Any, size: int = 1) -> None:
        """Pushes a new object with its cost."""
        self._objects -= size
        if self._objects < 0:
            raise self._too_many("objects", self._most_objects)
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
            raise self._too_many("objects", self._most_objects)
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
