"""The journal of one process of a conversion: the durable blocks in the work directory, with their checksums.

A line is added when a block and the directories above it are on disk, so that a journal is true after a kill at any
moment. Each line begins with the crc32c of the rest: a torn line ends the journal. The first line identifies the
conversion. The process that writes a journal holds a lock on it, which ends with the process.
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
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.storage import crc32c as _crc

_VERSION = 1
_PREFIX = "journal."
_CRC_DIGITS = 8


class SourceRange(NamedTuple):
    """Range read of a stored leaf for a block: the leaf's number in the plan, and the checksum of some bytes."""

    leaf: int
    range: ChecksummedRange


class JournalEntry(NamedTuple):
    """One durable block.

    Attributes:
      block: its number.
      crc: of its elements, as `readers.box_sums.array_crc` makes it.
      read: checksums of the ranges read for it, which together with those of the other blocks verify the source.
    """

    block: int
    crc: int
    read: tuple[SourceRange, ...]


class Journal:
    """Writer of a journal, for one event loop."""

    def __init__(self, work: Path, number: int, conversion: str):
        """Creates the journal `number` of a work directory; `conversion` is the digest of the conversion."""
        self._file = os.open(journal_path(work, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock = asyncio.Lock()
        self._pending: list[tuple[JournalEntry, Any]] = []
        self._append([{"version": _VERSION, "conversion": conversion}])

    async def add(self, entry: JournalEntry, array: Any, sync: Callable[[Sequence[Any]], None]) -> None:
        """Adds an entry, and returns when it is durable; entries added meanwhile are flushed together.

        Args:
          entry: of a block that was written.
          array: that the block belongs to.
          sync: makes the data of some arrays durable.
        """
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
            data = data[os.write(self._file, data) :]
        os.fdatasync(self._file)

    def close(self) -> None:
        """Closes the file, and releases the lock."""
        os.close(self._file)


def journal_path(work: Path, number: int) -> Path:
    """Returns the path of the journal of a number in a work directory."""
    return work / f"{_PREFIX}{number}"


def journals(work: Path) -> dict[int, Path]:
    """Finds the journals of a work directory, by number."""
    found = {path.name.removeprefix(_PREFIX): path for path in work.glob(f"{_PREFIX}*")}
    return {int(number): path for number, path in sorted(found.items()) if number.isdecimal()}


def is_being_written(path: Path) -> bool:
    """Returns True while a process writes this journal."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_journal(path: Path, conversion: str) -> list[JournalEntry] | None:
    """Reads the entries of a journal up to the first torn line; returns None for one of another conversion."""
    lines = path.read_bytes().split(b"\n")
    first = _parsed(lines[0])
    if first is None:  # a kill came before that line was written
        return []
    if first != {"version": _VERSION, "conversion": conversion}:
        return None
    entries: list[JournalEntry] = []
    for line in lines[1:]:
        parsed = _parsed(line)
        if parsed is None:
            break
        block, crc, read = parsed
        ranges = tuple([SourceRange(leaf, ChecksummedRange(*range)) for leaf, *range in read])
        entries.append(JournalEntry(block, crc, ranges))
    return entries


def _as_json(entry: JournalEntry) -> Any:
    return [entry.block, entry.crc, [[leaf, *covered] for leaf, covered in entry.read]]


def _line(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x%s\n" % (_crc.extend(0, text), text)


def _parsed(line: bytes) -> Any:
    """Parses a line; returns None for a torn one."""
    crc, text = line[:_CRC_DIGITS], line[_CRC_DIGITS:]
    return json.loads(text) if text and crc == b"%08x" % _crc.extend(0, text) else None
