"""Lazy arrays: T5X's classes, and the views that compose without reading.

A leaf (`leaf.py`) fills buffers from index boxes. Nodes (`node.py`) are frozen data over leaves: index maps, reshapes,
casts, stacks, concatenations, averages, paddings, products with a scale, low-rank sums. Each maps an output box to
boxes of its inputs, so that a plan knows what it will read and an executor reads just that, straight into its buffers.
A view (`view.py`) is the lazy array over a node. Nothing is read, and no thread made, before a value is requested.
"""

from orbax_t5x.lazy.array import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from orbax_t5x.lazy.assemble import ConcatNode, StackNode
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_slices, full_box, intersect, slices_within
from orbax_t5x.lazy.cast import AffineFunction, CastNode, MappedNode
from orbax_t5x.lazy.combine import AllEqualNode, AverageNode, ScaledNode
from orbax_t5x.lazy.fill import UnfilledLeaf, fill, has_unfilled
from orbax_t5x.lazy.leaf import BlockingLeaf, Leaf, Request
from orbax_t5x.lazy.low_rank import LowRankNode
from orbax_t5x.lazy.node import LeafNode, Lowering, Node
from orbax_t5x.lazy.pad import PadNode
from orbax_t5x.lazy.read import group_reads, read_leaves
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats, Verify, counting_reads
from orbax_t5x.lazy.reshape import JoinNode, SplitNode
from orbax_t5x.lazy.several import add_low_rank, all_equal, average, concatenate, pad, scaled, stack
from orbax_t5x.lazy.strided import StridedNode
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.lazy.view import View, as_view, broadcast_to, read_views, repeat

__all__ = [
    "AffineFunction",
    "AllEqualNode",
    "AverageNode",
    "BlockingLeaf",
    "Box",
    "CastNode",
    "ChecksummedRange",
    "ConcatNode",
    "JoinNode",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Leaf",
    "LeafNode",
    "LowRankNode",
    "Lowering",
    "MappedNode",
    "Node",
    "OpaqueLeaf",
    "PadNode",
    "ReadStats",
    "Request",
    "ScaledNode",
    "SplitNode",
    "StackNode",
    "StridedNode",
    "UnfilledLeaf",
    "ValueLeaf",
    "Verify",
    "View",
    "add_low_rank",
    "all_equal",
    "as_view",
    "average",
    "box_shape",
    "box_size",
    "box_slices",
    "broadcast_to",
    "concatenate",
    "counting_reads",
    "fill",
    "full_box",
    "group_reads",
    "has_unfilled",
    "intersect",
    "pad",
    "read_leaves",
    "read_views",
    "repeat",
    "scaled",
    "slices_within",
    "stack",
]
