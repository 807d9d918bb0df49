"""JSON from a checkpoint: one object, UTF-8, no key twice, no `NaN`; anything else is an error that names the file.

Python's own parser accepts more (a repeated key silently wins), and what it lets through would decide where bytes are
read from. Its nesting is bounded by the interpreter's recursion limit, which becomes a typed error here.
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn, cast

from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.storage.paths import Root, io_error

_READ_CHUNK_BYTES = 1 << 24


def read_small(root: Root, name: str, *, limit: int, leaf: str | None = None) -> bytes:
    """All bytes of a file inside the root, which must not hold more than `limit`.

    Raises:
      CheckpointNotFoundError, UnsafeCheckpointError, CorruptCheckpointError, CheckpointIOError: as `Root.open`.
      LimitExceededError: the file is larger than the limit; nothing of it was read.
    """
    fd, found = root.open(name, leaf=leaf)
    path = root.join(name)
    try:
        if found.st_size > limit:
            raise LimitExceededError(f"{found.st_size} bytes, more than Limits.index_bytes = {limit}", path=path)
        pieces: list[bytes] = []
        size = 0
        # A file that grows while it is read ends where it ended when it was opened.
        while size < found.st_size:
            piece = os.pread(fd, min(found.st_size - size, _READ_CHUNK_BYTES), size)
            if not piece:
                raise CorruptCheckpointError(f"ends after {size} bytes; it had {found.st_size}", path=path)
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)
    except OSError as error:
        if isinstance(error, CheckpointIOError):
            raise
        raise io_error(error, "reading it", path=path, leaf=leaf) from error
    finally:
        os.close(fd)


def parse_object(data: bytes, path: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """The JSON object that is all of `data`.

    Args:
      data: the whole file.
      path: the file, for errors.
      allow_nan: accept `NaN` and infinities, which Python's writers produce for metrics.

    Raises:
      CorruptCheckpointError: not UTF-8, not JSON, not an object, nested too deep, or with a key twice in one object.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"not UTF-8: {error.reason} at byte {error.start}", path=path) from error

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise CorruptCheckpointError(f"the JSON key {twice[:200]!r} stands twice in one object", path=path)
        return made

    def constant(name: str) -> NoReturn:
        raise CorruptCheckpointError(f"{name} is not JSON", path=path)

    try:
        parsed = json.loads(text, object_pairs_hook=pairs, parse_constant=None if allow_nan else constant)
    except CorruptCheckpointError:
        raise
    except RecursionError:
        raise CorruptCheckpointError("the JSON is nested too deep", path=path) from None
    except ValueError as error:
        raise CorruptCheckpointError(f"not JSON: {str(error)[:200]}", path=path) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON is a {type(parsed).__name__}, not an object", path=path)
    return cast("dict[str, Any]", parsed)
