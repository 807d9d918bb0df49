"""Trees of leaves by the paths of their names, with what is known of each subtree without names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orbax_t5x.rules.alignment.words import Key, Path

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class NamedLeaf:
    """A leaf that is matched: one of a tree, or those of all layers as one.

    Attributes:
      names: of the leaf, or of each layer's leaf in order.
      shape: that the other side's leaf has to have.
      dtype: as text.
      path: of its name.
      is_turned: whether `shape` is that of the transposed leaf.
      axis: that of the layers in `shape`; None for a leaf of a tree.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: str
    path: Path
    is_turned: bool = False
    axis: int | None = None


@functools.lru_cache(maxsize=4096)
def _number_of(something: Any) -> int:
    """Returns a number for a shape or a structure; sums of such numbers stand for multisets."""
    return int.from_bytes(hashlib.blake2b(repr(something).encode(), digest_size=16).digest())


@dataclasses.dataclass(eq=False)
class Subtree:
    """A subtree.

    Attributes:
      label: the keys from the node above to this one.
      children: nodes below; at least two, none below a leaf.
      item: the leaf, or None.
      size: number of leaves.
      bag: equal where the multisets of the leaves' shapes and dtypes are.
      structure: equal where the trees without their names are.
      numbers: numbers of the nodes beside it that differ from it in the number only.
    """

    label: Path
    children: list[Subtree]
    item: NamedLeaf | None
    size: int
    bag: int
    structure: int
    numbers: frozenset[int] = frozenset()

    @property
    def is_list(self) -> bool:
        """True for layers: all children are numbers."""
        return bool(self.children) and all(child.label and isinstance(child.label[0], int) for child in self.children)

    def words(self) -> list[str]:
        """Returns the parts of the label; a number and the part before it as one."""
        found: list[str] = []
        for at, key in enumerate(self.label):
            if isinstance(key, str):
                found.append(key)
            elif at and isinstance(self.label[at - 1], str):
                # Numbers of other lists say nothing.
                text = f"{self.label[at - 1]}_{key}"
                found.append(text if self.numbers in (_TWO, _NONE) else f"{text} of {sorted(self.numbers)}")
        return found

    @functools.cached_property
    def all_words(self) -> frozenset[str]:
        """The parts of the names of all leaves below."""
        return frozenset(self.words()).union(*[child.all_words for child in self.children])

    def items(self) -> Iterator[NamedLeaf]:
        """Yields all leaves."""
        if self.item is not None:
            yield self.item
        for child in self.children:
            yield from child.items()

    def spread(self) -> list[Subtree]:
        """Returns the children as they are beside the nodes beside this one."""
        numbers = frozenset(key for child in self.children for key in child.label[:1] if isinstance(key, int))
        return [
            dataclasses.replace(child, label=self.label + child.label, numbers=numbers if self.is_list else _NONE)
            for child in self.children
        ]


_NONE: frozenset[int] = frozenset()
_TWO = frozenset({0, 1})


def leaf_number(item: NamedLeaf) -> int:
    """Returns the number of a leaf's shape and dtype."""
    return _number_of((item.shape, item.dtype))


def subtree_of(items: Iterable[NamedLeaf]) -> Subtree:
    """Returns the tree of leaves, at least one, by their paths."""
    return _node((), [(item.path, item) for item in items])


def _nodes(leaves: Sequence[tuple[Path, NamedLeaf]]) -> list[Subtree]:
    by_key: dict[Key, list[tuple[Path, NamedLeaf]]] = {}
    nodes: list[Subtree] = []
    for path, item in leaves:
        if path:
            by_key.setdefault(path[0], []).append((path[1:], item))
        else:
            nodes.append(_leaf_node((), item))
    for key, below in by_key.items():
        nodes.append(_node((key,), below))
    if all(node.label and isinstance(node.label[0], int) for node in nodes):
        nodes.sort(key=lambda node: int(node.label[0]))
    return nodes


def _leaf_node(label: Path, item: NamedLeaf) -> Subtree:
    number = leaf_number(item)
    return Subtree(label, [], item, 1, number, number)


def _node(label: Path, leaves: Sequence[tuple[Path, NamedLeaf]]) -> Subtree:
    if len(leaves) == 1:
        path, item = leaves[0]
        return _leaf_node(label + path, item)
    children = _nodes(leaves)
    if len(children) == 1:
        only = children[0]
        return dataclasses.replace(only, label=label + only.label)
    node = Subtree(label, children, None, len(leaves), sum(child.bag for child in children), 0)
    structures = [child.structure for child in children]
    node.structure = _number_of((node.is_list, tuple(structures if node.is_list else sorted(structures))))
    return node
