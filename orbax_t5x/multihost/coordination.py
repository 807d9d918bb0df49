"""Access to JAX's coordination service: process numbers, key-value store.

The only module that uses names that JAX keeps private. No public function returns the number of a process before JAX's
backend exists, tests whether it exists, or returns the key-value store.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from jax._src import distributed, xla_bridge

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.native_errors import parse_error

# A message of gRPC has 4 MiB by default.
_PIECE_BYTES = 1 << 20
_PIECE_SECS = 10.0
_GATHERED = "orbax_t5x/gathered/"
_SENT = "orbax_t5x/gathered_sent/"  # no key below it holds bytes, so that it can be read as text
_MOST_GATHERED_BYTES = 1 << 30

_Value = TypeVar("_Value")


def key_value_store() -> Any:
    """Returns the client of the store; RuntimeError if not initialized."""
    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client


def lost_process(error: BaseException, path: str | None) -> CheckpointIOError:
    """Makes the error of a lost process or service."""
    reason = " ".join(str(error).split())
    return CheckpointIOError(f"another process of this call has died, or cannot be reached: {reason}", path=path)


def service_process_id() -> int:
    """Returns the number given to `jax.distributed.initialize`; JAX's may differ."""
    return distributed.global_state.process_id


def service_process_count() -> int:
    """Returns the number of processes in the coordination service."""
    return distributed.global_state.num_processes


def has_backend() -> bool:
    """Tests if JAX has made its backend."""
    return xla_bridge.backends_are_initialized()


def waited_for_key(store: Any, key: str, timeout_secs: float) -> bool:
    """Waits for a key; False after the time."""
    return _waited(store.blocking_key_value_get, key, timeout_secs) is not None


def waited_for_bytes(store: Any, key: str, timeout_secs: float) -> bytes | None:
    """Returns the bytes of a key, or None after the time."""
    return _waited(store.blocking_key_value_get_bytes, key, timeout_secs)


def _waited(get: Callable[[str, int], _Value], key: str, timeout_secs: float) -> _Value | None:
    try:
        return get(key, math.ceil(1000 * timeout_secs))
    except RuntimeError as error:  # one type for every failure; JAX 0.9 has no attribute for its status
        if parse_error(error).status == "DEADLINE_EXCEEDED":
            return None
        raise


def write_pieces(store: Any, key: str, data: bytes) -> dict[str, Any]:
    """Writes bytes, compressed, in pieces; returns the head for `read_pieces`."""
    packed = zlib.compress(data, 1)
    starts = range(0, len(packed), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = packed[start : start + _PIECE_BYTES]
        store.key_value_set_bytes(f"{key}/{number}", piece, allow_overwrite=True)
    return {"pieces": len(starts), "sha256": hashlib.sha256(packed).hexdigest()}


def read_pieces(store: Any, key: str, head: Mapping[str, Any], most_bytes: int) -> bytes | None:
    """Returns written bytes, or None if removed.

    Raises:
      ValueError: they are others, or more than `most_bytes`.
    """
    pieces: list[bytes] = []
    for number in range(head["pieces"]):
        piece = waited_for_bytes(store, f"{key}/{number}", _PIECE_SECS)
        if piece is None:
            return None
        pieces.append(piece)
    packed, unpacking = b"".join(pieces), zlib.decompressobj()
    if hashlib.sha256(packed).hexdigest() != head["sha256"]:
        raise ValueError("other bytes than were written")
    try:
        data = unpacking.decompress(packed, most_bytes + 1)  # one more, so that its end is seen
    except zlib.error as error:
        raise ValueError("other bytes than were written") from error
    if not unpacking.eof or len(data) > most_bytes:
        raise ValueError(f"no end after {len(data)} bytes")
    return data


def send(what: str, process: int, data: bytes) -> None:
    """Sends a process's bytes for `gathered`, in place of earlier bytes."""
    store, name = key_value_store(), _name(what)
    head = write_pieces(store, f"{_GATHERED}{name}/{process}", data)
    store.key_value_set(f"{_SENT}{name}/{process}", json.dumps(head), allow_overwrite=True)


def gathered(what: str, processes: Collection[int] | None) -> list[bytes]:
    """Removes and returns the bytes that processes sent."""
    store, name = key_value_store(), _name(what)
    return list(_gathered(store, name, processes))


def _gathered(store: Any, name: str, processes: Collection[int] | None) -> Iterator[bytes]:
    heads = {int(key.rpartition("/")[2]): text for key, text in store.key_value_dir_get(f"{_SENT}{name}/")}
    for process in sorted(heads) if processes is None else sorted(heads.keys() & set(processes)):
        data = read_pieces(store, f"{_GATHERED}{name}/{process}", json.loads(heads[process]), _MOST_GATHERED_BYTES)
        if data is not None:
            yield data
    for below in (name,) if processes is None else (f"{name}/{process}" for process in processes):
        store.key_value_delete(f"{_SENT}{below}")  # and all keys below
        store.key_value_delete(f"{_GATHERED}{below}")


def _name(what: str) -> str:
    return hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()[:32]
