"""Views over arrays in memory, for tests of nodes."""

import numpy as np

from orbax_t5x.lazy import as_view
from orbax_t5x.testing.array_leaf import ArrayLeaf


def view_of(shape, dtype="float32", name="leaf"):
    return as_view(ArrayLeaf(np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(dtype), name))


def leaf_names(view):
    return [leaf.name for leaf in view.leaves()]
