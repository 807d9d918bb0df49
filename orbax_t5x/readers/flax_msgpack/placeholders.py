"""Texts in early Orbax's msgpack files that refer to arrays."""

from __future__ import annotations

from orbax_t5x.readers.flax_msgpack.walk import Node, StoredText

_PLACEHOLDER = b"PLACEHOLDER://"


def is_early_item(tree: dict[str, Node]) -> bool:
    """Tests if a msgpack tree's leaf refers to an Orbax array."""
    stack: list[Node] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list):
            stack += node
        elif placeholder(node) is not None:
            return True
    return False


def placeholder(node: Node) -> str | None:
    """Returns the name of a node's array, or None."""
    if isinstance(node, StoredText) and node.short is not None and node.short.startswith(_PLACEHOLDER):
        return node.short[len(_PLACEHOLDER) :].decode(errors="replace")
    return None
