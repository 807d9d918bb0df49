"""Keys of Orbax's trees and of its stored arrays.

A tree's keys become '/'-joined names.

Orbax distinguishes leaves by the tuple of their keys, and stores each under its keys joined by dots. Here a leaf has a
'/'-joined name. Reading items and checking saves use the same functions, so that what is saved can be opened.
"""

from __future__ import annotations

STRINGS_FILE = "_strings.json"
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
    """Returns an array's directory or database prefix for a key.

    That of `a/` is that of `a`.
    """
    return param.removesuffix("/")


def inside(item: str, name: str) -> str:
    """Returns the path of something in an item, relative to the root."""
    return f"{item}/{name}" if item and name else item or name
