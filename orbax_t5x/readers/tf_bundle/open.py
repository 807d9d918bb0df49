"""TensorFlow V2 tensor bundles, without TensorFlow.

Mesh TensorFlow wrote the public T5 checkpoints in this format. Opening reads the index, a few hundred kilobytes for the
largest T5, and measures the shards. A leaf is a byte range of a shard; any box of it is read by range into the buffer
that wants it, and its checksum is compared wherever all of it was read. An index that breaks a rule of its format is
refused as a whole; an entry that makes no sense costs its own leaf only. No name in a file leads out of the directory.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.places import files_at, within_limits
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.tf_bundle.leaves import BundleLeaves
from orbax_t5x.readers.tf_bundle.proto import BadMessage, BundleHeader, parse_bundle_header
from orbax_t5x.readers.tf_bundle.sstable import Table, is_table

_LOG = logging.getLogger(__name__)

_STATE_FILE = "checkpoint"
# T5X keeps the iterator of each host's training data in a step.
_ITERATOR = re.compile(r"train_ds-[0-9]+-of-[0-9]+\.index", re.ASCII)
# It lists the prefixes of all kept checkpoints; a few kilobytes.
_STATE_BYTES = 1 << 20
# No class of it matches newlines but the quoted text's own end: `\s*` here would make many blank lines quadratic.
_STATE_PATH = re.compile(
    rb"""^[ \t]*model_checkpoint_path[ \t]*:[ \t]*(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)')""", re.M
)
_ESCAPE = re.compile(rb"\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{1,2})|(?P<char>.))", re.S)
_ESCAPED = {bytes([char]): bytes([byte]) for char, byte in zip(b"abfnrtv\\\"'?", b"\a\b\f\n\r\t\v\\\"'?", strict=True)}
_SHARD_SUFFIX = re.compile(r"\.data-\d{5,}-of-\d{5,}$")
_V1_HINT = (
    "a TensorFlow V1 checkpoint (one SSTable for names and values), which is not read; load it with TensorFlow and save"
    " it again with tf.compat.v1.train.Saver(write_version=tf.compat.v1.train.SaverDef.V2)"
)


class BundleLocation(NamedTuple):
    """Directory and prefix of a bundle; `bytes_read` to find out.

    `rebased_from` is the absolute path that the `checkpoint` file names, where that is another directory.
    """

    root: Files
    prefix: str
    rebased_from: str | None = None
    bytes_read: int = 0


def find_bundle(path: str) -> BundleLocation:
    """Finds the bundle of a path."""
    given, index = files_at(path), files_at(f"{path}.index")
    if given.is_directory() and not index.exists():
        return _in_directory(path)
    if path.endswith(".index") and given.exists():
        real = given.path
        path = real if real.endswith(".index") else path
        return _shards_beside(path.removesuffix(".index"))
    if index.exists():
        return _shards_beside(path)
    if _SHARD_SUFFIX.search(path) and given.exists():
        return _find_beside_shard(_SHARD_SUFFIX.sub("", path))
    if given.exists():
        return _of_file(given)
    if not given.is_remote and (first := sorted(glob.glob(f"{glob.escape(path)}-[0-9]*-of-[0-9]*"))[:1]):
        _refuse_v1(*_split_prefix(first[0]))
    raise CheckpointNotFoundError(
        f"no TensorFlow bundle: there is neither such a directory nor {path}.index", path=path
    )


def _split_prefix(path: str) -> tuple[Files, str]:
    directory, name = os.path.split(files_at(path).named)
    return files_at(directory), name


def _shards_beside(prefix: str) -> BundleLocation:
    return BundleLocation(*_split_prefix(prefix))


def _find_beside_shard(prefix: str) -> BundleLocation:
    if not files_at(f"{prefix}.index").exists():
        raise CheckpointNotFoundError("the shard's index is missing", path=f"{prefix}.index")
    return _shards_beside(prefix)


def _of_file(file: Files) -> BundleLocation:
    root, name = _split_prefix(file.path)
    if (state := _state(root, name)) is not None:
        return _named_location(root, *state)
    _refuse_v1(root, name)
    raise CheckpointNotFoundError(f"no TensorFlow bundle: there is no {file.named}.index", path=file.named)


def _refuse_v1(root: Files, name: str) -> None:
    """Refuses a file of TensorFlow's first format."""
    files = files_at(root.path)
    try:
        if is_table(files.file(name)):
            raise UnsupportedCheckpointError(_V1_HINT, path=root.join(name))
    except CheckpointNotFoundError:
        return
    finally:
        files.close()


def _in_directory(path: str) -> BundleLocation:
    root = files_at(path)
    state = _state(root, _STATE_FILE) if root.exists(_STATE_FILE) else None
    if state is not None:
        return _named_location(root, *state)
    names = (name for name in root.names() if name.endswith(".index"))
    bundles = sorted(name for name in names if not _ITERATOR.fullmatch(name))
    if len(bundles) == 1:
        return BundleLocation(root, bundles[0].removesuffix(".index"))
    found = f"{len(bundles)} bundles ({', '.join(bundles[:8])}): name one" if bundles else "nothing that ends in .index"
    raise CheckpointNotFoundError(
        f"no TensorFlow bundle: no {_STATE_FILE!r} file with a model_checkpoint_path, and {found}", path=root.path
    )


def _state(root: Files, name: str) -> tuple[str, int] | None:
    """Reads a `checkpoint` file's model_checkpoint_path, or None."""
    files = files_at(root.path)
    try:
        file = files.file(name)
        data = bytes(file.read(0, min(file.size, _STATE_BYTES)))
    finally:
        files.close()
    match = _STATE_PATH.search(data)
    if match is None:
        return None
    quoted = match[1] if match[1] is not None else match[2]
    try:
        return unescape(quoted).decode("utf-8"), len(data)
    except (UnicodeDecodeError, ValueError, KeyError):
        raise CorruptCheckpointError("its model_checkpoint_path is no text", path=file.path) from None


def unescape(quoted: bytes) -> bytes:
    """Decodes the escapes of protobuf's text format."""

    def byte_of(escape: re.Match[bytes]) -> bytes:
        if escape["octal"]:
            return bytes([int(escape["octal"], 8)])
        return bytes.fromhex(escape["hex"].decode().zfill(2)) if escape["hex"] else _ESCAPED[escape["char"]]

    return _ESCAPE.sub(byte_of, quoted)


def _named_location(root: Files, named: str, bytes_read: int) -> BundleLocation:
    """Returns the location in a `checkpoint` file."""
    if ".." in named.split("/"):
        raise UnsafeCheckpointError(
            f"model_checkpoint_path {named!r} leads out of the directory", path=root.join(_STATE_FILE)
        )
    rebased_from = None
    prefix = named
    if named.startswith("/"):
        # TensorFlow writes absolute paths, and checkpoints get copied.
        prefix = os.path.basename(named)
        if root.is_remote or os.path.realpath(os.path.dirname(named)) != root.path:
            rebased_from = named
            _LOG.warning("%s names %s; reading %s beside it", root.join(_STATE_FILE), named, prefix)
    if not split_name(prefix, path=root.join(_STATE_FILE)):
        raise CorruptCheckpointError(f"model_checkpoint_path {named!r} names no file", path=root.join(_STATE_FILE))
    try:
        root.file(f"{prefix}.index")
    except CheckpointNotFoundError:
        _refuse_v1(root, prefix)
        raise CheckpointNotFoundError(
            f"the {_STATE_FILE!r} file names {named!r}, but there is no {prefix}.index", path=root.path
        ) from None
    return BundleLocation(root, prefix, rebased_from, bytes_read)


_STEP = re.compile(r"-([0-9]{1,18})$")
# The version that this reader is of; a bundle names the oldest reader that may read it.
_READER_VERSION = 1
# More shards than any writer has made; only those that entries name are looked at.
_MAX_SHARDS = 100_000
_ENDIANNESS = {0: "little", 1: "big"}


@within_limits
def open_tf_bundle(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a bundle by its prefix, a file or its directory."""
    place = find_bundle(os.fspath(path))
    files, index_files = place.root, files_at(place.root.path)
    try:
        index = index_files.file(f"{place.prefix}.index")
        header, entries, slices = _read_index(index)
    finally:
        index_files.close()
    leaves = BundleLeaves(files, place.prefix, header)
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
        # None for a shard that no entry names or that is missing.
        "shard_bytes": leaves.named_sizes(),
    }
    if place.rebased_from is not None:
        metadata["rebased_from"] = place.rebased_from
    return metadata


# -- the index


def _read_index(index: StoredFile) -> tuple[BundleHeader, dict[bytes, bytes], dict[bytes, bytes]]:
    """Reads the header and the entries of variables and slices."""
    entries: dict[bytes, bytes] = {}
    slices: dict[bytes, bytes] = {}
    header: BundleHeader | None = None
    for key, value in Table(index).entries():
        if header is None:
            header = _header(index, key, value)
            continue
        index.limits.require_entries(len(entries) + len(slices) + 1, index.path)
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
