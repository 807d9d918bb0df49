"""Recognises Flax msgpack files by the first bytes, or by the names that Hugging Face gives them."""

from __future__ import annotations

from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_msgpack_map
from orbax_t5x.readers.flax_msgpack.open import HUB_FILE, INDEX_FILE, INDEX_SUFFIX, open_flax_msgpack


def is_flax_msgpack(probe: PathProbe) -> bool:
    """Reports whether a path is a msgpack map, an index of several, or a directory with either of Hugging Face's."""
    if probe.kind == "directory":
        return HUB_FILE in probe.names or INDEX_FILE in probe.names
    return is_msgpack_map(probe) or (probe.kind == "file" and probe.path.endswith(INDEX_SUFFIX))


FORMAT = Format("flax_msgpack", "a Flax msgpack file", is_flax_msgpack, open_flax_msgpack)
