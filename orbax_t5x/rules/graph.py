"""Layouts of T5 as the nodes of a graph, and rule packs as its edges.

A relative of T5, or another program's names, is one node with one edge to a layout of T5X's; its way to every other
layout is the shortest path. A node is a kind of `layouts.Layout`. An edge names the dimensions that its pack takes,
which come from the shapes at both ends of the path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from orbax_t5x.rules.fused import t5_fused_to_unscanned
from orbax_t5x.rules.gguf import gguf_t5_to_hf_t5
from orbax_t5x.rules.hugging_face import hf_t5_to_t5x
from orbax_t5x.rules.hugging_face_flax import hf_flax_t5_to_t5x
from orbax_t5x.rules.layouts import NAMES
from orbax_t5x.rules.maxtext import t5x_decoder_to_maxtext
from orbax_t5x.rules.mesh_tf import mesh_tf_to_t5x
from orbax_t5x.rules.pack import RulePack, join_packs
from orbax_t5x.rules.pix2struct import pix2struct_decoder_to_hf_t5
from orbax_t5x.rules.t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned, t5_unscanned_to_scanned
from orbax_t5x.rules.wan import wan_t5_to_hf_t5

_HEADS = ("num_heads", "head_dim")
_AXIS = ("scan_axis",)


class Edge(NamedTuple):
    """Rule pack between two layouts.

    Attributes:
      source: the kind of layout that the pack takes.
      target: the kind that it makes.
      function: makes the pack.
      arguments: the dimensions that the function takes; the axis of the layers is the target's.
      has_way_back: whether the pack has an inverse.
    """

    source: str
    target: str
    function: Callable[..., RulePack]
    arguments: tuple[str, ...] = ()
    has_way_back: bool = True


EDGES = (
    Edge("gguf", "hugging face", gguf_t5_to_hf_t5),
    Edge("wan", "hugging face", wan_t5_to_hf_t5),
    Edge("pix2struct", "hugging face", pix2struct_decoder_to_hf_t5),
    Edge("hugging face", "minimal", hf_t5_to_t5x),
    Edge("hugging face flax", "minimal", hf_flax_t5_to_t5x),
    Edge("mesh tf", "minimal", mesh_tf_to_t5x, has_way_back=False),
    Edge("minimal", "unscanned", t5_minimal_to_unscanned, _HEADS),
    Edge("minimal", "scanned", t5_minimal_to_scanned, (*_HEADS, *_AXIS)),
    Edge("unscanned", "scanned", t5_unscanned_to_scanned, _AXIS),
    # Flaxformer's heads are joined.
    Edge("minimal", "scanned with joined heads", t5_unscanned_to_scanned, _AXIS),
    Edge("minimal", "scanned in subblocks with joined heads", t5_unscanned_to_scanned, (*_AXIS, "subblocks")),
    Edge("unscanned", "scanned in subblocks", t5_unscanned_to_scanned, (*_AXIS, "subblocks")),
    Edge("fused", "unscanned", t5_fused_to_unscanned),
    Edge("minimal", "maxtext", functools.partial(t5x_decoder_to_maxtext, scanned=False), _HEADS),
    Edge("minimal", "maxtext scanned", t5x_decoder_to_maxtext, (*_HEADS, *_AXIS)),
)


class EdgeStep(NamedTuple):
    """Edge of a path, in its direction or against it."""

    edge: Edge
    is_inverse: bool

    @property
    def end(self) -> str:
        """The kind of layout that the step leads to."""
        return self.edge.source if self.is_inverse else self.edge.target

    def pack(self, dimensions: Mapping[str, Any]) -> RulePack:
        """Makes the pack from a value for each of the edge's arguments."""
        pack = self.edge.function(**{name: dimensions[name] for name in self.edge.arguments})
        return pack.inverse() if self.is_inverse else pack


@functools.cache
def shortest_path(source: str, target: str) -> tuple[EdgeStep, ...] | None:
    """Finds the one shortest path between two kinds of layout; None where there is none.

    Raises:
      ValueError: two paths are as short, so that the edges do not decide what a mapping does.
    """
    # Kind -> all shortest paths to it.
    paths: dict[str, list[tuple[EdgeStep, ...]]] = {source: [()]}
    newest = paths
    while newest and target not in paths:
        found: dict[str, list[tuple[EdgeStep, ...]]] = {}
        for kind, ways in newest.items():
            for step in _steps_from(kind):
                if step.end not in paths:
                    found.setdefault(step.end, []).extend((*way, step) for way in ways)
        newest = found
        paths = {**paths, **newest}
    ways = paths.get(target, [])
    if len(ways) > 1:
        raise ValueError(f"several paths lead from {source} to {target}")
    return ways[0] if ways else None


def _steps_from(kind: str) -> list[EdgeStep]:
    forwards = [EdgeStep(edge, False) for edge in EDGES if edge.source == kind]
    return forwards + [EdgeStep(edge, True) for edge in EDGES if edge.target == kind and edge.has_way_back]


@functools.cache
def pack_to_minimal(kind: str) -> RulePack | None:
    """Returns the pack from the names of another program to T5X's minimal T5; None for T5X's and MaxText's layouts.

    It takes no dimensions of the model.
    """
    path = shortest_path(kind, "minimal") if kind in NAMES else None
    if not path:
        return None
    packs = [step.pack({}) for step in path]
    return join_packs(packs, [pack.inverse() for pack in reversed(packs) if pack.has_inverse])
