"""Finds names that would prevent opening a saved tree.

Orbax identifies leaves by their keys, takes any key, joins them with dots, and lets a leaf overwrite another one if
their keys join to the same. Opened, leaves have '/'-joined names. The names refused here are those that the reader of
Orbax items would refuse, by the same functions (`orbax_t5x.readers.orbax.metadata`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from orbax_t5x.errors import Fix, Problem, RestorePlanError, UnsafeCheckpointError
from orbax_t5x.files.paths import split_name
from orbax_t5x.readers.orbax.metadata import (
    ARRAY_METADATAS,
    CHECKSUMS_FILE,
    METADATA_FILE,
    STRINGS_FILE,
    array_key,
    fault_of_key,
    key_leads_out,
)
from orbax_t5x.readers.orbax.steps import STEP_METADATA_FILE
from orbax_t5x.trees.pytree_names import key_text

# Files of an item beside the directories of its arrays.
_FILES_OF_ITEMS = frozenset(
    {METADATA_FILE, STEP_METADATA_FILE, ARRAY_METADATAS, STRINGS_FILE, CHECKSUMS_FILE, "_sharding"}
)

_RENAME_OR_OCDBT = Fix.any_of(Fix("rename it"), Fix.in_program("save with use_ocdbt=True"))


def check_names(tree: Any, skipped: Collection[str], *, in_directories: bool) -> None:
    """Refuses a tree that could not be opened again.

    None and empty containers are stored by name, too.

    `skipped` are leaves of which no array is written. With `in_directories`, keys are paths of directories.
    """
    fault_of = functools.cache(_fault_of_key)
    keys_of: dict[str, list[str]] = {}
    stored: dict[str, str] = {}
    problems: list[Problem] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]:
        keys = [key_text(key) for key in path]
        name = "/".join(keys)
        faulty = next((key for key in keys if fault_of(key)), None)
        if faulty is not None:
            problems.append(Problem("name", name, f"the key {faulty!r} {fault_of(faulty)}", Fix("rename it")))
        elif keys_of.setdefault(name, keys) is not keys:
            message = f"the keys {keys_of[name]!r} and {keys!r} both give this name"
            problems.append(Problem("duplicate", name, message, Fix("rename one of the two")))
        elif name not in skipped and not _is_empty(node):
            joined = ".".join(keys)
            other = stored.setdefault(array_key(joined), name)
            if other is not name:
                message = f"Orbax would store it under {joined!r}, as {other!r}"
                problems.append(Problem("duplicate", name, message, Fix("rename one of the two")))
            elif in_directories and not isinstance(node, str) and not _is_directory(array_key(joined)):
                message = f"its array would be stored in the directory {joined!r}, which an item cannot have"
                problems.append(Problem("name", name, message, _RENAME_OR_OCDBT))
    if problems:
        raise RestorePlanError(problems)


def storage_key(path: Sequence[Any]) -> str:
    """Joins a leaf's keys with dots, as Orbax does."""
    return ".".join([key_text(key) for key in path])


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _fault_of_key(key: str) -> str | None:
    """Returns the fault of a key, or None.

    A tree with a faulty key could not be opened.
    """
    if key_leads_out(key):
        return "leads out of the checkpoint, taken for a path"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "holds half a character"
    return fault_of_key(key)


def _is_directory(place: str) -> bool:
    """Tests if an array's directory may have this path.

    The path is relative to the item; a tree that is a single array has the item's own.
    """
    if not place:
        return True
    try:
        parts = split_name(place)
    except UnsafeCheckpointError:
        return False
    return "/".join(parts) == place and parts[0] not in _FILES_OF_ITEMS
