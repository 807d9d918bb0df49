"""Recognises PyTorch's files by the first member of the archive, or by the names that Hugging Face gives them."""

from __future__ import annotations

from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, first_zip_member
from orbax_t5x.readers.torch_zip.open import INDEX_FILE, INDEX_SUFFIX, OLD_MAGIC, SINGLE_FILE, SUFFIXES, open_torch


def is_torch(probe: PathProbe) -> bool:
    """Reports whether a path is a file of PyTorch, also of its older form, or an index of several."""
    if probe.kind != "file":
        return False
    if probe.path.endswith(INDEX_SUFFIX) or probe.head.startswith(OLD_MAGIC):
        return True
    first = first_zip_member(probe)
    return first is not None and (
        first.endswith(b"/data.pkl") or (probe.path.endswith(SUFFIXES) and not first.endswith(b".npy"))
    )


def has_torch(probe: PathProbe) -> bool:
    """Reports whether a directory holds a file or an index under Hugging Face's name."""
    return SINGLE_FILE in probe.names or INDEX_FILE in probe.names


FORMAT = Format("torch", "PyTorch's files (.bin, .pt, .pth)", is_torch, open_torch, recognise_unmarked=has_torch)
