"""A file of a remote store, read by ranges.

Each response is proven to be of the file that was found at opening. Reads that are announced are begun early, several
at a time, so that their waits overlap. Web servers name the size of a file with each range of it. TensorStore exposes
no sizes of the files in buckets: most formats record where a file must end, which two requests for single bytes prove;
where one does not, the size is searched for with such requests, many at once.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.errors import (
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE, BoundedRange
from orbax_t5x.files.remote.responses import NO_VERSION, BeyondEndError, Response, Version
from orbax_t5x.files.remote.server import PendingRead, ReadAheadBudget, Server
from orbax_t5x.files.transcript import Viewpoint
from orbax_t5x.files.windows import held_bytes, is_held

# One request. Smaller pays for more requests, larger waits longer before the first byte can be used and is dearer to
# repeat.
_PIECE_BYTES = 2 << 20
# Headers are read from blocks of this size, which are kept while the file is parsed.
_BLOCK_BYTES = 1 << 16
_KEPT_BLOCKS = 4
# The first places at which the search for a size looks, and into how many parts a step divides what is left.
_SIZE_POINTS = [(1 << power) - 1 for power in range(16, 46, 2)]
_SIZE_PARTS = 32
# No file is so large, and offsets are signed numbers of 64 bits.
_LARGEST_FILE = 1 << 53


class RemoteFile:
    """Implements `StoredFile`.

    Attributes:
      is_remote: True.
      name: relative to the root.
      path: the URL.
      require_open: raises ValueError after the checkpoint was closed.
    """

    is_remote = True

    def __init__(
        self, server: Server, key: str, name: str, version: Version, require_open: Callable[[], None], limits: Limits
    ):
        self._server = server
        self._key = key
        self._version = version
        self._size: int | None = None
        self._content: bytes | None = None
        self._reads_whole = False
        self._blocks: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._version_lock = threading.Lock()
        self.name: str = name
        self.limits: Limits = limits
        self.path: str = server.url(key)
        self.require_open: Callable[[], None] = require_open

    # -- the size

    @property
    def known_size(self) -> int | None:
        """Implements `StoredFile.known_size`."""
        return self._size

    @property
    def size(self) -> int:
        """Implements `StoredFile.size`."""
        if self._size is None:
            self._size = self._find_size()
        return self._size

    def _find_size(self) -> int:
        _, known = self._server.first_blocks.get(self._key, (b"", None))
        if known is not None:
            return known
        if self._server.is_bounded:
            first = self._answer_inside(BoundedRange.between(0, 1), None)
            if first is None:
                return 0
            if self._size is not None:
                return self._size
        return self._search_size()

    def _search_size(self) -> int:
        low, high = 0, None  # the file has at least `low` bytes, and no byte at `high`
        points = _SIZE_POINTS
        while points:
            found = self._server.have_bytes((self._key, point) for point in points)
            count = found.index(False) if False in found else len(found)
            if count:
                low = points[count - 1] + 1
            if count < len(points):
                high = points[count]
            if high is None:
                if points[-1] >= _LARGEST_FILE:
                    raise CheckpointIOError(
                        "the server sends bytes for any range, whether the file has them or not", path=self.path
                    )
                points = [point << 4 for point in points]
                continue
            step = max(_BLOCK_BYTES, -(-(high - low) // _SIZE_PARTS))
            points = list(range(low + step, high, step))
        # From a byte that is there: behind the last one there is no range to request.
        start = max(0, low - 1)
        rest = self._answer(self._begin(BoundedRange.rest(start, (high or _LARGEST_FILE) - start)), None)
        if not start:
            self._content = rest.data
        return start + len(rest.data)

    def require_size(self, size: int) -> bool:
        """Reports whether the file has exactly this size."""
        if self._size is None and not self._server.is_bounded:
            last, beyond = self._server.have_bytes([(self._key, max(0, size - 1)), (self._key, size)])
            if (last or not size) and not beyond:
                self._size = size
        return self.size == size

    # -- reading

    def load(self, limit: int) -> None:
        """Implements `StoredFile.load`."""
        if self._content is None:
            try:
                answer = self._server.whole([self._key], limit)[0]
            except LimitExceededError:
                return
            self._hold(answer, None)

    def _hold(self, answer: Response | None, leaf: str | None) -> None:
        """Holds all bytes of the file, proven to be of it."""
        self._content = self._proven(answer, leaf).data
        self._size = len(self._content)

    @property
    def _viewpoint(self) -> Viewpoint | None:
        """Labels bytes that another process has read for this process."""
        transcript = self._server.transcript
        return None if transcript is None else transcript.viewpoint

    def _drop(self) -> None:
        """Forgets a small file that another process has read."""
        self._content = None
        self._reads_whole = True

    def _read_whole(self) -> None:
        with self._lock:
            if self._content is None and self._size:
                self._content = self._answer(self._begin(BoundedRange.between(0, self._size)), None).data

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Implements `StoredFile.read`."""
        self.require_open()
        if offset < 0 or size < 0 or (self._size is not None and offset + size > self._size):
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size} requested of a file of {self._size} bytes",
                path=self.path,
                leaf=leaf,
            )
        if (held := held_bytes(self, offset, size)) is not None:
            return bytearray(held)
        if self._content is None and 0 < size <= _BLOCK_BYTES and not self._reads_whole:
            if (small := self._server.whole_if_small(self._key)) is not None:
                self._hold(small, leaf)
                if self._viewpoint is not None:
                    self._server.at_end(self._drop)
                return self.read(offset, size, leaf=leaf)
            return self._read_by_blocks(offset, size, leaf)
        data = bytearray(size)
        if size:
            self.read_into(offset, [np.frombuffer(data, np.uint8)], leaf=leaf)
        return data

    def _read_by_blocks(self, offset: int, size: int, leaf: str | None) -> bytearray:
        data = bytearray()
        while len(data) < size:
            at = offset + len(data)
            number, inside = divmod(at, _BLOCK_BYTES)
            piece = self._block(number, leaf)[inside : inside + size - len(data)]
            if not piece:
                raise CorruptCheckpointError(f"ends before byte {offset + size}", path=self.path, leaf=leaf)
            data += piece
        return data

    def _block(self, number: int, leaf: str | None) -> bytes:
        with self._lock:
            if number in self._blocks:
                return self._blocks[number]
        if number == 0 and (known := self._server.first_blocks.get(self._key)) is not None:
            self._note_size(known[1], leaf)
            return known[0]
        start = number * _BLOCK_BYTES
        stop = start + _BLOCK_BYTES
        if self._size is not None:
            stop = min(stop, self._size)
        answer = self._answer_inside(BoundedRange.between(start, stop), leaf)
        if answer is None:
            # It is the last block, or there is none: a request to the end is answered with what there is.
            answer = self._answer_inside(BoundedRange.rest(start, _BLOCK_BYTES), leaf)
            self._size = start + len(answer.data) if answer is not None else self._size
        block = b"" if answer is None else answer.data
        if number == 0:
            self._server.first_blocks[self._key] = block, self._size
        with self._lock:
            self._blocks[number] = block
            while len(self._blocks) > _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return block

    def tail(self, size: int) -> bytes:
        """Returns the last `size` bytes of a larger file."""
        try:
            answer = self._answer_inside(BoundedRange.last(size), None)
        except UnsupportedCheckpointError:
            return b""
        return b"" if answer is None else answer.data

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredFile.read_into`."""
        size = sum([buffer.nbytes for buffer in buffers])
        self.ahead([(offset, size)], [buffers]).read_into(offset, buffers, leaf=leaf)

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> RemoteReadAhead:
        """Implements `StoredFile.ahead`."""
        self.require_open()
        return RemoteReadAhead(self, _pieces(ranges, into), self._server.ahead)

    def begin_piece(self, piece: _PieceRequest, *, is_awaited: bool) -> PendingRead | bytes:
        """Requests bytes, or takes them from memory; `end_piece` returns them."""
        if (held := held_bytes(self, piece.start, piece.size)) is not None:
            return held.tobytes()
        if self._reads_whole:
            self._read_whole()
        if self._content is not None:
            return self._content[piece.start : piece.stop]
        return self._server.begin(self._key, BoundedRange.between(*piece), is_awaited=is_awaited)

    def end_piece(self, begun: PendingRead | bytes, piece: _PieceRequest, leaf: str | None) -> bytes | None:
        """Returns a piece's bytes, or None if they are in place."""
        self.require_open()
        if isinstance(begun, bytes):
            data = begun
        else:
            answer = self._answer(begun, leaf)
            if answer.is_in_place:
                return None
            data = answer.data
        if len(data) != piece.size:
            raise CorruptCheckpointError(f"ends before byte {piece.stop}", path=self.path, leaf=leaf)
        return data

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Implements `StoredFile.check_unchanged`."""
        self.require_open()
        if self._content is not None and self._viewpoint is None and not is_held(self):
            self._prove(self._server.stat_again([self._key])[0], leaf)

    # -- requests

    def _begin(self, wanted: BoundedRange) -> PendingRead:
        return self._server.begin(self._key, wanted)

    def _answer(self, request: PendingRead, leaf: str | None) -> Response:
        """Waits for the response to a request."""
        try:
            answer = self._proven(self._server.end(request, "reading it", leaf=leaf, is_known=True), leaf)
        except BeyondEndError:
            # Shorter than it was? Then it is another file, and not damage.
            self._prove(self._server.stat_again([self._key])[0], leaf)
            self._compare_sizes(leaf)
            raise
        self._note_size(answer.file_bytes, leaf)
        if not self._version.tag and (answer.data or answer.is_in_place):
            self._server.warn_of_weak_proof()
        return answer

    def _note_size(self, size: int | None, leaf: str | None) -> None:
        """Holds the size that a response names."""
        if size is None:
            return
        if self._size is None:
            self._size = size
        elif size != self._size:
            if self._viewpoint is not None:
                raise self._other_size(self._viewpoint, size, self._size, leaf)
            raise CheckpointGoneError(
                f"changed after the checkpoint was opened: it has {size} bytes, and had {self._size}",
                path=self.path,
                leaf=leaf,
            )

    def _compare_sizes(self, leaf: str | None) -> None:
        """Compares the size with that found by another process."""
        viewpoint, there = self._viewpoint, self._size
        if viewpoint is None or there is None:
            return
        here = RemoteFile(self._server, self._key, self.name, self._version, self.require_open, self.limits).size
        if here != there:
            raise self._other_size(viewpoint, here, there, leaf)

    def _other_size(self, viewpoint: Viewpoint, here: int, there: int, leaf: str | None) -> CheckpointGoneError:
        message, fix = viewpoint.difference("its size in bytes", here, there)
        return CheckpointGoneError(message, path=self.path, leaf=leaf, fix=fix)

    def _answer_inside(self, wanted: BoundedRange, leaf: str | None) -> Response | None:
        """Does `_answer`, or returns None beyond the file's end."""
        try:
            return self._answer(self._begin(wanted), leaf)
        except BeyondEndError:
            return None

    def _proven(self, answer: Response | None, leaf: str | None) -> Response:
        """Returns a response, proven to be of the file that was opened."""
        if answer is None or answer.version != NO_VERSION or answer.data or answer.is_in_place:
            self._prove(answer and answer.version, leaf)
        assert answer is not None
        return answer

    def _prove(self, here: Version | None, leaf: str | None) -> None:
        """Proves that a version is of the file that was opened."""
        viewpoint = self._viewpoint
        with self._version_lock:
            there = self._version
            if here is not None and there.is_followed_by(here):
                self._version = there.joined(here)
                return
        if viewpoint is not None:
            found = "missing" if here is None else str(here) or "not known"
            message, fix = viewpoint.difference("its ETag or generation", found, str(there) or "not known")
            raise CheckpointGoneError(message, path=self.path, leaf=leaf, fix=fix)
        if here is None:
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=self.path, leaf=leaf)
        message = "changed after the checkpoint was opened: its ETag, generation or Last-Modified is another"
        raise CheckpointGoneError(message, path=self.path, leaf=leaf)


class _PieceRequest(NamedTuple):
    """A request for bytes [start, stop), and their memory or None."""

    start: int
    stop: int
    into: memoryview | None

    @property
    def size(self) -> int:
        """The bytes."""
        return self.stop - self.start


def _pieces(ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]]) -> Iterator[_PieceRequest]:
    """Yields the requests for ranges of (offset, size)."""
    for (offset, size), buffers in zip(ranges, itertools.chain(into, itertools.repeat(())), strict=False):
        filled = [buffer for buffer in buffers if buffer.nbytes]
        memory = filled[0].reshape(-1).view(np.uint8).data if len(filled) == 1 else None
        for at in range(0, size, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, size)
            yield _PieceRequest(offset + at, offset + stop, None if memory is None else memory[at:stop])


class RemoteReadAhead:
    """Read-ahead of ranges in order, for a single thread."""

    def __init__(self, file: RemoteFile, pieces: Iterator[_PieceRequest], ahead: ReadAheadBudget):
        self._file = file
        self._pieces = pieces
        self._next = next(pieces, None)
        self._begun: deque[tuple[_PieceRequest, PendingRead | bytes]] = deque()
        self._ahead = ahead
        self._taken = 0

    def __del__(self) -> None:
        # A read that failed leaves requests that are never awaited.
        for _, begun in self._begun:
            if not isinstance(begun, bytes):
                begun.future.cancel()
        self._ahead.give(self._taken)

    def _begin_more(self, *, is_awaited: bool = False) -> None:
        while (piece := self._next) is not None and len(self._begun) < REQUESTS_AT_ONCE:
            if not self._ahead.take(piece.size, needed=not self._begun):
                return
            self._taken += piece.size
            self._next = next(self._pieces, None)
            # The only one is sent by this thread, which waits for it.
            is_awaited = is_awaited and not self._begun and self._next is None
            self._begun.append((piece, self._file.begin_piece(piece, is_awaited=is_awaited)))

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `ReadAhead.read_into`."""
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers if buffer.nbytes]
        ends = list(np.cumsum([view.size for view in views]))
        total = int(ends[-1]) if views else 0
        done = 0
        while done < total:
            self._begin_more(is_awaited=True)
            piece, begun = self._begun.popleft()
            assert piece.start == offset + done, "reads come in the order in which they were announced"
            received = self._file.end_piece(begun, piece, leaf)
            self._taken -= piece.size
            self._ahead.give(piece.size)
            self._begin_more()
            if received is None:
                done += piece.size
                continue
            data = np.frombuffer(received, np.uint8)
            at = 0
            while at < data.size:
                number = bisect.bisect_right(ends, done)
                inside = done - (int(ends[number]) - views[number].size)
                count = min(data.size - at, views[number].size - inside)
                views[number][inside : inside + count] = data[at : at + count]
                at += count
                done += count
