"""Finds a bundle's directory and prefix by a user's path.

The path is trusted. A `checkpoint` file is not: a relative path in it stays below the file's directory, and
an absolute one, which TensorFlow writes and copying makes wrong, means the file of that name beside it.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from typing import NamedTuple

from orbax_t5x.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.places import files_at
from orbax_t5x.readers.tf_bundle.sstable import is_table

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
        file.load(_STATE_BYTES)
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
