"""Leaves as the alignment of two trees takes them."""

from orbax_t5x.rules.alignment.tree import NamedLeaf
from orbax_t5x.rules.alignment.words import path_of


def items(shapes):
    """Leaves of shapes by name."""
    return [NamedLeaf((name,), shape, "float32", path_of(name)) for name, shape in shapes.items()]
