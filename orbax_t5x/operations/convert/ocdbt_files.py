"""What a killed writer left in an OCDBT database: keys that nobody knows to be whole, and files that nobody refers to.

A database is whole at any moment: a commit replaces its manifest in one step. What was on its way into it at a kill
stays in files that no manifest refers to.
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
    """Removes the locks of writers that were killed, from a database that nobody has open.

    TensorStore writes a manifest into its lock file, which it then renames. One that it finds it takes, and what stood
    in there beyond the new manifest's end becomes part of it, which is then no manifest any more.
    """
    for path in directory.rglob("*.__lock"):
        path.unlink()


async def remove_other_keys(spec: dict[str, Any], context: ts.Context, keys: Collection[str]) -> None:
    """Removes all keys of a database but these, so that what is merged with it takes their place.

    Args:
      spec: of a key-value store in the database.
      context: TensorStore's.
      keys: to keep.
    """
    store = await ts.KvStore.open({**spec, "path": ""}, context=context)
    for key in await store.list():
        if key.decode("utf-8", "surrogateescape") not in keys:
            await store.write(key, None)  # TensorStore's way to delete


def remove_unreferenced(directory: Path) -> None:
    """Removes the files of a database, which nobody has open, that its newest version does not refer to.

    Nothing is removed where TensorStore tells places in another way than it did when this was written.
    """
    matches = [_LOCATION.fullmatch(place) for place in _places(directory)]
    referenced = {directory / "".join(match.groups()) for match in matches if match}
    if None in matches or not all(path.exists() for path in referenced):
        return
    for path in (directory / _DATA).iterdir():
        if path not in referenced:
            path.unlink()


def _places(directory: Path) -> Iterator[str]:
    """Where the newest version of a database has its nodes and values, as TensorStore tells it."""
    base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()
    pending = [ts.ocdbt.dump(base).result()["versions"][-1]["root"].get("location")]
    while pending:
        place = pending.pop()
        if place is None:  # a database without keys
            continue
        yield place
        for entry in ts.ocdbt.dump(base, place).result().get("entries", ()):
            if "location" in entry:
                pending.append(entry["location"])
            elif "indirect_value" in entry:
                yield entry["indirect_value"]
