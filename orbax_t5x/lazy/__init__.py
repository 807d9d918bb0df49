"""Lazy arrays: T5X's classes, and the views that compose without reading.

A leaf (`_leaf.py`) fills buffers from index boxes. Views (`_view.py`) are frozen nodes over leaves: walks over
dimensions, reshapes, casts, stacks, concatenations, averages. Each maps an output box to boxes of its inputs, so that a
plan can tell what it will read and an executor reads just that, straight into its buffers. Nothing is read, and no
thread made, before a value is asked for.
"""

from orbax_t5x.lazy.array import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from orbax_t5x.lazy.assemble import Concat, Stack
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_slices, full_box
from orbax_t5x.lazy.cast import Cast, CheckedCast
from orbax_t5x.lazy.combine import AllEqual, Average
from orbax_t5x.lazy.compose import as_view, broadcast_to, concatenate, repeat, stack
from orbax_t5x.lazy.geometry import contiguous_dims
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.read import group_reads, read_leaves, read_views
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats, Verify
from orbax_t5x.lazy.reshape import Join, Split
from orbax_t5x.lazy.strided import LeafView, Strided
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.lazy.view import Lowered, View

__all__ = [
    "AllEqual",
    "Average",
    "BlockingLeaf",
    "Box",
    "Cast",
    "CheckedCast",
    "ChecksummedRange",
    "Concat",
    "Join",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Leaf",
    "LeafView",
    "Lowered",
    "OpaqueLeaf",
    "ReadStats",
    "Request",
    "Split",
    "Stack",
    "Strided",
    "ValueLeaf",
    "Verify",
    "View",
    "as_view",
    "box_shape",
    "box_size",
    "box_slices",
    "broadcast_to",
    "concatenate",
    "contiguous_dims",
    "full_box",
    "group_reads",
    "read_leaves",
    "read_views",
    "repeat",
    "stack",
]
