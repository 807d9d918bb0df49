"""Access to the coordination service of `jax.distributed`: its key-value store, and the number of this process in it.

The only module that uses names that JAX keeps private. No public function returns the number of a process before JAX's
backend exists, tests whether it exists, or returns the key-value store.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from jax._src import distributed, xla_bridge

# A message of gRPC has 4 MiB by default.
_PIECE_BYTES = 1 << 20
_PIECE_SECS = 10.0


def key_value_store() -> Any:
    """Returns the client of the key-value store; a RuntimeError where `jax.distributed` is not initialized."""
    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client


def waited_for_key(store: Any, key: str, timeout_secs: float) -> bool:
    """Waits until a key of the store is set; False if the time has passed, a RuntimeError if a process has died."""
    try:
        store.blocking_key_value_get(key, math.ceil(1000 * timeout_secs))
    except RuntimeError as error:
        # JAX raises the same type for every failure; the status code at the text's beginning is all that differs.
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def service_process_id() -> int:
    """Returns the number that this process gave to `jax.distributed.initialize`; on TPU JAX's own index may differ."""
    return distributed.global_state.process_id


def service_process_count() -> int:
    """Returns the number of processes that take part in the coordination service."""
    return distributed.global_state.num_processes


def has_backend() -> bool:
    """Tests whether JAX has made its backend, for which it has waited for all processes."""
    return xla_bridge.backends_are_initialized()


def waited_for_bytes(store: Any, key: str, timeout_secs: float) -> bytes | None:
    """Returns the bytes of a key when they are set; None if the time has passed; errors as `waited_for_key`."""
    try:
        return store.blocking_key_value_get_bytes(key, math.ceil(1000 * timeout_secs))
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def write_pieces(store: Any, key: str, data: bytes) -> dict[str, Any]:
    """Writes bytes below a key, in pieces below the limit of a message.

    Returns the head that `read_pieces` needs.
    """
    starts = range(0, len(data), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = data[start : start + _PIECE_BYTES]
        store.key_value_set_bytes(f"{key}/{number}", piece, allow_overwrite=True)
    return {"pieces": len(starts), "sha256": hashlib.sha256(data).hexdigest()}


def read_pieces(store: Any, key: str, head: Mapping[str, Any]) -> bytes | None:
    """Returns the bytes that were written, or None if they are removed.

    Raises:
      ValueError: they are damaged.
    """
    pieces: list[bytes] = []
    for number in range(head["pieces"]):
        piece = waited_for_bytes(store, f"{key}/{number}", _PIECE_SECS)
        if piece is None:
            return None
        pieces.append(piece)
    data = b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != head["sha256"]:
        raise ValueError("other bytes than were written")
    return data
