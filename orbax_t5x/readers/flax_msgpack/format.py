"""Recognises Flax msgpack files by the first bytes, or by the name that Hugging Face gives them."""

from __future__ import annotations

from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_msgpack_map
from orbax_t5x.readers.flax_msgpack.open import HUB_FILE, open_flax_msgpack


def is_flax_msgpack(probe: PathProbe) -> bool:
    """Reports whether a path is a msgpack map, or a directory with Hugging Face's file."""
    if probe.kind == "directory":
        return HUB_FILE in probe.names
    return is_msgpack_map(probe)


FORMAT = Format("flax_msgpack", "a Flax msgpack file", is_flax_msgpack, open_flax_msgpack)
