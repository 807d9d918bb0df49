"""TensorFlow V2 tensor bundles, without TensorFlow.

Mesh TensorFlow wrote the public T5 checkpoints in this format. Opening reads the index, a few hundred kilobytes for the
largest T5, and measures the shards. A leaf is a byte range of a shard; any box of it is read by range into the buffer
that wants it, and its checksum is compared wherever all of it was read. An index that breaks a rule of its format is
refused as a whole; an entry that makes no sense costs its own leaf only. No name in a file leads out of the directory.
"""

from __future__ import annotations

import os
import re
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.limits import LEAF_BYTES, Limits, charge_metadata
from orbax_t5x.files.places import files_at
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.tf_bundle.leaves import BundleLeaves
from orbax_t5x.readers.tf_bundle.locate import BundleLocation, find_bundle
from orbax_t5x.readers.tf_bundle.proto import BadMessage, BundleHeader, parse_bundle_header
from orbax_t5x.readers.tf_bundle.sstable import Table

_STEP = re.compile(r"-([0-9]{1,18})$")
# The version that this reader is of; a bundle names the oldest reader that may read it.
_READER_VERSION = 1
# More shards than any writer has made; only those that entries name are looked at.
_MAX_SHARDS = 100_000
_ENDIANNESS = {0: "little", 1: "big"}


def open_tf_bundle(path: str | os.PathLike[str], *, limits: Limits | None = None) -> Checkpoint:
    """Opens a bundle by its prefix, a file or its directory."""
    limits = limits if limits is not None else Limits()
    place = find_bundle(os.fspath(path))
    files, index_files = place.root, files_at(place.root.path)
    try:
        index = index_files.file(f"{place.prefix}.index")
        index.load(limits.index_bytes)
        header, entries, slices = _read_index(index, limits)
    finally:
        index_files.close()
    leaves = BundleLeaves(files, place.prefix, header, limits)
    step = _STEP.search(place.prefix)
    by_name = leaves.leaves(entries, slices)
    return Checkpoint(
        path=place.root.join(place.prefix),
        format="tf_bundle",
        step=int(step[1]) if step else None,
        leaves=by_name,
        metadata=_bundle_metadata(place, header, leaves),
        close=files.close,
        index_bytes=index.size + place.bytes_read,
    )


def _bundle_metadata(place: BundleLocation, header: BundleHeader, leaves: BundleLeaves) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "writer": "TensorFlow",
        "version": header.producer,
        "min_consumer": header.min_consumer,
        "endianness": _ENDIANNESS[header.endianness],
        "num_shards": header.num_shards,
        # None for a shard that no entry names or that is not there. Remote stores do not report it.
        "shard_bytes": leaves.named_sizes(),
    }
    if place.rebased_from is not None:
        metadata["rebased_from"] = place.rebased_from
    return metadata


# -- the index


def _read_index(index: StoredFile, limits: Limits) -> tuple[BundleHeader, dict[bytes, bytes], dict[bytes, bytes]]:
    """Reads the header and the entries of variables and slices."""
    entries: dict[bytes, bytes] = {}
    slices: dict[bytes, bytes] = {}
    header: BundleHeader | None = None
    for key, value in Table(index, limits).entries():
        if header is None:
            header = _header(index, key, value)
            continue
        # Names are longer than the file: a table stores what they share once.
        charge_metadata(LEAF_BYTES + len(key) + len(value), index.path)
        if len(entries) + len(slices) >= limits.entries:
            raise LimitExceededError(f"more than {limits.entries} entries (Limits.entries)", path=index.path)
        (slices if key[0] == 0 else entries)[key] = value
    if header is None:
        raise CorruptCheckpointError("an empty table: the header is missing", path=index.path)
    return header, entries, slices


def _header(index: StoredFile, key: bytes, value: bytes) -> BundleHeader:
    if key:
        raise CorruptCheckpointError(f"the header is missing: the first key is {key[:80]!r}", path=index.path)
    try:
        header = parse_bundle_header(value)
    except BadMessage as problem:
        raise CorruptCheckpointError(f"the header cannot be read: {problem}", path=index.path) from None
    if not 0 < header.num_shards <= _MAX_SHARDS:
        raise CorruptCheckpointError(f"the header has {header.num_shards} shards", path=index.path)
    if header.endianness not in _ENDIANNESS:
        raise UnsupportedCheckpointError(
            f"byte order {header.endianness}; 0 (little) and 1 (big) can be read", path=index.path
        )
    if header.min_consumer > _READER_VERSION:
        raise UnsupportedCheckpointError(
            f"written for readers of version {header.min_consumer} and later, this one is {_READER_VERSION}",
            path=index.path,
        )
    return header
