"""Checkpoints that Orbax wrote, T5X's among them.

Roots, steps and items become leaves that TensorStore reads. An item's `_METADATA` names the leaves; every array is
opened (for its shape and dtype, some hundred bytes each) with a spec of our own and nothing else is read. A step's
items are its subdirectories with that file. The files' contents decide no path outside the directory that was opened,
no class and no setting: before TensorStore sees a directory, everything in it has been proven to be a plain file inside
the root. A leaf whose array cannot be opened is listed with its error; the others can be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Fix,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import LEADS_OUT, is_name
from orbax_t5x.files.places import answered, files_at, within_limits
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.provenance import records as provenance
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect import is_file, subdirectories
from orbax_t5x.readers.leaves import BrokenLeaf, EmptyLeaf, KnownLeaf
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.orbax.arrays import ItemArrays, database_files, find_item_files, stat_ahead
from orbax_t5x.readers.orbax.metadata import (
    CHECKSUMS_FILE,
    METADATA_FILE,
    UNTYPED,
    NodeMetadata,
    inside,
    read_item_metadata,
    read_prng_impls,
    read_strings,
)
from orbax_t5x.readers.orbax.steps import (
    MANIFEST_FILE,
    MSGPACK_FILE,
    STEP_METADATA_FILE,
    are_checkpoints,
    deleted_item,
    is_early_item,
    is_item,
    is_step_directory,
    is_t5x_step,
    is_temporary,
    item_names,
    items_in,
    lost_items,
    newest_directory,
    newest_first,
    step_of_name,
)
from orbax_t5x.readers.tensorstore_specs import TensorStoreValues, make_context
from orbax_t5x.trees.dtypes import kind_of

_aggregate = on_demand.function("orbax_t5x.readers.orbax.aggregate", "Aggregate")  # checkpoints of old Orbax only
# Of items with checksums only.
_read_item_sums = on_demand.function("orbax_t5x.readers.orbax.checksums", "read_item_sums")
_string_checksums = on_demand.function("orbax_t5x.readers.orbax.checksums", "string_checksums")

# Stands for dtypes of leaves that are no arrays of numbers.
_NO_NUMBERS = np.dtype(object)

_logger = logging.getLogger(__name__)


@within_limits
def open_orbax(path: str | os.PathLike[str], *, item: str | None = None) -> Checkpoint:
    """Opens a root (its newest step), a step or an item."""
    files = files_at(os.fspath(path))
    directory = files.path
    if is_temporary(directory):
        raise CheckpointNotFoundError(
            "an unfinished save: Orbax renames this directory when it is done", path=directory
        )
    if files.has_file(METADATA_FILE) or files.has_file(MANIFEST_FILE) or is_early_item(files):
        return _open_single_item(files_at(directory), item)
    if not is_step_directory(directory):
        steps = (step for step in newest_first(directory) if not is_t5x_step(os.path.join(directory, step.name)))
        newest = newest_directory(directory, steps)
        if newest is None:
            raise CheckpointNotFoundError(
                "neither an Orbax item, nor a step, nor a root with a finished step", path=directory
            )
        directory = newest
        if is_item(directory):
            opened = _open_single_item(files_at(directory), item)
            opened.step = step_of_name(os.path.basename(directory))
            return opened
    return _open_step(files_at(directory), item)


def _open_single_item(files: Files, item: str | None) -> Checkpoint:
    """Opens an item by its own path."""
    directory = files.path
    parent, name = os.path.split(directory)
    if item is not None and item != name:
        raise CheckpointNotFoundError(f"this is an item itself, so there is no item {item!r} in it", path=directory)
    step_name = os.path.basename(parent)
    stat_ahead(files, STEP_METADATA_FILE)
    # A parent without Orbax's marker is a step only where its name can hardly mean anything else (`run_2024` can).
    in_step = is_file(parent, STEP_METADATA_FILE) or step_name.isdecimal()
    if in_step and deleted_item(parent) == name:
        raise _being_deleted(directory)
    opened = _OrbaxOpening(files)
    return opened.checkpoint({"": ""}, step=step_of_name(step_name if in_step else name))


def _open_step(root: Files, item: str | None) -> Checkpoint:
    opened = _OrbaxOpening(root)
    if item is not None and root.is_remote and is_name(item) and is_item(root.join(item)):
        return opened.checkpoint({item: ""}, step=step_of_name(os.path.basename(root.path)), items=[item])
    names = item_names(root.path)
    deleted = deleted_item(root.path)
    if deleted in names:
        if item == deleted or names == [deleted]:
            raise _being_deleted(root.join(deleted))
        _logger.warning("%s: the item %r is left out: its deletion was begun and not finished", root.path, deleted)
        names.remove(deleted)
    lost = lost_items(root.path, items_in(opened.step_metadata), names)
    broken = {name: _lost(root, name, names) for name in lost if item in (None, name)}
    for error in broken.values():
        if item is not None or not names or isinstance(error, UnsafeCheckpointError):
            raise error
    if item is not None:
        if item not in names:
            if item in subdirectories(root.path).outside:
                raise UnsafeCheckpointError(LEADS_OUT, path=root.join(item))
            raise CheckpointNotFoundError(
                f"no item {item!r} with arrays here; there is {_listed(names)}", path=root.path
            )
        prefixes = {item: ""}
    elif len(names) == 1 and not broken:
        prefixes = {names[0]: ""}
    elif names:
        if are_checkpoints(root.path, names):
            raise UnsupportedCheckpointError(
                f"no step, but a directory of checkpoints: {_listed(names)}; open one of them by its own path, or "
                "restore from several as a dict of names and paths",
                path=root.path,
            )
        prefixes = {name: f"{name}/" for name in names}
    else:
        raise _no_items(root, opened.step_metadata)
    return opened.checkpoint(prefixes, step=step_of_name(os.path.basename(root.path)), items=names, broken=broken)


def _being_deleted(directory: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        "the deletion of this item was begun and not finished, so it may lack any of its files; delete it again to "
        "finish",
        path=directory,
    )


def _lost(root: Files, item: str, names: list[str]) -> CheckpointError:
    """Makes the error of a recorded item that cannot be opened."""
    path = root.join(item)
    if item in subdirectories(root.path).outside:
        return UnsafeCheckpointError(LEADS_OUT, path=path)
    message = f"the metadata of the step name this item, and it has no {METADATA_FILE}, so the names of its leaves are"
    fix = Fix.setting(f"restore only another one with {{}}: {_listed(names)}", item=...) if names else None
    return CorruptCheckpointError(f"{message} unknown", path=path, fix=fix)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _no_items(root: Files, step_metadata: Mapping[str, Any]) -> CheckpointError:
    """Makes the error of a step without anything to read."""
    inside, outside = subdirectories(root.path)
    if outside:
        return UnsafeCheckpointError(LEADS_OUT, path=root.join(min(outside)))
    for entry in sorted(inside):
        if is_file(os.path.join(root.path, entry), MANIFEST_FILE):
            return CorruptCheckpointError(
                f"{METADATA_FILE} is missing, so the names of its leaves are unknown", path=root.join(entry)
            )
    handlers = step_metadata.get("item_handlers")
    if isinstance(handlers, Mapping) and handlers:
        writers = ", ".join(f"{name!r} by {handler!r}" for name, handler in sorted(handlers.items()))
        return UnsupportedCheckpointError(
            f"no item of this step holds arrays; it was written with {writers}", path=root.path
        )
    return CheckpointNotFoundError("no item of this step holds arrays", path=root.path)


def read_step_metadata(root: Files) -> dict[str, Any]:
    """Reads `_CHECKPOINT_METADATA`, or returns {}; imports no handlers."""
    try:
        data = root.read_whole(STEP_METADATA_FILE, limit=root.limits.json_bytes, bound="Limits.json_bytes")
    except CheckpointNotFoundError:
        return {}
    return parse_object(data, root.join(STEP_METADATA_FILE), allow_nan=True)


class _OrbaxOpening:
    """A checkpoint during its opening."""

    def __init__(self, root: Files):
        self._root = root
        self._context = make_context()
        self._aggregates: dict[str, Any] = {}
        self._leaves: dict[str, Leaf] = {}
        self._empties: dict[str, Any] = {}
        self._sequences: set[str] = set()
        self._bytes = 0
        if root.is_remote:
            names = [STEP_METADATA_FILE, METADATA_FILE]
            found = [name for name, is_there in zip(names, root.has_files(names), strict=True) if is_there]
            root.read_ahead(found, limit=root.limits.index_bytes)
        self.step_metadata = read_step_metadata(root)

    def checkpoint(
        self,
        prefixes: Mapping[str, str],
        *,
        step: int | None,
        items: list[str] | None = None,
        broken: Mapping[str, CheckpointError] = MappingProxyType({}),
    ) -> Checkpoint:
        """Opens items; a broken item is one broken leaf."""
        described = {}
        broken = {**broken}
        for item, prefix in prefixes.items():
            try:
                described[item] = self._add_item(item, prefix)
            except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
                broken[item] = error
                if prefixes.keys() <= broken.keys():
                    raise
                # The others open; a restore that wants this one fails.
                for found in (self._leaves, self._empties):
                    for name in [name for name in found if name.startswith(prefix)]:
                        del found[name]
                self._sequences = {name for name in self._sequences if not name.startswith(prefix)}
        for item, error in broken.items():
            self._leaves[item] = BrokenLeaf(item, error)
        single = next(iter(described.values())) if len(described) == 1 else {}
        metadata = {
            "custom_metadata": single.get("custom_metadata"),
            "items": described,
            "item_names": list(items or []),
            "step_metadata": self.step_metadata,
        }
        return Checkpoint(
            path=self._root.join(next(iter(prefixes)))
            if len(prefixes) == 1 and next(iter(prefixes))
            else self._root.path,
            format="orbax",
            step=step,
            leaves=self._leaves,
            empties=self._empties,
            sequences=self._sequences,
            metadata=metadata,
            close=self._root.close,
            index_bytes=self._bytes,
        )

    def _add_item(self, item: str, prefix: str) -> dict[str, Any]:
        """Adds an item's leaves."""
        if is_early_item(self._root, item):
            metadata = self._aggregate(item).metadata()
        else:
            metadata = read_item_metadata(self._root, item)
        self._bytes += metadata.nbytes
        directory = self._root.locate(item) if item else self._root.path
        files = find_item_files(self._root, item)
        ocdbt = files.manifest if metadata.use_ocdbt is None else metadata.use_ocdbt
        # Orbax makes no database for an item of only empty containers and strings.
        has_arrays = any(not node.is_empty and node.value_type != "string" for node in metadata.nodes)
        if ocdbt and not files.manifest and has_arrays:
            raise CorruptCheckpointError(f"{MANIFEST_FILE} is missing, so the arrays cannot be found", path=directory)
        database = values = None
        if ocdbt and files.manifest:
            database = database_files(self._root, item, files)
            try:
                values = OcdbtValues(self._root, item)
            except (UnsupportedCheckpointError, LimitExceededError):  # TensorStore may read it
                if (kvstore := self._root.kvstore(item)) is None:
                    raise
                values = TensorStoreValues(kvstore, directory, self._context)
                answered(["database", directory], values.check)
        impls = read_prng_impls(self._root, item, files.array_metadatas)
        # The first versions told strings by their file alone.
        texts = [node.param for node in metadata.nodes if node.value_type in ("string", UNTYPED)]
        strings = read_strings(self._root, item, texts) if files.strings else {}
        sums: Mapping[str, Any] = {}
        if files.checksums:
            params = [node.param for node in metadata.nodes if not node.is_empty]
            sums = _read_item_sums(self._root, inside(item, CHECKSUMS_FILE), params)
        self._sequences.update(prefix + name if name else prefix.rstrip("/") for name in metadata.sequences)
        arrays = []
        for node in metadata.nodes:
            name = prefix + node.name if node.name else prefix.rstrip("/")
            if node.is_empty:
                self._empties[name] = node.empty_value
            elif node.param in strings or (node.value_type == "string" and not node.skipped):
                self._add_string(name, node.param, strings, directory, sums)
            elif node.skipped:
                self._add_aggregated(name, item, node)
            else:
                arrays.append(node._replace(name=name))
        self._add_empty_arrays(prefix, metadata.custom_metadata, directory)
        opener = ItemArrays(*(self._root, item, directory, database, metadata, impls, sums, values), self._context)
        for leaf in opener.open(arrays):
            self._leaves[leaf.name] = leaf
        return {
            "custom_metadata": metadata.custom_metadata,
            "use_ocdbt": ocdbt,
            "use_zarr3": metadata.use_zarr3,
            "value_types": {node.name: node.value_type for node in metadata.nodes},
            "prng_impls": {node.name: impls[node.param] for node in metadata.nodes if node.param in impls},
        }

    def _aggregate(self, item: str) -> Any:
        """Opens an early Orbax item's msgpack file once."""
        if item not in self._aggregates:
            aggregate = self._aggregates[item] = _aggregate(self._root, item)
            self._bytes += aggregate.index_bytes
        return self._aggregates[item]

    def _add_aggregated(self, name: str, item: str, node: NodeMetadata) -> None:
        """Adds a leaf with its value in the msgpack file."""
        try:
            self._leaves[name] = self._aggregate(item).leaf(node, name)
        except CheckpointNotFoundError:
            message = f"its value is in the msgpack file {MSGPACK_FILE!r} of an early Orbax, which is missing"
            self._leaves[name] = BrokenLeaf(name, CorruptCheckpointError(message), self._root.join(item))
        except CheckpointError as error:
            self._leaves[name] = BrokenLeaf(name, error)

    def _add_string(self, name: str, param: str, strings: Mapping[str, bytes], directory: str, sums: Any) -> None:
        if param not in strings:
            error = CorruptCheckpointError("the string is missing in _strings.json")
            self._leaves[name] = BrokenLeaf(name, error, directory)
            return
        value, own = strings[param], sums.get(param)
        checksums = None if own is None else _string_checksums(value, own, directory, name)
        array = np.array(value, object)
        self._leaves[name] = KnownLeaf(name, self._root, array, path=directory, checksums=checksums)

    def _add_empty_arrays(self, prefix: str, custom_metadata: Any, directory: str) -> None:
        """Adds the arrays without elements that our handler recorded."""
        recorded = custom_metadata if isinstance(custom_metadata, Mapping) else None
        for name, (shape, dtype_name) in provenance.skipped_from_metadata(recorded, path=directory).items():
            if 0 not in shape:
                continue
            dtype = _recorded_dtype(dtype_name)
            if dtype == _NO_NUMBERS:
                continue
            full_name = prefix + name
            if dtype is None or len(shape) > self._root.limits.rank:
                raise CorruptCheckpointError(
                    f"the record of skipped leaves has shape {shape} and dtype {dtype_name[:200]!r}",
                    path=directory,
                    leaf=full_name,
                )
            self._empties.pop(full_name, None)
            try:
                self._root.limits.require_shape(shape, dtype)
                self._leaves[full_name] = EmptyLeaf(full_name, directory, shape, dtype)
            except CheckpointError as error:
                self._leaves[full_name] = BrokenLeaf(full_name, error, directory)


def _recorded_dtype(name: str) -> np.dtype | None:
    """Parses a dtype that a save has recorded."""
    if name.startswith(("key<", "[(", "{'names': ")):
        return _NO_NUMBERS
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    if kind_of(dtype) != "object":
        return dtype
    return _NO_NUMBERS if str(dtype) == name else None
