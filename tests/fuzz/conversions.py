"""Fuzz targets of what conversions leave beside a destination, and of what others may put there.

A journal is fuzzed by its lines, which are sealed with their checksums. A work directory is described by JSON: the
lines of its journal, and what else is done in it. Whatever is there, a conversion gives the source's values or a typed
error, and follows nothing out of the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.operations.convert.journal import SourceRange, journal_path, read_journal
from orbax_t5x.operations.convert.work_directory import WorkDirectory, work_directory_of
from tests.fuzz import mutations
from tests.fuzz.mutations import ChangeBytes

_BLOCKS = 8
_CONVERSION = "digest"
_ARRAYS = {name: np.arange(48, dtype=np.float32) + number for number, name in enumerate("abc")}
_MOST_ACTIONS = 12


def _sealed(line: bytes) -> bytes:
    return b"%08x%s\n" % (CRC32C.extend(0, line), line)


# -- journals


def journal(directory: Path):
    """Makes the check of a journal's lines."""
    path = journal_path(directory, 0)

    def check(data: bytes) -> None:
        for content in (b"".join(map(_sealed, data.split(b"\n"))), data):
            path.write_bytes(content)
            entries = read_journal(path, _CONVERSION, _BLOCKS)
            if entries is None:
                continue
            numbers = [entry.block for entry in entries]
            assert len(set(numbers)) == len(numbers) and all(0 <= number < _BLOCKS for number in numbers)
            for entry in entries:
                assert 0 <= entry.crc < 1 << 63
                assert all(isinstance(one, SourceRange) and one.range.start <= one.range.stop for one in entry.read)
            # What is read is read again from what it would be written as.
            lines = [[entry.block, entry.crc, [[leaf, *covered] for leaf, covered in entry.read]] for entry in entries]
            header = {"version": 1, "conversion": _CONVERSION}
            path.write_bytes(b"".join(_sealed(json.dumps(line).encode()) for line in (header, *lines)))
            assert read_journal(path, _CONVERSION, _BLOCKS) == entries

    return check


def journals() -> list[bytes]:
    header: list[Any] = [{"version": 1, "conversion": _CONVERSION}]
    ranges = [[0, 0, 16, 7, 0, 1], [1, 16, 32, 9, 64, 4]]
    others = [[], [[0, 1, []]], [[0, 1, ranges], [3, 2**32 - 1, []]], [[7, 5, ranges[:1]], [1, 2, []], [2, 3, ranges]]]
    return [b"\n".join(json.dumps(line).encode() for line in [*header, *lines]) for lines in others]


def edited_lines(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """Lines of which one is edited as JSON, doubled, or taken away."""
    lines = data.split(b"\n")
    at = generator.randrange(len(lines))
    kind = generator.random()
    if kind < 0.7:
        lines[at] = mutations.edited_json(lines[at], generator, change)
    elif kind < 0.8:
        lines[at:at] = [lines[generator.randrange(len(lines))]]
    elif kind < 0.9:
        del lines[at]
    else:
        lines[at] = change(lines[at])
    return b"\n".join(lines)


# -- work directories


class _Killed(BaseException):
    """Stands for a kill."""


def _left_behind(source: Path, out: Path) -> dict[str, bytes]:
    """Returns the files that a conversion leaves which is killed after two blocks."""
    calls = []

    def progress(*seen: Any) -> None:
        calls.append(seen)
        if len(calls) == 2:
            raise _Killed

    # A killed process removes nothing, and its locks are gone.
    with mock.patch.object(WorkDirectory, "__exit__", lambda work, *_: work._lock.close()), suppress(_Killed):
        ot.convert(source, out, format="safetensors", progress=progress)
    work = work_directory_of(out)
    files = {str(path.relative_to(work)): path.read_bytes() for path in sorted(work.rglob("*")) if path.is_file()}
    shutil.rmtree(work)
    assert "journal.1" in files
    return files


def work_directory(directory: Path):
    """Makes the check of a work directory that JSON describes."""
    source, beside, out = directory / "model.safetensors", directory / "beside", directory / "beside" / "out"
    safetensors.numpy.save_file(_ARRAYS, source)
    beside.mkdir()
    left = _left_behind(source, out)
    header = left["journal.1"].split(b"\n")[0] + b"\n"
    victim = directory / "victim"
    (victim / "below").mkdir(parents=True)
    (victim / "thesis.txt").write_text("years of work")
    (victim / "below" / "figure").write_text("1")
    before = _digest(victim)

    def check(data: bytes) -> CheckpointError | None:
        described = _described(data)
        if described is None:
            return None
        lines, actions = described
        work = work_directory_of(out)
        for name, content in left.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        work.chmod(stat.S_IRWXU)
        if lines is not None:
            sealed = (_sealed(json.dumps(line).encode()) for line in lines)
            (work / "journal.1").write_bytes(header + b"".join(sealed))
        for action in actions[:_MOST_ACTIONS]:
            _act(action, work, victim)
        try:
            ot.convert(source, out, format="safetensors")
        except CheckpointError as error:
            assert "not foreseen" not in error.message, repr(error)
            return error
        else:
            assert not out.is_symlink()
            found = safetensors.numpy.load_file(out / "model.safetensors")
            assert found.keys() == _ARRAYS.keys()
            assert all(np.array_equal(found[name], array) for name, array in _ARRAYS.items())
            return None
        finally:
            assert _digest(victim) == before, "something outside the work directory was changed"
            _remove(beside)
            beside.mkdir()

    return check


def _described(data: bytes) -> tuple[list[Any] | None, list[Any]] | None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or not isinstance(actions := parsed.get("actions", []), list):
        return None
    lines = parsed.get("journal")
    return (lines if isinstance(lines, list) else None), actions


def _act(action: Any, work: Path, victim: Path) -> None:
    """Does one thing in a work directory, `[what, name, argument]`; what cannot be done is left out."""
    if not (isinstance(action, list) and len(action) == 3 and all(isinstance(one, str) for one in action)):
        return
    what, name, argument = action
    path = work / name
    if ".." in Path(name).parts or not path.is_relative_to(work):
        return
    try:
        if what == "file":
            path.write_text(argument)
        elif what == "directory":
            path.mkdir(parents=True)
        elif what == "link":
            _remove(path)
            path.symlink_to(victim / argument if argument in ("", "below", "thesis.txt") else argument)
        elif what == "same":
            os.link(victim / "thesis.txt", path)
        elif what == "fifo":
            _remove(path)
            os.mkfifo(path)
        elif what == "mode":
            path.chmod(int(argument, 8) & 0o777, follow_symlinks=not path.is_symlink())
        elif what == "remove":
            _remove(path)
        elif what == "rename":
            path.rename(work / Path(argument).name)
    except (OSError, ValueError, NotImplementedError):
        pass


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        found.update(repr((path.name, path.stat().st_mode, path.is_file() and path.read_bytes())).encode())
    return found.hexdigest()


def work_directories() -> Iterable[bytes]:
    entry = [0, 1234, [[0, 0, 192, 99, 0, 1]]]
    described: list[dict[str, Any]] = [
        {"actions": []},
        {"journal": [], "actions": []},
        {"journal": [entry, [1, 5, []]], "actions": []},
        {"journal": [[2, 0, [[9, 0, 1, 0, 0, 1]]], [1, 1, [[0, 2**60, 2**61, 0, 2**40, 2**40]]]]},
        {"actions": [["link", "blocks", ""], ["file", "journal.1", "x"], ["mode", "journal.1", "666"]]},
        {"actions": [["fifo", "journal.1", ""], ["directory", "replaced", ""], ["same", "stop", ""]]},
        {"actions": [["link", "journal.1", "/dev/zero"], ["remove", "blocks", ""], ["rename", "blocks", "replaced"]]},
        {"actions": [["mode", "", "777"], ["file", "other", ""], ["link", "replaced", "below"]]},
    ]
    return [json.dumps(one).encode() for one in described]
