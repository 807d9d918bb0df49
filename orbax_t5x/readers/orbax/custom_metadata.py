"""Reads an Orbax item's `custom_metadata` without leaf names."""

from __future__ import annotations

from typing import Any

from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.readers.orbax.metadata import METADATA_FILE

_KEY = b'"custom_metadata"'
# Orbax writes `custom_metadata` last, behind some hundred bytes for each leaf. Most records have a few KiB.
_END_BYTES = 64 << 10


def read_custom_metadata(directory: str) -> dict[str, Any]:
    """Reads an item's metadata from the end of its file."""
    files = files_at(directory)
    end = files.read_end(METADATA_FILE, _END_BYTES)
    start = end.rfind(_KEY)
    path = files.join(METADATA_FILE)
    if start >= 0:
        try:
            # A key further in leaves more brackets closed than opened, which is an error, as a cut value is.
            return parse_object(b"{" + end[start:], path, allow_nan=True)
        except CheckpointError:
            pass
    is_whole = len(end) < _END_BYTES
    data = end if is_whole else files.read_whole(METADATA_FILE, limit=Limits().index_bytes)
    # The metadata of a large tree take long to parse.
    return parse_object(data, path, allow_nan=True) if _KEY in data else {}
