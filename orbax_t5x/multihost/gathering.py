"""Gathers bytes of all processes on one, through the key-value store of `jax.distributed`.

Each process sends its own once, and waits for no one; the one that needs them reads them after a barrier of its caller.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterator
from typing import Any

from orbax_t5x.multihost.coordination import key_value_store, read_pieces, write_pieces

_KEYS = "orbax_t5x/gathered/"
_SENT = "orbax_t5x/gathered_sent/"  # no key below it holds bytes, so that it can be read as text
_MOST_BYTES = 1 << 30


def send(what: str, process: int, data: bytes) -> None:
    """Sends the bytes of a process to the one that gathers `what`; they replace those of an earlier call."""
    store, name = key_value_store(), _name(what)
    head = write_pieces(store, f"{_KEYS}{name}/{process}", zlib.compress(data, 1))
    store.key_value_set(f"{_SENT}{name}/{process}", json.dumps(head), allow_overwrite=True)


def gathered(what: str, processes: Collection[int] | None) -> list[bytes]:
    """Returns the bytes that processes have sent, and removes them.

    Args:
      what: as in `send`.
      processes: whose bytes are read; None for all that have sent some.

    Raises:
      ValueError: what one of them sent is damaged.
    """
    store, name = key_value_store(), _name(what)
    return list(_gathered(store, name, processes))


def _gathered(store: Any, name: str, processes: Collection[int] | None) -> Iterator[bytes]:
    heads = {int(key.rpartition("/")[2]): text for key, text in store.key_value_dir_get(f"{_SENT}{name}/")}
    for process in sorted(heads) if processes is None else sorted(heads.keys() & set(processes)):
        packed = read_pieces(store, f"{_KEYS}{name}/{process}", json.loads(heads[process]))
        if packed is not None:
            yield _unpacked(packed)
    for below in (name,) if processes is None else (f"{name}/{process}" for process in processes):
        store.key_value_delete(f"{_SENT}{below}")  # and all keys below
        store.key_value_delete(f"{_KEYS}{below}")


def _unpacked(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError("other bytes than were sent") from error
    if not unpacking.eof:
        raise ValueError(f"no end after {len(data)} bytes")
    return data


def _name(what: str) -> str:
    return hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()[:32]
