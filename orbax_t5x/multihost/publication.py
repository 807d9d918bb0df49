"""Publication of one opening in the key-value store of `jax.distributed`: a mark that it has begun, a head, and bytes.

It is removed when every other process has consumed it. One that some process does not consume is removed by the opener:
of calls that not every process makes a while after its end, by the opener's own clock; of collective calls its bytes,
when others follow, so that only the mark is left.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
from typing import Any, NamedTuple

from orbax_t5x.multihost.coordination import read_pieces, waited_for_bytes, write_pieces

_KEYS = "orbax_t5x/catalogue/"
_BEGUN = "orbax_t5x/catalogue_begun/"  # no key below it holds bytes, so that it can be read as text
_EXPIRED = "expired"
# How long after its end a publication is kept for processes that may not ask for it.
_RECENT_SECS = 60.0
# Publications of collective calls whose bytes are kept for slow processes.
_KEPT = 16

_lock = threading.Lock()
_kept: collections.deque[Publication] = collections.deque()


class Publication(NamedTuple):
    """Publication of one opening; of equal calls each has a number, from 0."""

    store: Any
    name: str
    number: int
    is_expired: bool = False

    @property
    def _key(self) -> str:
        return f"{_KEYS}{self.name}/{self.number}"

    @property
    def _begun(self) -> str:
        return f"{_BEGUN}{self.name}/{self.number}"

    # -- the opener

    def begin(self) -> None:
        """Announces the opening."""
        self.store.key_value_set(self._begun, "", allow_overwrite=True)

    def write(self, head: dict[str, Any], data: bytes | None = None) -> None:
        """Writes how the opening ended, and bytes."""
        if data is not None:
            head = {**head, **write_pieces(self.store, self._key, data)}
        self.store.key_value_set_bytes(f"{self._key}/head", json.dumps(head).encode(), allow_overwrite=True)

    def keep(self, is_collective: bool) -> None:
        """Has the publication removed, now or later, where the other processes do not do it."""
        if not is_collective:
            timer = threading.Timer(_RECENT_SECS, self._remove_if_connected)
            timer.daemon = True
            timer.start()
            return
        begun = {key for key, _ in self.store.key_value_dir_get(_BEGUN)}
        with _lock:
            known = [one for one in [*_kept, self] if one._begun in begun]
            _kept.clear()
            _kept.extend(known[-_KEPT:])
        for one in known[:-_KEPT]:
            self.store.key_value_set(one._begun, _EXPIRED, allow_overwrite=True)
            self.store.key_value_delete(one._key)

    def _remove_if_connected(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self._remove()

    def _remove(self) -> None:
        self.store.key_value_delete(self._begun)  # first: whoever waits for the head looks for it
        self.store.key_value_delete(self._key)  # and all keys below

    # -- the other processes

    def head(self, timeout_secs: float) -> dict[str, Any] | None:
        """Waits for the end of the opening; None if the time has passed."""
        found = waited_for_bytes(self.store, f"{self._key}/head", timeout_secs)
        return None if found is None else json.loads(found)

    def data(self, head: dict[str, Any]) -> bytes | None:
        """Returns the bytes that were written; None where they are removed, a ValueError where they are damaged."""
        return read_pieces(self.store, self._key, head)

    def is_removed(self) -> bool:
        """Tests whether nothing is left to wait for."""
        return self not in begun_publications(self.store, self.name)

    def consume(self, consumers: int) -> None:
        """Records that this process needs the publication no more; the last of the consumers removes it."""
        if self.store.key_value_increment(f"{self._key}/consumed", 1) >= consumers:
            self._remove()


def begun_publications(store: Any, name: str) -> list[Publication]:
    """Returns the publications of a call that are not removed, the oldest first."""
    begun = store.key_value_dir_get(f"{_BEGUN}{name}/")
    return sorted(Publication(store, name, int(key.rpartition("/")[2]), text == _EXPIRED) for key, text in begun)
