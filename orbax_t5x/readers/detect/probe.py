"""Probes a path for the decision of its format.

Names and a few bytes are read once, without blocking. A `PathProbe` is plain data; the recognisers of the formats are
functions of it, and reach the file system only through this module. The path itself is trusted. Names below it are
probed through the root's resolver: a link that leads out is never followed, a FIFO or a device never opened.
"""

from __future__ import annotations

import dataclasses
import functools

from orbax_t5x.files.interface import Files, Subdirectories
from orbax_t5x.files.places import files_at

# Enough for every magic number, and for the first keys of a msgpack map.
_HEAD_BYTES = 256
# The last bytes of an SSTable are its magic number, those of an old T5X file its version.
_TAIL_BYTES = 16
_SSTABLE_MAGIC = bytes.fromhex("57fb808b247547db")


@dataclasses.dataclass(frozen=True, eq=False)
class PathProbe:
    """Result of a probe of a path.

    Attributes:
      path: absolute, symlinks as the caller gave them.
      kind: "file", "directory", "missing", "special" (a FIFO, a socket, a device), or "outside" (a link that leads out
        of the directory it was looked for in).
      head: the first bytes of a file.
      size: of a file; None where a remote store does not report it.
      names: what a directory holds.
    """

    path: str
    kind: str
    head: bytes = b""
    local_tail: bytes | None = None
    size: int | None = 0
    names: frozenset[str] = frozenset()
    _probed: dict[str, PathProbe] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Files:
        """The files of the path."""
        return files_at(self.path)

    @functools.cached_property
    def tail(self) -> bytes:
        """The last bytes of a file."""
        if self.local_tail is not None or self.kind != "file":
            return self.local_tail or b""
        return self.files.look(head=0, tail=_TAIL_BYTES).tail

    def inside(self, name: str) -> PathProbe:
        """Probes a name in this directory once."""
        if name not in self._probed:
            self._probed[name] = _probe(self.files, self.files.join(name), name)
        return self._probed[name]


def is_file(directory: str, name: str) -> bool:
    """Tests if a name is a regular file, as `Files.has_file` does."""
    return files_at(directory).has_file(name)


def subdirectories(directory: str) -> Subdirectories:
    """Lists a directory."""
    return files_at(directory).subdirectories()


def probe_path(path: str) -> PathProbe:
    """Probes a path."""
    files = files_at(path)
    return _probe(files, files.named, "")


def _probe(files: Files, path: str, name: str) -> PathProbe:
    look = files.look(name, head=_HEAD_BYTES, tail=0 if files.is_remote else _TAIL_BYTES)
    return PathProbe(path, look.kind, look.head, None if files.is_remote else look.tail, look.size, look.names)


def is_sstable(probe: PathProbe) -> bool:
    """Tests if a file ends as an SSTable does."""
    return probe.kind == "file" and probe.tail.endswith(_SSTABLE_MAGIC)


def is_bundle_state(probe: PathProbe) -> bool:
    """Tests if a file is TensorFlow's record of the newest bundle."""
    return probe.kind == "file" and b"model_checkpoint_path:" in probe.head


def is_msgpack_map(probe: PathProbe) -> bool:
    """Tests if a file begins with a msgpack map of text keys."""
    if probe.kind != "file" or len(probe.head) < 2:
        return False
    first = probe.head[0]
    size = 1 if 0x81 <= first <= 0x8F else {0xDE: 3, 0xDF: 5}.get(first, 0)
    key = probe.head[size] if 0 < size < len(probe.head) else 0
    return 0xA0 <= key <= 0xBF or key in (0xD9, 0xDA)
