"""Removes a killed writer's remains from an OCDBT database.

They are keys that may be incomplete, and unreferenced files. A database is consistent at any moment, because a commit
replaces its manifest atomically. Data in flight at a kill stays in files that no manifest refers to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

# The directory of an OCDBT database with everything but its manifest.
_DATA = "d"
# Kind, database, file, offset and length.
_LOCATION = re.compile(r"\w+:([^:]*):([^:]+):\d+:\d+")


def remove_lock_files(directory: Path) -> None:
    """Removes the locks of killed writers.

    The database is not open. TensorStore writes a manifest into its lock file, which it then renames. It reuses a lock
    file that exists, and the old bytes beyond the end of the new manifest then corrupt it.
    """
    for path in directory.rglob("*.__lock"):
        path.unlink()


async def remove_other_keys(spec: dict[str, Any], context: ts.Context, keys: Collection[str]) -> None:
    """Deletes every key except `keys`."""
    # They would shadow keys of a database that is merged with this one.
    store = await ts.KvStore.open({**spec, "path": ""}, context=context)
    for key in await store.list():
        if key.decode("utf-8", "surrogateescape") not in keys:
            await store.write(key, None)  # TensorStore's way to delete


def remove_unreferenced(directory: Path) -> None:
    """Removes a database's unreferenced files."""
    matches = [_LOCATION.fullmatch(location) for location in _locations(directory)]
    referenced = {directory / "".join(match.groups()) for match in matches if match}
    if None in matches or not all(path.exists() for path in referenced):
        return
    for path in (directory / _DATA).iterdir():
        if path not in referenced:
            path.unlink()


def _locations(directory: Path) -> Iterator[str]:
    """Yields the locations of a database's nodes and values."""
    base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()
    pending = [ts.ocdbt.dump(base).result()["versions"][-1]["root"].get("location")]
    while pending:
        location = pending.pop()
        if location is None:  # a database without keys
            continue
        yield location
        for entry in ts.ocdbt.dump(base, location).result().get("entries", ()):
            if "location" in entry:
                pending.append(entry["location"])
            elif "indirect_value" in entry:
                yield entry["indirect_value"]
