"""Small arrays, decoded many at a time.

They are not opened in TensorStore. In an OCDBT database a node of the tree holds the values of thousands of them. It is
read once; small values beside the tree are read by windows of their data file. Chunks that are local files are read by
themselves. TensorStore reads what is encoded in an unusual way, or is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import reader_pool, run_in_pool, waiting_pool
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.interface import Named, StoredBytes
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.box import box_slices, intersect
from orbax_t5x.lazy.leaf import BlockingLeaf, FileExtent, HeldRead, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.array_kind import SMALL_BYTES, ArrayKind
from orbax_t5x.readers.ocdbt_values import OcdbtValues, ValueLocation
from orbax_t5x.readers.tensorstore_leaf import TensorStoreLeaf
from orbax_t5x.readers.tensorstore_specs import open_known

# Decoded in a call.
_TOGETHER_BYTES = 1 << 20


class StoredValues(NamedTuple):
    """Values of a database that are an array's chunks.

    Attributes:
      values: the chunks, or their places.
      file: of these places.
      extent: the bytes of the file that hold the chunks, none if all are in the tree; or None if others are among them.
    """

    values: tuple[bytes | ValueLocation, ...]
    file: StoredBytes
    extent: FileExtent | None

    @classmethod
    def find(cls, database: OcdbtValues, kind: ArrayKind, name: str) -> StoredValues | None:
        """Finds an array's values, unless they lie apart."""
        prefix = f"{name}/" if name else ""
        values: list[bytes | ValueLocation] = []
        beside: list[ValueLocation] = []
        for key in kind.stored_keys:
            value = database.find(prefix + key)
            if value is None or (len(value) if isinstance(value, bytes) else value.size) > kind.most_encoded:
                return None
            values.append(value)
            if not isinstance(value, bytes):
                beside.append(value)
        if not beside:
            return cls(tuple(values), database.in_tree.file, database.in_tree)
        start = min([one.offset for one in beside])
        stop = max([one.offset + one.size for one in beside])
        if {one.file for one in beside} != {beside[0].file} or stop - start > SMALL_BYTES:
            return None
        try:
            file = database.file(beside[0].file)
        except CheckpointError:  # the read names it
            return None
        is_near = stop - start - sum([one.size for one in beside]) < MAX_GAP_BYTES
        return cls(tuple(values), file, FileExtent(file, start, stop) if is_near else None)


class ArrayPlace(NamedTuple):
    """Place of an array: the values that hold its chunks, its name among them, and how TensorStore reads it.

    Attributes:
      values: Files of a directory, or values of a database.
      name: Prefix of the keys of its chunks, without a slash at the end.
      spec: Makes TensorStore's spec without metadata; may block.
    """

    values: Named
    name: str
    spec: Callable[[], dict[str, Any]]


def chunked_leaf(name: str, path: str, kind: ArrayKind, place: ArrayPlace, **options: Any) -> TensorStoreLeaf:
    """Makes the leaf of an array; large ones TensorStore reads."""

    def open() -> ts.TensorStore:
        return open_known({**place.spec(), "metadata": kind.metadata}, kind.context)

    values: StoredValues | None = None
    is_small = kind.is_small
    if is_small and isinstance(place.values, OcdbtValues):
        values = StoredValues.find(place.values, kind, place.name)
        is_small = values is not None
    elif options["root"].is_remote:
        is_small = False  # TensorStore requests many at a time
    if is_small:
        return SmallArrayLeaf(name, path, kind, open, place, values, **options)
    return TensorStoreLeaf(name, path, kind, open, **options)


class SmallArrayLeaf(TensorStoreLeaf, BlockingLeaf):
    """Leaf of a small array."""

    __slots__ = ("_place", "_values")

    def __init__(
        self,
        name: str,
        path: str,
        kind: ArrayKind,
        open: Callable[[], ts.TensorStore],
        place: ArrayPlace,
        values: StoredValues | None,
        **options: Any,
    ):
        super().__init__(name, path, kind, open, **options)
        self._place = place
        self._values = values

    @property
    def extent(self) -> FileExtent | None:
        return None if self._values is None else self._values.extent

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        pool = waiting_pool() if self.is_remote else reader_pool()
        await run_in_pool(pool, self.read_blocking, requests, stats)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self.begin(stats)
        kind = self._kind
        requests = [request for request in requests if request.out.size]
        try:
            wanted = [any(intersect(box, one.box) is not None for one in requests) for box in kind.boxes]
            stored = self.stored_chunks(wanted)
            try:
                [array] = kind.arrays([stored])
                absent = self._fill_absent(array, wanted, stored)
            except ValueError:  # TensorStore decides
                array = self.opened()
                for box, out in requests:
                    ts.array(out, write=True, copy=False).write(array[box_slices(box)]).result()
                self._add_sums(requests, stats)
                absent = 0
            else:
                self.copy(requests, array, stats)
        except Exception as error:
            # In files that changed meanwhile this is no damage.
            if isinstance(error, CorruptCheckpointError) or not isinstance(error, CheckpointError):
                self._files.check_unchanged(leaf=self.name)
            if isinstance(error, CheckpointError):
                raise
            raise self._typed(error) from error
        stats.count(self.bytes_of(tuple([request.box for request in requests])), fill_chunks=absent)

    @classmethod
    def read_held(cls, reads: Sequence[HeldRead], stats: ReadStats) -> int:
        by_kind: dict[ArrayKind, list[tuple[SmallArrayLeaf, Sequence[Request]]]] = {}
        for leaf, requests, _ in reads:
            assert isinstance(leaf, SmallArrayLeaf)
            by_kind.setdefault(leaf._kind, []).append((leaf, requests))
        wanted = 0
        for kind, alike in by_kind.items():
            step = max(1, _TOGETHER_BYTES // max(1, len(kind.boxes) * kind.chunk_bytes))
            for start in range(0, len(alike), step):
                wanted += _read_alike(kind, alike[start : start + step], stats)
        return wanted

    def begin(self, stats: ReadStats) -> None:
        """Proves that the leaf can be read, and its files are unchanged."""
        self._root.require_open()
        self.raise_error()
        if self.is_remote:
            stats.watch(self._files)
        elif not self._files.was_checked(stats):
            self._files.check_once(stats, leaf=self.name)

    def stored_chunks(self, wanted: Sequence[bool]) -> list[bytes | None]:
        """Reads wanted chunks as they are stored; None for the rest."""
        return [self._stored_chunk(number) if is_wanted else None for number, is_wanted in enumerate(wanted)]

    def _stored_chunk(self, number: int) -> bytes | None:
        """Reads a chunk as it is stored, or returns None if it is absent."""
        if self._values is None:
            key = self._key(number)
            try:
                return self._place.values.read_whole(key, limit=self._kind.most_encoded, leaf=self.name)
            except CheckpointNotFoundError:
                return None
            except LimitExceededError as error:  # no codec makes so much of a chunk
                raise CorruptCheckpointError(error.message, path=error.path, leaf=error.leaf) from None
        value = self._values.values[number]
        if isinstance(value, bytes):
            return value
        data = np.empty(value.size, np.uint8)
        self._values.file.read_into(value.offset, [data], leaf=self.name)
        return data.tobytes()

    def _key(self, number: int) -> str:
        name, key = self._place.name, self._kind.stored_keys[number]
        return f"{name}/{key}" if name else key

    def _fill_absent(self, array: np.ndarray, wanted: Sequence[bool], stored: Sequence[bytes | None]) -> int:
        """Fills wanted chunks that are not stored; counts them."""
        kind, absent = self._kind, 0
        for number, (is_wanted, value) in enumerate(zip(wanted, stored, strict=True)):
            if is_wanted and value is None:
                if kind.fill_value is None:
                    message = f"reading it: the chunk {self._key(number)} is missing"
                    raise CorruptCheckpointError(message, path=self._place.values.path, leaf=self.name)
                array[(*box_slices(kind.boxes[number]), ...)] = kind.fill_value
                absent += 1
        return absent

    def copy(self, requests: Sequence[Request], array: np.ndarray, stats: ReadStats) -> None:
        """Copies boxes out of the decoded array."""
        for box, out in requests:
            out[...] = array if out.shape == array.shape else array[box_slices(box)]
        if self._sums is not None:
            self._add_sums(requests, stats)


def _read_alike(kind: ArrayKind, reads: Sequence[tuple[SmallArrayLeaf, Sequence[Request]]], stats: ReadStats) -> int:
    """Reads whole arrays of a kind; returns the wanted bytes."""
    every = [True] * len(kind.boxes)
    try:
        for leaf, _ in reads:
            leaf.begin(stats)
        arrays = kind.arrays([leaf.stored_chunks(every) for leaf, _ in reads])
    except (ValueError, CheckpointError):  # one by one, so that an error names the right leaf
        for leaf, requests in reads:
            leaf.read_blocking(requests, stats)
        return 0
    for (leaf, requests), array in zip(reads, arrays, strict=True):
        leaf.copy(requests, array, stats)
    return sum([leaf.bytes_of(tuple([request.box for request in requests])) for leaf, requests in reads])
