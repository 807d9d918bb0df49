"""Recognises GGUF files by their magic or their suffix."""

from __future__ import annotations

from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe
from orbax_t5x.readers.gguf.header import MAGIC
from orbax_t5x.readers.gguf.open import SUFFIX, open_gguf


def is_gguf(probe: PathProbe) -> bool:
    """Reports whether a path is a file with the magic or the suffix."""
    return probe.kind == "file" and (probe.head.startswith(MAGIC) or probe.path.endswith(SUFFIX))


def has_gguf(probe: PathProbe) -> bool:
    """Reports whether a directory holds such files."""
    return bool(probe.with_suffix(SUFFIX))


FORMAT = Format("gguf", "a GGUF file", is_gguf, open_gguf, recognise_unmarked=has_gguf)
