"""PyTorch's form before 1.6: pickles, then counted storages.

Opening reads the pickles alone, whose counts say where each storage is; a storage's own count is compared with the
pickle's when it is first read.
"""

from __future__ import annotations

import re
import struct
import sys

from orbax_t5x.errors import LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.extras.torch_zip.opcodes import parse_next
from orbax_t5x.extras.torch_zip.stack import PickleEndsError
from orbax_t5x.extras.torch_zip.values import Node, StorageNode, itemsize_of
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.lazy.leaf import FileExtent
from orbax_t5x.readers.zip_members import STORED, Archive, Member

# The pickle of the magic number, in protocol 2 and later ones.
_BEGIN = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_BEGIN_BYTES = 32
_VERSION = 1001
_COUNT = struct.Struct("<q")
# What is read at first; four times as much wherever the pickles are longer.
_FIRST_BYTES = 1 << 20
_LOADED_BYTES = 1 << 24


def is_sequential(file: StoredFile) -> bool:
    """Reports whether a file begins as PyTorch before 1.6 wrote it."""
    return _BEGIN.match(bytes(file.read(0, min(file.size, _BEGIN_BYTES)))) is not None


class SequentialFile(Archive):
    """File with storages as members."""

    is_swapped = sys.byteorder != "little"

    def __init__(self, file: StoredFile, limits: Limits):
        self.file = file
        file.load(_LOADED_BYTES)
        size = _FIRST_BYTES
        while True:
            data = bytes(file.read(0, min(size, file.size, int(limits.index_bytes))))
            try:
                self.tree, storages, keys, self.index_bytes = self._parse_pickles(data, limits)
                break
            except PickleEndsError:
                if len(data) == file.size:
                    raise
                if len(data) >= limits.index_bytes:
                    raise LimitExceededError(
                        f"its pickles have more bytes than Limits.index_bytes = {limits.index_bytes}", path=file.path
                    ) from None
                size *= 4
        self._place(storages, keys)

    def _parse_pickles(self, data: bytes, limits: Limits) -> tuple[Node, dict[str, StorageNode | None], list[str], int]:
        """Parses the pickles: tree, storages, order and first offset."""
        at, size = 0, self.file.size
        found: list[Node] = []
        for _ in range(3):
            found.append((one := parse_next(data, at, self.file.path, size, limits)).tree)
            at = one.end
        if found[1] != _VERSION:
            raise UnsupportedCheckpointError(
                f"PyTorch's form {found[1]!r:.40}, and there is {_VERSION}", path=self.file.path
            )
        main = parse_next(data, at, self.file.path, size, limits)
        keys = parse_next(data, main.end, self.file.path, size, limits)
        if not isinstance(keys.tree, list) or not all(isinstance(key, str) for key in keys.tree):
            raise self.corrupt("its list of storages is none")
        order = [str(key) for key in keys.tree]
        if len(set(order)) != len(order) or set(order) != main.storages.keys():
            raise self.corrupt("its list of storages is not that of the tensors")
        return main.tree, main.storages, order, keys.end

    def _place(self, storages: dict[str, StorageNode | None], keys: list[str]) -> None:
        at = self.index_bytes
        self.members = {}
        for key in keys:
            storage = storages[key]
            if storage is None:
                raise UnsupportedCheckpointError(
                    f"its storage {key[:100]!r} is of a type that is not known, so that what follows cannot be found",
                    path=self.file.path,
                )
            if storage.elements < 0:
                raise self.corrupt(f"its storage {key[:100]!r} has two types or counts")
            size = storage.elements * itemsize_of(storage.dtype)
            self.members[key] = Member(at, size, size, None, STORED, b"", 0)
            at += _COUNT.size + size
        if at > self.file.size:
            raise self.corrupt(f"its storages end at {at}, and the file has {self.file.size} bytes: it was cut")
        self._storages = storages

    def start_of(self, name: str) -> int:
        """Finds a storage; compares its count with the pickle's."""
        member, storage = self.members[name], self._storages[name]
        (count,) = _COUNT.unpack(bytes(self.file.read(member.header, _COUNT.size)))
        if storage is None or count != storage.elements:
            raise self.corrupt(f"the storage {name[:100]!r} has {count} elements, and its tensors have another count")
        return member.header + _COUNT.size

    def extent(self, name: str) -> FileExtent:
        member = self.members[name]
        return FileExtent(self.file, member.header, member.header + _COUNT.size + member.size)
