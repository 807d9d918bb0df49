"""What stands at a path, as far as deciding its format needs: names and a few bytes, looked at once, without blocking.

A `Sighting` is plain data; the recognisers of `readers/__init__.py` are functions of it. A FIFO or a device is never
opened.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.storage.paths import io_error

# Enough for every magic number, and for the first keys of a msgpack map.
_HEAD_BYTES = 256
# The last bytes of an SSTable are its magic number, those of an old T5X file its version.
_TAIL_BYTES = 16
_SSTABLE_MAGIC = bytes.fromhex("57fb808b247547db")
# A map of the key `version`, a small number, and the key `optimizer`; that number at the end; a map of a state's parts.
_T5X_HEAD = re.compile(rb"[\x82-\x8f]\xa7version[\x00-\x7f]\xa9optimizer", re.DOTALL)
_T5X_TAIL = re.compile(rb"\xa7version[\x00-\x7f]\Z", re.DOTALL)
_TRAIN_STATE_HEAD = re.compile(rb"[\x81-\x83](?:\xa6target|\xa5state|\xadflax_mutables)", re.DOTALL)
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)


@dataclasses.dataclass(frozen=True)
class Sighting:
    """What was seen at a path.

    Attributes:
      path: absolute, symlinks as the caller gave them.
      kind: "file", "directory", "missing", or "special" (a FIFO, a socket, a device).
      head, tail: the first and last bytes of a file.
      size: of a file.
      names: what a directory holds.
    """

    path: str
    kind: str
    head: bytes = b""
    tail: bytes = b""
    size: int = 0
    names: frozenset[str] = frozenset()

    def inside(self, name: str) -> Sighting:
        """What stands under a name in this directory."""
        return look(os.path.join(self.path, name))

    def with_suffix(self, suffix: str) -> list[str]:
        """The names in this directory that end so, sorted."""
        return sorted(name for name in self.names if name.endswith(suffix))


def look(path: str) -> Sighting:
    """Looks at a local path.

    Raises:
      CheckpointIOError: the operating system refused, other than by saying that nothing is there.
    """
    try:
        path = os.path.abspath(path)
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return Sighting(path, "missing")
    except OSError as error:
        raise io_error(error, "looking at it", path=path) from error
    try:
        if stat.S_ISDIR(mode):
            return Sighting(path, "directory", names=frozenset(os.listdir(path)))
        if not stat.S_ISREG(mode):
            return Sighting(path, "special")
        return _look_into(path)
    except OSError as error:
        if isinstance(error, CheckpointIOError):
            raise
        raise io_error(error, "looking at it", path=path) from error


def _look_into(path: str) -> Sighting:
    fd = os.open(path, _OPEN_FLAGS)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Sighting(path, "special")
        head = os.pread(fd, _HEAD_BYTES, 0)
        tail = os.pread(fd, _TAIL_BYTES, max(0, found.st_size - _TAIL_BYTES))
        return Sighting(path, "file", head=head, tail=tail, size=found.st_size)
    finally:
        os.close(fd)


def is_sstable(seen: Sighting) -> bool:
    """Whether a file ends as an SSTable does: the index of a bundle, or a TensorFlow 1 (V1) checkpoint."""
    return seen.kind == "file" and seen.tail.endswith(_SSTABLE_MAGIC)


def is_bundle_state(seen: Sighting) -> bool:
    """Whether a file is the text in which TensorFlow names the newest bundle of a directory."""
    return seen.kind == "file" and b"model_checkpoint_path:" in seen.head


def is_msgpack_map(seen: Sighting) -> bool:
    """Whether a file begins as a msgpack map with text keys does."""
    if seen.kind != "file" or len(seen.head) < 2:
        return False
    first = seen.head[0]
    size = 1 if 0x81 <= first <= 0x8F else {0xDE: 3, 0xDF: 5}.get(first, 0)
    key = seen.head[size] if 0 < size < len(seen.head) else 0
    return 0xA0 <= key <= 0xBF or key in (0xD9, 0xDA)


def is_t5x_msgpack(seen: Sighting) -> bool:
    """Whether a file is a msgpack map of `version` and `optimizer`, in the order of newer T5X or in that of older."""
    return is_msgpack_map(seen) and (
        _T5X_HEAD.match(seen.head) is not None
        or (seen.head.startswith(b"\x82\xa9optimizer") and _T5X_TAIL.search(seen.tail) is not None)
    )


def is_old_t5x_msgpack(seen: Sighting) -> bool:
    """Whether a file is a msgpack map that begins as a train state of T5X does, with no version before it."""
    return is_msgpack_map(seen) and _TRAIN_STATE_HEAD.match(seen.head) is not None


def is_safetensors(seen: Sighting) -> bool:
    """Whether a file has the name of one, or begins with a header length and a brace."""
    if seen.kind != "file":
        return False
    length = int.from_bytes(seen.head[:8], "little")
    return seen.path.endswith(".safetensors") or (seen.head[8:9] == b"{" and 2 <= length <= seen.size - 8)
