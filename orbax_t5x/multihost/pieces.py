"""Bytes in the key-value store of `jax.distributed`, in pieces below the limit of a message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from orbax_t5x.multihost.coordination import waited_for_bytes

# A message of gRPC has 4 MiB by default.
_PIECE_BYTES = 1 << 20
_PIECE_SECS = 10.0


def write_pieces(store: Any, key: str, data: bytes) -> dict[str, Any]:
    """Writes bytes below a key; returns what `read_pieces` needs to know of them."""
    starts = range(0, len(data), _PIECE_BYTES)
    for number, start in enumerate(starts):
        piece = data[start : start + _PIECE_BYTES]
        store.key_value_set_bytes(f"{key}/{number}", piece, allow_overwrite=True)
    return {"pieces": len(starts), "sha256": hashlib.sha256(data).hexdigest()}


def read_pieces(store: Any, key: str, head: Mapping[str, Any]) -> bytes | None:
    """Returns the bytes that were written; None where they are removed, a ValueError where they are damaged."""
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
