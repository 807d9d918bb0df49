"""Files of the Hugging Face hub that several formats share: a model's configuration, and pointers of Git LFS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.store import Store
from orbax_t5x.storage.strict_json import parse_object, read_small

_CONFIG = "config.json"
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of a file that Git LFS has not fetched."""


def read_config(root: Store, limits: Limits) -> Mapping[str, Any]:
    """Reads the model's configuration, or the reason why it cannot be read; the arrays do not need it."""
    try:
        data = read_small(root, _CONFIG, limit=limits.json_bytes, bound="Limits.json_bytes")
        return {"config": parse_object(data, root.join(_CONFIG), allow_nan=True)}
    except CheckpointNotFoundError:
        return {"config": None}
    except CheckpointError as error:
        return {"config": None, "config_error": str(error)}


def refuse_lfs_pointer(first: bytes, path: str) -> None:
    """Raises if a file that begins with these bytes is a pointer to the file itself."""
    if first.startswith(LFS_POINTER):
        message = "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned"
        raise UnsupportedCheckpointError(message, path=path)
