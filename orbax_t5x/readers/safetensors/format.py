"""Recognises safetensors checkpoints by names, or by a header's length and its first brace."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe

LENGTH_BYTES = 8
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def is_safetensors(probe: PathProbe) -> bool:
    """Reports whether a path is a file, an index, or a directory with either under Hugging Face's name."""
    if probe.kind == "directory":
        return SINGLE_FILE in probe.names or INDEX_FILE in probe.names
    return probe.kind == "file" and (probe.path.endswith((SUFFIX, INDEX_SUFFIX)) or _begins_with_header(probe))


def has_safetensors(probe: PathProbe) -> bool:
    """Reports whether a directory holds a file or an index under any name."""
    return bool(probe.with_suffix(SUFFIX) or probe.with_suffix(INDEX_SUFFIX))


def _begins_with_header(probe: PathProbe) -> bool:
    length = int.from_bytes(probe.head[:LENGTH_BYTES], "little")
    return (
        probe.head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
        and 2 <= length
        and (probe.size is None or length <= probe.size - LENGTH_BYTES)
    )


_open = on_demand.function("orbax_t5x.readers.safetensors.open", "open_safetensors")
FORMAT = Format("safetensors", "safetensors files", is_safetensors, _open, recognise_unmarked=has_safetensors)
