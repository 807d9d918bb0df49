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
from orbax_t5x.files.places import files_at, within_limits
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.provenance import records as provenance
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.leaves import BrokenLeaf, EmptyLeaf, KnownLeaf
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.orbax.arrays import ItemArrays, database_files, find_item_files
from orbax_t5x.readers.orbax.metadata import (
    CHECKSUMS_FILE,
    METADATA_FILE,
    UNTYPED,
    NodeMetadata,
    inside,
    read_item_metadata,
    read_strings,
)
from orbax_t5x.readers.orbax.steps import (
    MANIFEST_FILE,
    MSGPACK_FILE,
    PROCESS_PREFIX,
    STEP_METADATA_FILE,
    are_checkpoints,
    deleted_item,
    finished_steps,
    is_early_item,
    is_item,
    is_step_directory,
    is_t5x_step,
    is_temporary,
    item_names,
    items_in,
    lost_items,
    newest_step,
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
    if is_temporary(files.path):
        raise CheckpointNotFoundError(
            "an unfinished save: Orbax renames this directory when it is done", path=files.path
        )
    if _is_single_item(files):
        return _open_single_item(files, item)
    step = step_of_name(os.path.basename(files.path))
    if not is_step_directory(files):
        steps = (step for step in finished_steps(files) if not is_t5x_step(files, step.name))
        newest = newest_step(files, steps)
        if newest is None:
            raise CheckpointNotFoundError(
                "neither an Orbax item, nor a step, nor a root with a finished step", path=files.path
            )
        files, step = files_at(files.locate(newest.name)), newest.step
        if _is_single_item(files):
            checkpoint = _open_single_item(files, item)
            checkpoint.step = step
            return checkpoint
    return _open_step(files, item, step)


def _is_single_item(files: Files) -> bool:
    return is_item(files) or files.has_file(MANIFEST_FILE) or is_early_item(files)


def _open_single_item(files: Files, item: str | None) -> Checkpoint:
    """Opens an item by its own path."""
    directory, name = os.path.split(files.path)
    if item is not None and item != name:
        raise CheckpointNotFoundError(f"this is an item itself, so there is no item {item!r} in it", path=files.path)
    _require_merged(files)
    parent, step_name = files_at(directory), os.path.basename(directory)
    # A parent without Orbax's marker is a step only where its name can hardly mean anything else (`run_2024` can).
    in_step = parent.has_file(STEP_METADATA_FILE) or step_name.isdecimal()
    if in_step and deleted_item(parent) == name:
        raise _being_deleted(files.path)
    opened = _OrbaxOpening(files)
    return opened.checkpoint({"": ""}, step=step_of_name(step_name if in_step else name))


def _require_merged(files: Files) -> None:
    """Raises if the databases of an item's processes were never merged."""
    database = f"{PROCESS_PREFIX}0"
    if files.has_file(f"{database}/{MANIFEST_FILE}") and not files.has_file(MANIFEST_FILE):
        raise CorruptCheckpointError(
            f"{MANIFEST_FILE} is missing: the arrays are still in {database!r}, because the save ended before Orbax "
            "merged the databases of its processes (`finalize` of its handler does it)",
            path=files.path,
        )


def _open_step(root: Files, item: str | None, step: int | None) -> Checkpoint:
    opened = _OrbaxOpening(root)
    if item is not None and not root.can_list and is_name(item) and is_item(root, item):
        return opened.checkpoint({item: ""}, step=step, items=[item])
    names = item_names(root)
    deleted = deleted_item(root)
    if deleted in names:
        if item == deleted or names == [deleted]:
            raise _being_deleted(root.join(deleted))
        _logger.warning("%s: the item %r is left out: its deletion was begun and not finished", root.path, deleted)
        names.remove(deleted)
    lost = lost_items(root, items_in(opened.step_metadata), names)
    for link in root.subdirectories().outside if root.can_list else []:
        if link == item or (item is None and (link in lost or not names)):
            raise UnsafeCheckpointError(LEADS_OUT, path=root.join(link))
    broken = {name: _lost(root, name, names) for name in lost if item in (None, name)}
    if broken and (item is not None or not names):
        raise next(iter(broken.values()))
    if item is not None and item not in names:
        raise CheckpointNotFoundError(f"no item {item!r} with arrays here; there is {_listed(names)}", path=root.path)
    if not names:
        raise _no_items(root, opened.step_metadata)
    if item is None and len(names) > 1 and are_checkpoints(root, names):
        raise UnsupportedCheckpointError(
            f"no step, but a directory of checkpoints: {_listed(names)}; open one of them by its own path, or "
            "restore from several as a dict of names and paths",
            path=root.path,
        )
    if item is not None:
        prefixes = {item: ""}
    elif len(names) == 1 and not broken:
        prefixes = {names[0]: ""}
    else:
        prefixes = {name: f"{name}/" for name in names}
    return opened.checkpoint(prefixes, step=step, items=names, broken=broken)


def _being_deleted(directory: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        "the deletion of this item was begun and not finished, so it may lack any of its files; delete it again to "
        "finish",
        path=directory,
    )


def _lost(root: Files, item: str, names: list[str]) -> CorruptCheckpointError:
    """Makes the error of a recorded item that cannot be opened."""
    message = f"the metadata of the step name this item, and it has no {METADATA_FILE}, so the names of its leaves are"
    fix = Fix.setting(f"restore only another one with {{}}: {_listed(names)}", item=...) if names else None
    return CorruptCheckpointError(f"{message} unknown", path=root.join(item), fix=fix)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _no_items(root: Files, step_metadata: Mapping[str, Any]) -> CheckpointError:
    """Makes the error of a step without anything to read."""
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
        # The first versions told strings by their file alone.
        texts = [node.param for node in metadata.nodes if node.value_type in ("string", UNTYPED)]
        files = find_item_files(self._root, item, has_strings=bool(texts))
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
                if self._root.is_remote:
                    raise
                kvstore = self._root.kvstore(item, MANIFEST_FILE, list)
                values = TensorStoreValues(kvstore, directory, self._context)
                values.check()
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
        opener = ItemArrays(*(self._root, item, directory, database, metadata, sums, values), self._context)
        opened = list(opener.open(arrays))
        self._leaves.update((leaf.name, leaf) for leaf in opened)
        return {
            "custom_metadata": metadata.custom_metadata,
            "use_ocdbt": ocdbt,
            "use_zarr3": metadata.use_zarr3,
            "value_types": {node.name: node.value_type for node in metadata.nodes},
            "prng_impls": {leaf.name[len(prefix) :]: leaf.prng_impl for leaf in opened if leaf.prng_impl is not None},
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
