"""NumPy's `.npz` files: a ZIP archive of arrays.

Stored members are read by range, compressed members whole. Opening reads the archive's directory and the header of each
array.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError, error_at
from orbax_t5x.extras.npz.deflated import DeflatedLeaf, decompress_head
from orbax_t5x.extras.npz.header import LONGEST_FIXED_BYTES, header_bytes, parse_npy_header
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, open_directory_of
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.zip_leaf import ZipLeaf
from orbax_t5x.readers.zip_members import DEFLATED, STORED, Archive

_ARRAY_SUFFIX = ".npy"
# Enough for a local header and an array's own, of nearly all members.
_HEAD_BYTES = 2048
# The tables of codes with which deflate begins take less.
_TABLE_BYTES = 1024
# Deflate makes no more of a byte.
_MOST_EXPANSION = 1032
_METHODS = (STORED, DEFLATED)


def open_npz(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
    """Opens a file."""
    given = files_at(os.fspath(path))
    files, name = open_directory_of(given.named)
    archive = Archive(files.file(name), limits)
    heads = archive.read_heads(_HEAD_BYTES)
    leaves: dict[str, Leaf] = {}
    for member in archive.members:
        leaf = member.removesuffix(_ARRAY_SUFFIX)
        limits.require_name(leaf, archive.file.path)
        if leaf in leaves:
            raise CorruptCheckpointError("two members have this name", path=archive.file.path, leaf=leaf)
        leaves[leaf] = _leaf_of_member(leaf, archive, member, heads, limits)
    return Checkpoint(
        path=given.named,
        format="npz",
        step=None,
        leaves=leaves,
        metadata={"files": [name]},
        close=files.close,
        index_bytes=archive.index_bytes,
    )


def _leaf_of_member(name: str, archive: Archive, member: str, heads: Mapping[str, bytes], limits: Limits) -> Leaf:
    """Makes the leaf of a member, broken if it is unreadable."""
    try:
        return _array_leaf(name, archive, member, heads[member], limits)
    except CheckpointError as error:
        return BrokenLeaf(name, error_at(error, path=archive.file.path, leaf=name))


def _array_leaf(name: str, archive: Archive, member: str, head: bytes, limits: Limits) -> Leaf:
    found = archive.members[member]
    if not member.endswith(_ARRAY_SUFFIX) or found.method not in _METHODS:
        raise UnsupportedCheckpointError(
            f"{member!r} is no array of NumPy, stored or deflated", path=archive.file.path, leaf=name
        )
    data = _array_head(archive, member, head)
    header = parse_npy_header(data)
    limits.require_shape(header.shape, header.dtype)
    if found.size != len(data) + header.nbytes or found.size > _MOST_EXPANSION * found.stored:
        raise CorruptCheckpointError(
            f"{header.dtype.name} of shape {list(header.shape)} takes {header.nbytes} bytes, and its member has "
            f"{found.size - len(data)} in {found.stored}"
        )
    if found.method == DEFLATED:
        return DeflatedLeaf(name, archive, member, len(data), header, limits)
    shape, strides, dtype, swap = header.shape, header.strides, header.dtype, header.swap
    return ZipLeaf(name, archive, member, len(data), shape, strides, dtype, swap=swap, head=data)


def _array_head(archive: Archive, member: str, head: bytes) -> bytes:
    """Reads an array's header; `head` begins the member."""
    found = archive.members[member]
    start = archive.local_start(member, head)

    def first(size: int) -> bytes:
        """Returns bytes of the member.

        Compressed bytes may begin with their tables of codes.
        """
        stored = min(found.stored, size if found.method == STORED else 2 * size + _TABLE_BYTES)
        data = archive.near(start, stored, found.header, head)
        return data[:size] if found.method == STORED else decompress_head(data, size)

    size = header_bytes(first(LONGEST_FIXED_BYTES))
    data = first(size)
    if len(data) != size:
        raise CorruptCheckpointError(f"it ends within its header of {size} bytes")
    return data
