"""Recognises Flax msgpack files by the first bytes, or by the names that Hugging Face gives them."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_msgpack_map

INDEX_SUFFIX = ".msgpack.index.json"
# Hugging Face's names for a model in one file, and for the index of one in several.
HUB_FILE = "flax_model.msgpack"
INDEX_FILE = "flax_model.msgpack.index.json"


def is_flax_msgpack(probe: PathProbe) -> bool:
    """Reports whether a path is a msgpack map, an index of several, or a directory with either of Hugging Face's."""
    if probe.kind == "directory":
        return HUB_FILE in probe.names or INDEX_FILE in probe.names
    return is_msgpack_map(probe) or (probe.kind == "file" and probe.path.endswith(INDEX_SUFFIX))


_open = on_demand.function("orbax_t5x.readers.flax_msgpack.open", "open_flax_msgpack")
FORMAT = Format("flax_msgpack", "a Flax msgpack file", is_flax_msgpack, _open)
