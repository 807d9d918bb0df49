"""Recognises NumPy's archives by the first member, or by the name."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, first_zip_member

SUFFIX = ".npz"


def is_npz(probe: PathProbe) -> bool:
    """Reports whether a path is a ZIP archive of arrays."""
    first = first_zip_member(probe)
    return first is not None and (first.endswith(b".npy") or probe.path.endswith(SUFFIX))


_open = on_demand.function("orbax_t5x.extras.npz.open", "open_npz")
FORMAT = Format("npz", "an .npz file", is_npz, _open)
