"""Lazy arrays: T5X's classes, and the views that compose without reading.

A leaf (`leaf.py`) fills buffers from index boxes. Nodes (`node.py`) are frozen data over leaves: index maps, reshapes,
casts, stacks, concatenations, averages, paddings, products with a scale, low-rank sums. Each maps an output box to
boxes of its inputs, so that a plan knows what it will read and an executor reads just that, straight into its buffers.
A view (`view.py`) is the lazy array over a node. Nothing is read, and no thread made, before a value is requested.
"""

from orbax_t5x.lazy.array import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_slices, full_box, intersect, slices_within
from orbax_t5x.lazy.cast import AffineFunction, CastNode, MappedNode
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.node import LeafNode, Lowering, Node
from orbax_t5x.lazy.read import group_reads, read_leaves
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats, Verify, counting_reads
from orbax_t5x.lazy.strided import JoinNode, SplitNode, StridedNode
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.lazy.view import View, as_view, broadcast_to, read_views, repeat

__all__ = [
    "AffineFunction",
    "BlockingLeaf",
    "Box",
    "CastNode",
    "ChecksummedRange",
    "JoinNode",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Leaf",
    "LeafNode",
    "Lowering",
    "MappedNode",
    "Node",
    "OpaqueLeaf",
    "ReadStats",
    "Request",
    "SplitNode",
    "StridedNode",
    "ValueLeaf",
    "Verify",
    "View",
    "as_view",
    "box_shape",
    "box_size",
    "box_slices",
    "broadcast_to",
    "counting_reads",
    "full_box",
    "group_reads",
    "intersect",
    "read_leaves",
    "read_views",
    "repeat",
    "slices_within",
]
