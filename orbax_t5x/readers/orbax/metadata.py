"""Metadata of an Orbax item, by a strict schema.

`_METADATA`, `array_metadatas/*` and `_strings.json`.

Only names, kinds of values and a few flags are taken from these files. Shapes are not: `write_shape` is what one
process wrote, not the array, so shapes come from opening the arrays. No class is looked up by the names of types and
handlers in them. Every array must have a key of its own: where two share one, Orbax has written one over the
other, and it is unknown which is left. Keys that Orbax distinguishes and '/'-joined names do not are unsupported; saves
are checked by the same functions, so that what is saved can be opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at
from orbax_t5x.files.strict_json import parse_object

STRINGS_FILE = "_strings.json"
CHECKSUMS_FILE = "_CHECKSUMS.json"
ARRAY_METADATAS = "array_metadatas"


def fault_of_key(key: str) -> str | None:
    """Describes a key's fault ("is empty"), or returns None."""
    if not key:
        return "is empty: no name of a leaf has a part for it"
    if "\0" in key:
        return "holds a NUL, which no name of a leaf may hold"
    return None


def key_leads_out(key: str) -> bool:
    """Tests if a key, as a path, leads out of its directory."""
    return key.startswith("/") or ".." in key.split("/")


def array_key(param: str) -> str:
    """Returns an array's directory or database prefix, without end slash."""
    return param.removesuffix("/")


def inside(item: str, name: str) -> str:
    """Returns the path of something in an item, relative to the root."""
    return f"{item}/{name}" if item and name else item or name


METADATA_FILE = "_METADATA"
# The type of values in items without that file.
UNTYPED = "aggregated"
_CUSTOM_KEY = b'"custom_metadata"'
# Orbax writes `custom_metadata` last, behind some hundred bytes for each leaf. Most records have a few KiB.
_END_BYTES = 64 << 10
# Values of `key_type`: what kind of container a key belongs to.
_SEQUENCE, _DICT = 1, 2
# Value types of nodes without data, as Python values. A named tuple without fields looks like None.
_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": dict, "List": list, "Tuple": tuple}
# Of a leaf that was `...` when it was saved: nothing is stored for it, though its node has a type.
_PLACEHOLDER = "placeholder"


class NodeMetadata(NamedTuple):
    """A saved leaf, or a node without leaves.

    Attributes:
      name: '/'-joined, sequence indices as text.
      param: the key under which the data is stored: the same keys joined by '.'.
      value_type: "jax.Array", "np.ndarray", "scalar", "string", …, or one of the empty kinds.
      skipped: nothing is stored for it, or not as an array.
    """

    name: str
    param: str
    value_type: str
    skipped: bool

    @property
    def is_empty(self) -> bool:
        """True for None, an empty container or `...`."""
        return self.value_type == _PLACEHOLDER or (self.skipped and self.value_type in _EMPTY)

    @property
    def empty_value(self) -> Any:
        """The empty node: None, a new empty container, or `...`."""
        if self.value_type == _PLACEHOLDER:
            return ...
        kind = _EMPTY[self.value_type]
        return None if kind is None else kind()


@dataclasses.dataclass(frozen=True)
class ItemMetadata:
    """Contents of `_METADATA`.

    Attributes:
      nodes: in the order of the file.
      use_ocdbt: whether the arrays are in an OCDBT database, or None where the writer did not record it.
      absent_is_fill: whether a chunk equal to the fill value may have been left out.
      sequences: names of the containers whose children have indices, not keys: lists and tuples.
    """

    nodes: tuple[NodeMetadata, ...]
    use_ocdbt: bool | None
    use_zarr3: bool
    absent_is_fill: bool
    custom_metadata: Any
    nbytes: int
    sequences: frozenset[str] = frozenset()


def read_item_metadata(root: Files, item: str) -> ItemMetadata:
    """Reads and checks `_METADATA` of an item."""
    name = inside(item, METADATA_FILE)
    path = root.join(name)
    try:
        data = root.read_whole(name, limit=root.limits.index_bytes)
    except CheckpointNotFoundError:
        raise CorruptCheckpointError(
            f"{METADATA_FILE} is missing, so the names of its leaves are unknown", path=root.join(item)
        ) from None
    parsed = parse_object(data, path, allow_nan=True)
    tree = parsed.get("tree_metadata")
    if not isinstance(tree, dict):
        raise CorruptCheckpointError("'tree_metadata' is missing or not an object", path=path)
    root.limits.require_entries(len(tree), path)
    keys = _Keys(path)
    entries = [_parse_node(text, entry, path, root.limits, keys) for text, entry in tree.items()]
    return ItemMetadata(
        nodes=tuple(_distinct_nodes(entries, path)),
        use_ocdbt=_flag(parsed, "use_ocdbt", None, path),
        use_zarr3=bool(_flag(parsed, "use_zarr3", False, path)),
        absent_is_fill=not _flag(parsed, "store_array_data_equal_to_fill_value", False, path),
        custom_metadata=parsed.get("custom_metadata"),
        nbytes=len(data),
        sequences=_sequences(tree.values()) if any(kind == _SEQUENCE for _, kind in keys.checked) else frozenset(),
    )


def _flag(parsed: Mapping[str, Any], key: str, default: bool | None, path: str) -> bool | None:
    value = parsed.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CorruptCheckpointError(f"{key!r} is {value!r}, neither true nor false", path=path)
    return value


def _parse_node(text: str, entry: Any, path: str, limits: Limits, known: _Keys) -> tuple[tuple[str, ...], NodeMetadata]:
    """Parses an entry of `tree_metadata`: its key path and node."""
    shown = text[:200]
    if not isinstance(entry, dict):
        raise CorruptCheckpointError(f"the entry {shown!r} is not an object", path=path)
    keys = tuple([known.parse(key, shown) for key in _typed(entry, "key_metadata", list, shown, path)])
    value = _typed(entry, "value_metadata", dict, shown, path)
    name = "/".join(keys)
    limits.require_name(name, path)
    for key in keys if known.faults else ():
        if key in known.faults:
            raise UnsupportedCheckpointError(f"the key {key[:200]!r} {known.faults[key]}", path=path, leaf=name)
    node = NodeMetadata(
        name=name,
        param=".".join(keys),
        value_type=_typed(value, "value_type", str, shown, path),
        skipped=_typed(value, "skip_deserialize", bool, shown, path) if "skip_deserialize" in value else False,
    )
    return keys, node


def _sequences(entries: Iterable[Any]) -> frozenset[str]:
    """Returns the containers with only indices as keys."""
    kinds: dict[str, set[int]] = {}
    for entry in entries:
        container = ""
        for key in entry["key_metadata"]:
            kinds.setdefault(container, set()).add(key["key_type"])
            container = inside(container, key["key"])
    return frozenset(container for container, found in kinds.items() if found == {_SEQUENCE})


def _typed(entry: Mapping[str, Any], key: str, kind: type, shown: str, path: str) -> Any:
    value = entry.get(key)
    if type(value) is not kind:
        raise CorruptCheckpointError(f"{key!r} of {shown!r} is {str(value)[:200]!r}, not a {kind.__name__}", path=path)
    return value


class _Keys:
    """Keys of a file, each checked once.

    Very many entries have few different keys.

    Attributes:
      checked: the keys, and the kinds of their containers.
      faults: what no name can hold, by key.
    """

    def __init__(self, path: str):
        self._path = path
        self.checked: set[tuple[str, int]] = set()
        self.faults: dict[str, str] = {}

    def parse(self, entry: Any, shown: str) -> str:
        """Parses an element of `key_metadata`."""
        key, kind = (entry.get("key"), entry.get("key_type")) if type(entry) is dict else (None, None)
        if type(key) is not str or type(kind) is not int or kind not in (_SEQUENCE, _DICT):
            message = f"{shown!r} holds {str(entry)[:200]!r}, which is not a key"
            raise CorruptCheckpointError(message, path=self._path)
        if (key, kind) not in self.checked:
            self._check(key, kind, shown)
            self.checked.add((key, kind))
        return key

    def _check(self, key: str, kind: int, shown: str) -> None:
        if kind == _SEQUENCE and not (key.isascii() and key.isdigit()):
            raise CorruptCheckpointError(f"{shown!r} holds the sequence index {key[:200]!r}", path=self._path)
        if key_leads_out(key):
            message = f"{shown!r} holds the key {key[:200]!r}, which leads out of the checkpoint"
            raise UnsafeCheckpointError(message, path=self._path)
        if (fault := fault_of_key(key)) is not None:
            self.faults[key] = fault


def _is_text(key: str) -> bool:
    """Tests if a JSON text has a UTF-8 form."""
    try:
        key.encode()
    except UnicodeEncodeError:  # escapes may make lone surrogates
        return False
    return True


def _distinct_nodes(entries: list[tuple[tuple[str, ...], NodeMetadata]], path: str) -> Iterator[NodeMetadata]:
    """Returns the nodes, proven to have distinct names and array keys."""
    parents = {keys[:depth] for keys, _ in entries for depth in range(len(keys))}
    names: dict[str, tuple[str, ...]] = {}
    places: dict[str, str] = {}
    for keys, node in entries:
        if keys in parents:
            if node.is_empty:
                continue
            raise CorruptCheckpointError("is a leaf and has leaves below it", path=path, leaf=node.name)
        if node.name in names:
            message = f"two leaves have this name: the keys {names[node.name]!r} and {keys!r}"
            # Orbax writes no keys twice, and distinguishes these where they differ.
            kind = CorruptCheckpointError if names[node.name] == keys else UnsupportedCheckpointError
            raise kind(message, path=path, leaf=node.name)
        names[node.name] = keys
        if not node.skipped and places.setdefault(array_key(node.param), node.name) != node.name:
            raise CorruptCheckpointError(
                f"is stored under the key {node.param!r}, and so is {places[array_key(node.param)]!r}: "
                "one was written over the other",
                path=path,
                leaf=node.name,
            )
        yield node


def read_prng_impls(root: Files, item: str, names: Sequence[str]) -> dict[str, str]:
    """Reads the implementations of typed PRNG keys."""
    impls: dict[str, str] = {}
    for name in sorted(names):
        file = inside(item, f"{ARRAY_METADATAS}/{name}")
        path = root.join(file)
        parsed = parse_object(root.read_whole(file, limit=root.limits.index_bytes), path, allow_nan=True)
        entries = parsed.get("array_metadatas")
        if not isinstance(entries, list):
            raise CorruptCheckpointError("'array_metadatas' is missing or not a list", path=path)
        for entry in entries:
            metadata = entry.get("array_metadata") if isinstance(entry, dict) else None
            param = metadata.get("param_name") if isinstance(metadata, dict) else None
            if not isinstance(metadata, dict) or not isinstance(param, str):
                raise CorruptCheckpointError(f"{str(entry)[:200]} is not the metadata of an array", path=path)
            extra = metadata.get("ext_metadata")
            impl = extra.get("random_key_impl") if isinstance(extra, dict) else None
            if impl is None:
                continue
            if not isinstance(impl, str) or impls.setdefault(param, impl) != impl:
                raise CorruptCheckpointError(
                    f"{param!r} has the PRNG implementations {impls.get(param)!r} and {impl!r}", path=path
                )
    return impls


def read_strings(root: Files, item: str, params: Sequence[str]) -> dict[str, bytes]:
    """Reads the strings of an item by stored key, as UTF-8."""
    name = inside(item, STRINGS_FILE)
    path = root.join(name)
    try:
        parsed = parse_object(root.read_whole(name, limit=root.limits.index_bytes), path)
    except CheckpointNotFoundError:
        return {}
    strings: dict[str, bytes] = {}
    for param in params:
        value: Any = parsed
        for part in param.split("/"):
            value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        if value is None:
            continue
        if not isinstance(value, str) or not _is_text(value):
            raise CorruptCheckpointError(f"the value of {param[:200]!r} is not a string", path=path)
        strings[param] = value.encode()
    return strings


def read_custom_metadata(directory: str) -> dict[str, Any]:
    """Reads an item's metadata from the end of its file."""
    files = files_at(directory)
    end = files.read_end(METADATA_FILE, _END_BYTES)
    start = end.rfind(_CUSTOM_KEY)
    path = files.join(METADATA_FILE)
    if start >= 0:
        try:
            # A key further in leaves more brackets closed than opened, which is an error, as a cut value is.
            return parse_object(b"{" + end[start:], path, allow_nan=True)
        except CheckpointError:
            pass
    is_whole = len(end) < _END_BYTES
    data = end if is_whole else files.read_whole(METADATA_FILE, limit=files.limits.index_bytes)
    # The metadata of a large tree take long to parse.
    return parse_object(data, path, allow_nan=True) if _CUSTOM_KEY in data else {}
