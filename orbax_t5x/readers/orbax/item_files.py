"""Finds the files of an Orbax item beside its list of names.

They are strings, checksums, metadata of arrays, a database. A local item is listed, and what TensorStore will open is
proven to be plain files inside the root. Of a remote one the files that Orbax may have written are statted: web servers
list nothing, and a list of a bucket names every chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orbax_t5x.files.interface import Files, Snapshot
from orbax_t5x.readers.orbax.metadata import ARRAY_METADATAS, CHECKSUMS_FILE, STRINGS_FILE, inside
from orbax_t5x.readers.orbax.steps import MANIFEST_FILE, PROCESS_PREFIX

# Files of an OCDBT database: its manifest, its tables, and those of single processes.
_DATABASE = frozenset({MANIFEST_FILE, "d"})
# Each process of a save writes one file of metadata; so many are requested at once.
_METADATA_FILES_AT_ONCE = 16


class ItemFiles(NamedTuple):
    """Files and subdirectories of an item."""

    manifest: bool
    strings: bool
    checksums: bool
    array_metadatas: Sequence[str]
    database: Sequence[str]


def find_item_files(store: Files, item: str) -> ItemFiles:
    """Finds the files of an item."""
    if store.is_remote:
        return _find_remote(store, item)
    entries = store.entries(item)
    metadatas: list[str] = []
    if ARRAY_METADATAS in entries:
        inner = inside(item, ARRAY_METADATAS)
        store.require_plain(inner)
        metadatas = sorted(store.entries(inner))
    return ItemFiles(
        manifest=MANIFEST_FILE in entries and store.has_file(inside(item, MANIFEST_FILE)),
        strings=STRINGS_FILE in entries,
        checksums=CHECKSUMS_FILE in entries,
        array_metadatas=metadatas,
        database=sorted(name for name in entries if name in _DATABASE or name.startswith(PROCESS_PREFIX)),
    )


def stat_ahead(files: Files, beside: str) -> None:
    """Stats the files of a remote item in a batch."""
    if files.is_remote:
        files.stat_ahead(_first_names(), beside=[beside])


def _first_names() -> list[str]:
    return [MANIFEST_FILE, STRINGS_FILE, CHECKSUMS_FILE, *_metadata_names(0)]


def _find_remote(store: Files, item: str) -> ItemFiles:
    manifest, strings, checksums, *found = store.has_files([inside(item, name) for name in _first_names()])
    metadatas: list[str] = []
    while True:
        names = _metadata_names(len(metadatas))
        count = found.index(False) if False in found else len(found)
        metadatas += [name.partition("/")[2] for name in names[:count]]
        if count < len(names):
            break
        found = store.has_files([inside(item, name) for name in _metadata_names(len(metadatas))])
    return ItemFiles(manifest, strings, checksums, metadatas, [MANIFEST_FILE])


def _metadata_names(first: int) -> list[str]:
    return [f"{ARRAY_METADATAS}/process_{number}" for number in range(first, first + _METADATA_FILES_AT_ONCE)]


def database_files(store: Files, item: str, found: ItemFiles) -> Snapshot:
    """Returns the files of an item's database."""
    store.require_plain(item)
    return Snapshot(store, [inside(item, name) for name in found.database], inside(item, MANIFEST_FILE))
