"""Restore-time transforms: frozen dataclasses that map names and compose lazy views, before a byte is read."""

from __future__ import annotations

from orbax_t5x.transforms._base import (
    Notes,
    Transform,
    describe_transform,
    digest_of,
    flatten,
    qualified_name,
    run_transforms,
    takes_is_resuming,
    unflatten,
)

__all__ = [
    "Notes",
    "Transform",
    "describe_transform",
    "digest_of",
    "flatten",
    "qualified_name",
    "run_transforms",
    "takes_is_resuming",
    "unflatten",
]
