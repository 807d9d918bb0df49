"""Graph of T5's layouts and the packs between them.

A row is a pack from one layout to another, with marks that tell its layout by names alone. A relative of T5, or another
program's names, is one row that leads to a layout of T5X's; its way to every other layout is the shortest path. The
package's rows load nothing until a path uses them; other packages add theirs by entry points, and callers by
`register`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from orbax_t5x.registry import Registry, RegistryEntry
from orbax_t5x.rules.pack import PackCall, RulePack, join_packs, names_of_layouts

_HEADS = ("num_heads", "head_dim")
_AXIS = ("scan_axis",)
_BIASES = ("bias_per_layer",)
_PARTS = (*_AXIS, "subblocks")

_logger = logging.getLogger(__name__)

PACKS: Registry[Callable[..., RulePack] | RulePack] = Registry(
    "rule pack",
    {
        "gguf_t5_to_hf_t5": "orbax_t5x.rules.gguf:gguf_t5_to_hf_t5",
        "hf_flax_t5_to_t5x": "orbax_t5x.rules.hugging_face_flax:hf_flax_t5_to_t5x",
        "hf_t5_to_t5x": "orbax_t5x.rules.hugging_face:hf_t5_to_t5x",
        "mesh_tf_to_t5x": "orbax_t5x.rules.mesh_tf:mesh_tf_to_t5x",
        "peft_lora": "orbax_t5x.rules.peft:peft_lora",
        "pix2struct_decoder_to_hf_t5": "orbax_t5x.rules.pix2struct:pix2struct_decoder_to_hf_t5",
        "scaled_fp8_to_float32": "orbax_t5x.rules.scaled_fp8:scaled_fp8_to_float32",
        "t5_fused_to_unscanned": "orbax_t5x.rules.fused:t5_fused_to_unscanned",
        "t5_minimal_to_scanned": "orbax_t5x.rules.t5x:t5_minimal_to_scanned",
        "t5_minimal_to_unscanned": "orbax_t5x.rules.t5x:t5_minimal_to_unscanned",
        "t5_unscanned_to_scanned": "orbax_t5x.rules.t5x:t5_unscanned_to_scanned",
        "t5x_decoder_to_maxtext": "orbax_t5x.rules.maxtext:t5x_decoder_to_maxtext",
        "t5x_to_hf_t5": "orbax_t5x.rules.hugging_face:t5x_to_hf_t5",
        "wan_t5_to_hf_t5": "orbax_t5x.rules.wan:wan_t5_to_hf_t5",
    },
    group="orbax_t5x.layouts",
)
"""Functions that make rule packs, by name; those of other packages may be packs."""
NO_PACKS = frozenset({"Alignment", "RulePack", "align", "auto", "infer", "register"})
"""Names that no pack may have."""


class Edge(NamedTuple):
    """Row of the table: a pack between two layouts.

    Attributes:
      source: the layout that the pack takes.
      target: the layout that it makes.
      pack: its name in `PACKS`.
      marks: a regex for names that only the marked layout has; empty if shapes tell both layouts.
      arguments: the dimensions that the pack takes; the axis of the layers is the target's.
      given: its other arguments.
      has_way_back: whether the pack has an inverse.
      marks_target: whether it is the target's names that have the marks.
    """

    source: str
    target: str
    pack: str
    marks: str = ""
    arguments: tuple[str, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()
    has_way_back: bool = True
    marks_target: bool = False


EDGES = (
    Edge("gguf", "hugging face", "gguf_t5_to_hf_t5", r"^(?:enc|dec)\.blk\.\d+\."),
    Edge(
        "wan",
        "hugging face",
        "wan_t5_to_hf_t5",
        r"(?:^|\.)blocks\.\d+\.(?:attn\.[qkvo]|ffn\.gate\.0|pos_embedding\.embedding)\.weight$",
    ),
    Edge(
        "pix2struct",
        "hugging face",
        "pix2struct_decoder_to_hf_t5",
        r"(?:^|\.)decoder\.layer\.\d+\.(?:self_attention\.attention|mlp\.DenseReluDense)\.",
    ),
    Edge("hugging face", "minimal", "hf_t5_to_t5x", r"(?:^|[./])(?:encoder|decoder)\.block\.\d+\.layer\."),
    Edge("hugging face flax", "minimal", "hf_flax_t5_to_t5x", r"(?:^|/)(?:encoder|decoder)/block/\d+/layer/"),
    Edge("mesh tf", "minimal", "mesh_tf_to_t5x", r"^(?:encoder|decoder|transformer)/block_\d+/", has_way_back=False),
    Edge("minimal", "unscanned", "t5_minimal_to_unscanned", arguments=(*_HEADS, *_BIASES)),
    Edge("minimal", "scanned", "t5_minimal_to_scanned", arguments=(*_HEADS, *_AXIS, *_BIASES)),
    Edge("unscanned", "scanned", "t5_unscanned_to_scanned", arguments=_AXIS),
    # Flaxformer's heads are joined.
    Edge("minimal", "scanned with joined heads", "t5_unscanned_to_scanned", arguments=_AXIS),
    Edge("minimal", "scanned in subblocks with joined heads", "t5_unscanned_to_scanned", arguments=_PARTS),
    Edge("unscanned", "scanned in subblocks", "t5_unscanned_to_scanned", arguments=_PARTS),
    Edge("fused", "unscanned", "t5_fused_to_unscanned"),
    Edge("minimal", "maxtext", "t5x_decoder_to_maxtext", arguments=_HEADS, given=(("scanned", False),)),
    Edge("minimal", "maxtext scanned", "t5x_decoder_to_maxtext", arguments=(*_HEADS, *_AXIS)),
)


def register(pack: RulePack) -> RegistryEntry:
    r"""Adds a pack to the table until it is unregistered.

    `ot.rules.NAME()` is the pack.

    Args:
      pack: has a name, and two named layouts by `RulePack.between`. A new layout has marks that no known name has.

    Returns:
      An object with `unregister()`; as a context manager it ends with the block.

    Raises:
      TypeError: it is no rule pack.
      ValueError: the name is taken, it leads between layouts that other packs join already, or something is missing.

    Example:
      >>> rename = (ot.transforms.Rename(((r"blk(\d+)/(.*)", r"target/encoder/layers_\1/\2"),)),)
      >>> pack = ot.rules.RulePack(rename, name="toy_to_t5x").between("toy", "minimal", marks=r"^blk\d+/")
      >>> with ot.rules.register(pack):
      ...     ot.rules.toy_to_t5x() == pack
      True
    """
    if not isinstance(pack, RulePack):
        raise TypeError(f"{pack!r} is no rule pack")
    if not pack.name.isidentifier():
        raise ValueError(f"a registered pack has a name such as 'toy_to_t5x', and not {pack.name!r}")
    if pack.name not in PACKS.names():
        _edge_of(pack.name, pack, edges())
    return PACKS.register(pack.name, pack)


def pack_function(name: str) -> Callable[..., RulePack]:
    """Returns the function that makes the pack of a name.

    Raises:
      KeyError: no pack has the name.
      ImportError: the module of the pack cannot be imported.
    """
    entry = PACKS.get(name)
    if not isinstance(entry, RulePack):
        return entry
    pack = dataclasses.replace(entry, _call=PackCall(name))

    def registered() -> RulePack:
        return pack

    registered.__name__ = name
    return registered


def pack_names() -> tuple[str, ...]:
    """Lists the packs of the table."""
    return PACKS.names()


def edges() -> tuple[Edge, ...]:
    """Returns all rows: the package's, then entry points', then callers'."""
    rows = EDGES
    for name in PACKS.joined_names():
        try:
            rows = (*rows, _edge_of(name, pack_function(name)(), rows))
        except Exception as error:  # code of others must not hide what a restore has to say
            _warn(name, str(error))
    return rows


@functools.cache
def _warn(name: str, reason: str) -> None:
    _logger.warning("the rule pack %r of another package is left out: %s", name, reason)


def _edge_of(name: str, pack: RulePack, rows: tuple[Edge, ...]) -> Edge:
    """Makes the row of a pack that is not the package's.

    Raises:
      ValueError: it has no place beside the other rows.
    """
    if name in NO_PACKS:
        raise ValueError(f"the name {name!r} stands for something else in ot.rules or in --rules")
    source, target = pack.layouts
    kinds = {end for row in rows for end in (row.source, row.target)}
    unknown = [end for end in (source, target) if end not in kinds]
    if not source or not target:
        raise ValueError(f"{name}: name its layouts by pack.between(source, target, marks=…)")
    if len(unknown) > 1:
        raise ValueError(f"{name}: no layout is named {source!r} or {target!r}; there are {', '.join(sorted(kinds))}")
    if unknown and not pack.marks:
        raise ValueError(f"{name}: {unknown[0]!r} is a new layout; give the marks= that tell it by names")
    if not unknown and pack.marks:
        raise ValueError(f"{name}: {source!r} and {target!r} are known; only a new layout has marks")
    other = next(filter(re.compile(pack.marks).search, _known_names()), None) if unknown else None
    if other is not None:
        raise ValueError(f"{name}: the marks {pack.marks!r} are in {other!r}, too, a name of another layout")
    edge = Edge(source, target, name, pack.marks, has_way_back=pack.has_inverse, marks_target=unknown == [target])
    if not unknown and any(
        _shortest_path(rows, *ends) is not None
        for ends in ((source, target), *(((target, source),) if edge.has_way_back else ()))
    ):
        raise ValueError(f"{name}: packs lead from {source!r} to {target!r} already")
    return edge


@functools.cache
def _known_names() -> tuple[str, ...]:
    """Lists leaf names of the package's layouts."""
    names: dict[str, None] = {}
    for edge in EDGES:
        pack = pack_function(edge.pack)(**dict.fromkeys(edge.arguments, 1), **dict(edge.given))
        names.update(dict.fromkeys(names_of_layouts(pack)))
    return tuple(names)


def marked_layouts() -> dict[str, str]:
    """Returns the marks of each layout that its names tell."""
    return {edge.target if edge.marks_target else edge.source: edge.marks for edge in edges() if edge.marks}


class EdgeStep(NamedTuple):
    """Edge of a path, in its direction or against it."""

    edge: Edge
    is_inverse: bool

    @property
    def end(self) -> str:
        """The layout that the step leads to."""
        return self.edge.source if self.is_inverse else self.edge.target

    def pack(self, dimensions: Mapping[str, Any]) -> RulePack:
        """Makes the pack from a value for each of the edge's arguments."""
        chosen = {name: dimensions[name] for name in self.edge.arguments}
        pack = pack_function(self.edge.pack)(**chosen, **dict(self.edge.given))
        return pack.inverse() if self.is_inverse else pack


def shortest_path(source: str, target: str) -> tuple[EdgeStep, ...] | None:
    """Finds the only shortest path between layouts."""
    return _shortest_path(edges(), source, target)


@functools.lru_cache(maxsize=256)
def _shortest_path(rows: tuple[Edge, ...], source: str, target: str) -> tuple[EdgeStep, ...] | None:
    # Kind -> all shortest paths to it.
    paths: dict[str, list[tuple[EdgeStep, ...]]] = {source: [()]}
    newest = paths
    while newest and target not in paths:
        found: dict[str, list[tuple[EdgeStep, ...]]] = {}
        for kind, ways in newest.items():
            for step in _steps_from(rows, kind):
                if step.end not in paths:
                    found.setdefault(step.end, []).extend((*way, step) for way in ways)
        newest = found
        paths = {**paths, **newest}
    ways = paths.get(target, [])
    if len(ways) > 1:
        raise ValueError(f"several paths lead from {source} to {target}")
    return ways[0] if ways else None


def _steps_from(rows: tuple[Edge, ...], kind: str) -> list[EdgeStep]:
    forwards = [EdgeStep(edge, False) for edge in rows if edge.source == kind]
    return forwards + [EdgeStep(edge, True) for edge in rows if edge.target == kind and edge.has_way_back]


def pack_to_t5x(kind: str) -> RulePack | None:
    """Returns the pack from another program's names to T5X's."""
    marked = marked_layouts()
    if kind not in marked:
        return None
    ends = {end for edge in edges() for end in (edge.source, edge.target)} - marked.keys()
    paths = [path for end in ends if (path := shortest_path(kind, end)) and not any(one.edge.arguments for one in path)]
    if not paths:
        return None
    packs = [step.pack({}) for step in min(paths, key=lambda path: (len(path), path[-1].end))]
    return join_packs(packs, [pack.inverse() for pack in reversed(packs) if pack.has_inverse])
