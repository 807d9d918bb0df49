"""Journal of a process's durable blocks, with their checksums.

It is in the work directory of the conversion. A line is added when a block and the directories above it are on disk, so
that a journal is true after a kill at any moment. Each line begins with the crc32c of the rest: a torn line ends the
journal. The first line identifies the conversion. The process that writes a journal holds a lock on it, which ends with
the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orbax_t5x.concurrency import await_to_end, reader_pool, run_in_pool
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.paths import Descriptor
from orbax_t5x.lazy.read_stats import ChecksummedRange

_VERSION = 1
_PREFIX = "journal."
_CRC_DIGITS = 8
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Far above the line of a block that was read in thousands of ranges.
_MOST_LINE_BYTES = 16 << 20


class SourceRange(NamedTuple):
    """Checksum of a stored leaf's bytes that were read for a block.

    The leaf is given by its number in the plan.
    """

    leaf: int
    range: ChecksummedRange


class JournalEntry(NamedTuple):
    """A durable block: its number and its checksums.

    They are of its elements and of the ranges read for it. The latter, with those of the other blocks, verify the
    source.
    """

    block: int
    crc: int
    read: tuple[SourceRange, ...]


class Journal:
    """Writer of a journal, for a single event loop."""

    def __init__(self, work: Path, number: int, conversion: str):
        """Creates the journal `number` of a work directory."""
        self._file = Descriptor(journal_path(work, number), _CREATE_FLAGS)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock = asyncio.Lock()
        self._pending: list[tuple[JournalEntry, Any]] = []
        self._append([{"version": _VERSION, "conversion": conversion}])

    async def add(self, entry: JournalEntry, array: Any, sync: Callable[[Sequence[Any]], None]) -> None:
        """Adds an entry, and returns when it is durable."""
        self._pending.append((entry, array))
        async with self._lock:
            batch, self._pending = self._pending, []
            if batch:
                await await_to_end(run_in_pool(reader_pool(), self._flush, batch, sync))

    def _flush(self, batch: Sequence[tuple[JournalEntry, Any]], sync: Callable[[Sequence[Any]], None]) -> None:
        sync([array for _, array in batch])
        self._append([_as_json(entry) for entry, _ in batch])

    def _append(self, values: Sequence[Any]) -> None:
        data = b"".join(map(_line, values))
        while data:
            data = data[os.write(self._file.number, data) :]
        os.fdatasync(self._file.number)

    def close(self) -> None:
        """Closes the file, and releases the lock."""
        self._file.close()


def journal_path(work: Path, number: int) -> Path:
    """Returns a journal's path in its work directory."""
    return work / f"{_PREFIX}{number}"


def journals(work: Path) -> dict[int, Path]:
    """Finds the journals of a work directory, by number."""
    found = {path.name.removeprefix(_PREFIX): path for path in work.glob(f"{_PREFIX}*")}
    return {int(number): path for number, path in sorted(found.items()) if number.isdecimal()}


def is_being_written(path: Path) -> bool:
    """Returns True while a process writes this journal."""
    try:
        with Descriptor(path, _READ_FLAGS) as file:
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_journal(path: Path, conversion: str, blocks: int) -> list[JournalEntry] | None:
    """Reads a journal, or returns None."""
    entries: dict[int, JournalEntry] = {}
    with open(path, "rb", opener=lambda name, _: os.open(name, _READ_FLAGS)) as file:
        first = _parsed(file.readline(_MOST_LINE_BYTES))
        if first is None:  # a kill came before that line was written
            return []
        if first != {"version": _VERSION, "conversion": conversion}:
            return None
        while (entry := _as_entry(_parsed(file.readline(_MOST_LINE_BYTES)))) is not None:
            if entry.block >= blocks or entry.block in entries:
                break
            entries[entry.block] = entry
    return list(entries.values())


def _as_entry(parsed: Any) -> JournalEntry | None:
    """Converts a parsed line to an entry, or returns None."""
    if not (isinstance(parsed, list) and len(parsed) == 3 and isinstance(parsed[2], list)):
        return None
    block, crc, read = parsed
    if not _are_counts([block, crc]) or not all(isinstance(row, list) and _are_counts(row, 6) for row in read):
        return None
    ranges = [SourceRange(leaf, ChecksummedRange(*covered)) for leaf, *covered in read]
    return JournalEntry(block, crc, tuple(ranges)) if all(one.range.start <= one.range.stop for one in ranges) else None


def _are_counts(values: list[Any], length: int = 2) -> bool:
    return len(values) == length and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _as_json(entry: JournalEntry) -> Any:
    return [entry.block, entry.crc, [[leaf, *covered] for leaf, covered in entry.read]]


def _line(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x%s\n" % (CRC32C.extend(0, text), text)


def _parsed(line: bytes) -> Any:
    """Parses a line with its end, or returns None."""
    crc, text = line[:_CRC_DIGITS], line[_CRC_DIGITS:].removesuffix(b"\n")
    if not line.endswith(b"\n") or crc != b"%08x" % CRC32C.extend(0, text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
