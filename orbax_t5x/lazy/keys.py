"""Nodes between typed PRNG keys and their data.

The data of a key are a few uint32 along a last dimension that the keys' own array does not have. While transforms run,
a view has the shape of the keys: its elements are records of that data, which nodes can move, but not compute with.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.view import View

_FIELD = "prng_key_data"


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeysNode(Node):
    """Keys made of the input, their data [..., words]; make it with `as_keys`."""

    def describe_step(self) -> str:
        return "PRNG keys"

    def _data_box(self, box: Box) -> Box:
        return (*box, (0, self.input.shape[-1]))

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(self._data_box(box), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        self.input.add_work(self._data_box(box), out[_FIELD], lowered)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyDataNode(Node):
    """Data [..., words] of the input's keys; make it with `key_data`."""

    def describe_step(self) -> str:
        return "key data"

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box[:-1], found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        first, last = box[-1]
        keys = lowered.read(self.input, box[:-1])
        lowered.add_step(partial(np.copyto, out, keys[_FIELD][..., first:last]))


def is_keys(view: View) -> bool:
    """Reports whether the elements of a view are PRNG keys."""
    return view.dtype.names == (_FIELD,)


def as_keys(view: View) -> View:
    """Returns the keys of a view of their data."""
    if isinstance(view.node, KeyDataNode):
        return View(view.node.input)
    leaf = view.node.own_leaf
    if leaf is None or leaf.prng_impl is None or not view.shape:
        return view
    dtype = np.dtype([(_FIELD, view.dtype, (view.shape[-1],))])
    return View(KeysNode(view.shape[:-1], dtype, (view.node,)))


def key_data(view: View) -> View:
    """Returns the data of a view of keys."""
    if not is_keys(view):
        return view
    if isinstance(view.node, KeysNode):
        return View(view.node.input)
    field = view.dtype[_FIELD]
    return View(KeyDataNode((*view.shape, *field.shape), field.base, (view.node,)))
