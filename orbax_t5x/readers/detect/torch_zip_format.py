"""Recognises PyTorch's files by the first member of the archive, or by the names that Hugging Face gives them."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, first_zip_member

SUFFIXES = (".bin", ".pt", ".pth")
INDEX_SUFFIX = ".bin.index.json"
# Hugging Face's names for a model in one file, and for the index of one in several.
SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"
# How a file of PyTorch before 1.6 begins: a pickle of its magic number.
OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


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


_open = on_demand.function("orbax_t5x.extras.torch_zip.open", "open_torch")
FORMAT = Format("torch", "PyTorch's files (.bin, .pt, .pth)", is_torch, _open, recognise_unmarked=has_torch)
