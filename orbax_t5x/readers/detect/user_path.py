"""Checks a user's path or URL, and the item in it."""

from __future__ import annotations

import os
from importlib.resources.abc import Traversable

from orbax_t5x.errors import CheckpointNotFoundError, for_caller
from orbax_t5x.files.places import scheme_of
from orbax_t5x.text.masked import masked

UserPath = str | os.PathLike[str] | Traversable
"""Path or URL as users give it; files of a package are paths, too."""


def path_text(path: UserPath) -> str:
    """Returns the path as text; finds paths on the hub."""
    if isinstance(path, (list, tuple)):
        message = (
            f"one path is opened at a time, and this is a {type(path).__name__} of {len(path)}; several sources are a "
            "dict of names and paths, given to `restore`"
        )
        raise for_caller(TypeError(message))
    if not isinstance(path, (str, os.PathLike)):
        kind = path.__name__ if isinstance(path, type) else type(path).__name__
        raise for_caller(TypeError(f"a checkpoint's path is text or an os.PathLike, not {kind}{_order_hint(path)}"))
    text = os.fspath(path)
    if not isinstance(text, str):
        raise for_caller(TypeError(masked(f"the path {path!r} is not text")))
    if not text:
        raise CheckpointNotFoundError("the path is empty; '.' is the working directory")
    if "\0" in text:
        raise CheckpointNotFoundError("the path holds a NUL, as no file's does", path=text)
    scheme = scheme_of(text)
    return os.path.expanduser(text) if scheme is None else scheme.find(text)


def _order_hint(given: object) -> str:
    """Returns a hint on the order of a restore's arguments."""
    is_target = isinstance(given, dict) or callable(given) or hasattr(type(given), "shape")
    return "; the checkpoint is the first argument, and the target the second" if is_target else ""


def check_item(item: object) -> None:
    """Checks that `item=` is a name."""
    if item is not None and not isinstance(item, str):
        message = (
            f"item= is the name of an item in an Orbax step, not a {type(item).__name__}; the tree to restore into is "
            "the second argument, target"
        )
        raise for_caller(TypeError(message))
