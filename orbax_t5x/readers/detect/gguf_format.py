"""Recognises GGUF files by their magic or their suffix."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe

MAGIC = b"GGUF"
SUFFIX = ".gguf"


def is_gguf(probe: PathProbe) -> bool:
    """Reports whether a path is a file with the magic or the suffix."""
    return probe.kind == "file" and (probe.head.startswith(MAGIC) or probe.path.endswith(SUFFIX))


def has_gguf(probe: PathProbe) -> bool:
    """Reports whether a directory holds such files."""
    return bool(probe.with_suffix(SUFFIX))


_open = on_demand.function("orbax_t5x.extras.gguf.open", "open_gguf")
FORMAT = Format("gguf", "a GGUF file", is_gguf, _open, recognise_unmarked=has_gguf)
