"""Lazy arrays: T5X's classes, and the views that compose without reading.

A leaf (`leaf.py`) fills buffers from index boxes. Nodes (`node.py`) are frozen data over leaves: index maps, reshapes,
casts, stacks, concatenations, averages, paddings, products with a scale, low-rank sums. Each maps an output box to
boxes of its inputs, so that a plan knows what it will read and an executor reads just that, straight into its buffers.
A view (`view.py`) is the lazy array over a node. Nothing is read, and no thread made, before a value is requested.
"""

from orbax_t5x.lazy.array import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_slices, full_box, intersect, slices_within
from orbax_t5x.lazy.cast import AffineFunction
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.lazy.value import ValueLeaf
from orbax_t5x.lazy.view import View, as_view, broadcast_to, read_views, repeat

__all__ = [
    "AffineFunction",
    "BlockingLeaf",
    "Box",
    "ChecksummedRange",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Leaf",
    "ReadStats",
    "Request",
    "ValueLeaf",
    "View",
    "as_view",
    "box_shape",
    "box_size",
    "box_slices",
    "broadcast_to",
    "full_box",
    "intersect",
    "read_views",
    "repeat",
    "slices_within",
]
