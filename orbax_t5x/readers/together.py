"""Opens a checkpoint once for all processes of a job."""

from __future__ import annotations

import os

from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.multihost.openings import opened_once
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.formats import open_checkpoint


def open_together(
    path: str | os.PathLike[str], *, format: str | None = None, item: str | None = None, limits: Limits | None = None
) -> Checkpoint:
    """Opens a checkpoint as `open_checkpoint` does, once per job."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        return open_checkpoint(path, format=format, item=item, limits=limits)
    shared = text if url_scheme(text) is not None else os.path.abspath(os.path.expanduser(text))
    call = ["open", shared, str(format), str(item), repr(limits or Limits())]
    return opened_once(call, text, lambda: open_checkpoint(text, format=format, item=item, limits=limits))
