"""Reader of a file's headers through a moving window.

The bytes between are skipped, never read. After a jump over an array the window is small, and it doubles while headers
follow each other, so that a file of a few large arrays costs some KiB per array and a file of many small values is read
in few pieces. Every length is compared with what is left of the file before anything else happens with it.
"""

from __future__ import annotations

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.windows import MAX_GAP_BYTES

# The window after a jump, and the largest. Smaller first windows cost more reads per small leaf, larger ones read more
# of the arrays that are jumped over.
_FIRST_WINDOW_BYTES = 1 << 12
_LARGEST_WINDOW_BYTES = 1 << 18


class WindowReader:
    """Reader of short byte strings in order, up to `stop`."""

    def __init__(self, file: StoredFile):
        self._file = file
        self._data = b""
        self._base = 0
        self._at = 0
        self._window = _FIRST_WINDOW_BYTES
        self.stop: int = file.size
        self.bytes_read: int = 0

    @property
    def position(self) -> int:
        """The file offset of the next header."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """Bytes between here and `stop`."""
        return self.stop - self._base - self._at

    def take(self, size: int) -> bytes:
        """Reads the next bytes; the caller has bounded `size`."""
        end = self._at + size
        if end > len(self._data):
            self._move_window(size)
            end = size
        data = self._data[self._at : end]
        self._at = end
        return data

    def skip(self, size: int) -> None:
        """Skips bytes without reading."""
        self._at += size

    def _move_window(self, size: int) -> None:
        here = self.position
        if size > self.left:
            raise self.corrupt(f"{size} more bytes are needed, and {self.left} are left")
        jumped = self._at - len(self._data) >= MAX_GAP_BYTES
        self._window = _FIRST_WINDOW_BYTES if jumped else min(2 * self._window, _LARGEST_WINDOW_BYTES)
        data = self._file.read(here, max(size, min(self._window, self._file.size - here)))
        self.bytes_read += len(data)
        self._data, self._base, self._at = bytes(data), here, 0

    def corrupt(self, message: str, leaf: str | None = None) -> CorruptCheckpointError:
        """Makes an error at this position of the file."""
        return CorruptCheckpointError(f"at byte {self.position}: {message}", path=self._file.path, leaf=leaf)
