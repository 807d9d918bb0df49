"""State dicts of names from Mesh TensorFlow whose leaves cannot be read, and their translation."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from orbax_t5x.lazy import Leaf, as_view
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.translate import Translate


class Unreadable(Leaf):
    """A leaf that nobody may read: names, shapes and dtypes must do."""

    path = "nowhere"

    def __init__(self, name: str, shape=(), dtype="float32"):
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(getattr(ml_dtypes, dtype, dtype))

    async def read_into(self, requests, stats):
        raise AssertionError(f"{self.name} was read")

    async def verify_checksum(self, stats, parts):
        raise AssertionError(f"{self.name} was read")


def unreadable(names):
    """A flat state dict of views, by name, or by name and shape."""
    shapes = names if isinstance(names, dict) else dict.fromkeys(names, ())
    return {name: as_view(Unreadable(name, shape)) for name, shape in shapes.items()}


def translate(source, target=None, translator=None):
    diagnostics = Diagnostics()
    result = Translate(translator).apply(source, target or {}, diagnostics)
    assert diagnostics.problems == []
    return result


def problems(source, target=None, translator=None):
    diagnostics = Diagnostics()
    Translate(translator).apply(source, target or {}, diagnostics)
    return diagnostics.problems
