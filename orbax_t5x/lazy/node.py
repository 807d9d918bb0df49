"""Nodes: frozen data that maps output boxes to leaves' boxes.

A node is a shape, a dtype and its inputs; it knows boxes, buffers and leaves, and nothing of the arrays that users
hold. `add_requests` lists what reading a box will read. `lower` turns a box and a buffer into requests on leaves, which
write into (views of) that buffer wherever the node only moves elements, and steps to run after the reads: casts,
copies, averages, checks. All memory beside the buffer comes from the lowering, so that a lowering over buffers without
memory measures how much that is (`scratch_bytes`). Nodes are compared by identity and may be used from any thread.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.memory import empty_array, naming_memory_errors, strided
from orbax_t5x.lazy.box import Box, IndexMap, box_shape
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.text.wording import listed

# Inputs of a stack, and things done to them, that a description names.
_SHOWN_INPUTS = 4


@dataclasses.dataclass(slots=True, eq=False)
class Lowering:
    """A box of a node as work: reads of leaves, then steps.

    Attributes:
      reads: what to read; all of it before the first step of `finish`. A request stays valid as long as its buffer is
        referenced.
      finish: steps to run in order, one at a time, each once. They may raise `LeafMismatchError`.
    """

    reads: list[tuple[Leaf, Request]] = dataclasses.field(default_factory=list[tuple[Leaf, Request]])
    finish: list[Callable[[], None]] = dataclasses.field(default_factory=list[Callable[[], None]])

    def allocate(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Allocates a C-contiguous buffer that lives until the steps are done."""
        return empty_array(shape, dtype)

    def read(self, node: Node, box: Box) -> np.ndarray:
        """Returns a buffer for a box of a node."""
        values = self.allocate(box_shape(box), node.dtype)
        node.add_work(box, values, self)
        return values

    def add_step(self, step: Callable[[], None], temporary_bytes: int = 0) -> None:
        """Adds a step after the reads, with its working memory."""
        self.finish.append(step)


@dataclasses.dataclass(slots=True, eq=False)
class _MeasuringLowering(Lowering):
    """Lowering that only measures."""

    held_bytes: int = 0
    temporary_bytes: int = 0

    def allocate(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        buffer = memoryless(shape, dtype)
        self.held_bytes += buffer.nbytes
        return buffer

    def add_step(self, step: Callable[[], None], temporary_bytes: int = 0) -> None:
        self.finish.append(step)
        self.temporary_bytes = max(self.temporary_bytes, temporary_bytes)


def memoryless(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Makes a C-contiguous-looking array over a single element."""
    strides: list[int] = []
    step = dtype.itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    if step >= 1 << 63:
        raise LimitExceededError(f"an array of {dtype.name} of shape {tuple(shape)} has more bytes than can be counted")
    return strided(np.empty(1, dtype), shape, strides[::-1])


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Node(abc.ABC):
    """Base of the nodes that a view is made of.

    Attributes:
      shape, dtype: of the result.
      inputs: the nodes that it is made from, in order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    inputs: tuple[Node, ...]

    @property
    def input(self) -> Node:
        """The first input."""
        return self.inputs[0]

    @property
    def own_leaf(self) -> Leaf | None:
        """The leaf that this node reads itself, or None."""
        return None

    @property
    def described_inputs(self) -> tuple[Node, ...]:
        """The inputs that a description continues with."""
        return self.inputs

    # What a node kind implements; boxes hold at least one element, buffers fit.

    @abc.abstractmethod
    def describe_step(self) -> str:
        """Describes this node's operation on its inputs, for people."""

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        """Adds the boxes of leaves that reading a box will read.

        By default the same box of each input.
        """
        for node in self.inputs:
            node.add_requests(box, found)

    @abc.abstractmethod
    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        """Adds the requests and steps that fill `out` with a box."""

    def select(self, index_map: IndexMap) -> Node | None:
        """Simplifies this node under an index map, or returns None.

        None: a `StridedNode` over it is simplest. The index map is not the identity, and some element is left.
        """
        return None

    # What plans and executors use.

    def requests(self, box: Box) -> list[tuple[Leaf, Box]]:
        """Returns the boxes of leaves that reading a box will read.

        `lower` asks for the same elements; it may cut one of these boxes into several where its buffer is scattered.
        """
        found: list[tuple[Leaf, Box]] = []
        if not _is_empty(box):
            self.add_requests(box, found)
        return found

    def lower(self, box: Box, out: np.ndarray) -> Lowering:
        """Turns reading a box into requests on leaves and steps after them."""
        if out.shape != box_shape(box) or (out.dtype is not self.dtype and out.dtype != self.dtype):
            raise ValueError(f"a buffer of shape {out.shape} and dtype {out.dtype} for box {box} of {self!r}")
        lowered = Lowering()
        if out.size:
            self.add_work(box, out, lowered)
        return lowered

    def scratch_bytes(self, box: Box, like: np.ndarray | None = None) -> int:
        """Returns the memory for a box beside the buffer."""
        if self.own_leaf is not None or _is_empty(box):
            return 0
        measured = _MeasuringLowering()
        leaf = next(iter(self.leaves()), None)
        with naming_memory_errors(leaf.path if leaf else None, leaf.name if leaf else ""):
            self.add_work(box, memoryless(box_shape(box), self.dtype) if like is None else like, measured)
        return measured.held_bytes + measured.temporary_bytes

    def leaves(self) -> tuple[Leaf, ...]:
        """Lists the leaves of this node, each once, in order."""
        found: dict[Leaf, None] = {}
        pending: list[Node] = [self]
        seen: set[Node] = set()
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                if node.own_leaf is not None:
                    found[node.own_leaf] = None
                pending.extend(reversed(node.inputs))
        return tuple(found)

    def describe(self) -> str:
        """Describes all operations on the leaves, for people."""
        texts: list[str] = []
        node: Node = self
        follows = ""
        while True:
            text = node.describe_step()
            # Of several reshapes in a row only the last one's result is seen.
            if text and not (text.startswith("reshape") and follows.startswith("reshape")):
                texts.append(text)
                follows = text
            inputs = node.described_inputs
            if len(inputs) > 1:
                texts.append(_inputs_text([one.describe() for one in inputs]))
                break
            if not inputs:
                break
            node = inputs[0]
        return ", ".join(text for text in reversed(texts) if text)

    def summary(self) -> str:
        """Returns shape, dtype, leaves and operations as text."""
        leaves = self.leaves()
        # Beside what is read, constants are no more than the description of them.
        named = [leaf for leaf in leaves if not leaf.is_value] or leaves
        of = listed((repr(leaf.name) for leaf in named), 1) or "nothing"
        text = self.describe()
        extra = f", {text}" if text else ""
        return f"shape={self.shape}, dtype={self.dtype.name}, of={of}{extra}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"


def _is_empty(box: Box) -> bool:
    for first, last in box:  # Called for every leaf of a plan: any() costs three times as much.
        if first >= last:
            return True
    return False


def _inputs_text(texts: list[str]) -> str:
    """Describes the operations on several inputs."""
    inputs_of: dict[str, list[str]] = {}
    for number, text in enumerate(texts, 1):
        inputs_of.setdefault(text, []).append(str(number))
    if len(inputs_of) == 1:
        return texts[0]
    parts = [
        f"{text} of input{'s' if len(numbers) > 1 else ''} {listed(numbers, _SHOWN_INPUTS)}"
        for text, numbers in inputs_of.items()
        if text
    ]
    left = len(parts) - _SHOWN_INPUTS
    return "; ".join(parts[:_SHOWN_INPUTS]) + (f"; and {left} other ways" if left > 0 else "")


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeafNode(Node):
    """A whole leaf; make it with `leaf_node`."""

    leaf: Leaf

    @property
    def own_leaf(self) -> Leaf:
        return self.leaf

    def leaves(self) -> tuple[Leaf, ...]:
        return (self.leaf,)

    def describe_step(self) -> str:
        return ""

    def describe(self) -> str:
        return ""

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        found.append((self.leaf, box))

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        lowered.reads.append((self.leaf, Request(box, out)))


def leaf_node(leaf: Leaf) -> LeafNode:
    """Returns the node of a whole leaf."""
    return leaf_nodes([leaf])[0]


def leaf_nodes(leaves: Sequence[Leaf]) -> list[LeafNode]:
    """Returns the nodes of whole leaves."""
    return [LeafNode(tuple(leaf.shape), np.dtype(leaf.dtype), (), leaf) for leaf in leaves]


def copy_step(lowered: Lowering, out: np.ndarray, values: np.ndarray) -> None:
    """Adds a step that copies values of the same dtype."""
    lowered.add_step(partial(np.copyto, out, values))
