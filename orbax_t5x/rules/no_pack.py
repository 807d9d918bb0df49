"""Explains a missing rule pack, with a fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.rules.graph import pack_to_t5x, shortest_path
from orbax_t5x.rules.inference import (
    find_pack,
    layout_after,
    layouts_of,
    packs_between,
    parameter_leaves,
    views_or_zeros,
)
from orbax_t5x.rules.layouts import Layout, stacked_depths
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.names import Keep
from orbax_t5x.transforms.repeat_layers import RepeatLayers

WRITE_RULES = Fix("write AssignmentMap, Rename or StackLayers rules by hand")


def refusal_between(source: Mapping[str, Any], target: Mapping[str, Any]) -> RestorePlanError:
    """Describes two trees without a pack between them."""
    seen, wanted = layouts_of(source, target)
    found = _other_depth(source, target, seen, wanted) or _refusal_of_source(source, target, seen)
    if found is None:
        message = f"no rule pack leads from {_layout_text(seen, source)} to {_layout_text(wanted, target)}"
        if "unknown" not in (seen.kind, wanted.kind):
            message += f": {_why_not(seen, wanted)}"
        found = Problem("rule", None, message, WRITE_RULES)
    return RestorePlanError([found])


def _refusal_of_source(source: Mapping[str, Any], target: Mapping[str, Any], seen: Layout) -> Problem | None:
    """Returns the first pack's refusal, with fixes to the target."""
    notes = Diagnostics()
    first = pack_to_t5x(seen.kind)
    if first is not None:
        first.apply(views_or_zeros(parameter_leaves(source)), {}, notes)
    for problem in notes.problems:
        if problem.kind == "rule":
            ways = [_led_on(way, source, target) for way in (problem.fix.ways if problem.fix else ())]
            return dataclasses.replace(problem, fix=Fix.any_of(*ways) if ways else None)
    return None


def _led_on(fix: Fix, source: Mapping[str, Any], target: Mapping[str, Any]) -> Fix:
    """Extends a fix by the transforms to the target."""
    keep, *_ = fix.arguments.get("transforms", (None,))
    if not isinstance(keep, Keep):
        return fix
    pack = find_pack(keep.apply(source, {}, Diagnostics()), target)
    return fix if pack is None else Fix.setting(fix.words, transforms=(keep, *pack.parts))


def _why_not(seen: Layout, wanted: Layout) -> str:
    """Explains a missing path between two known layouts."""
    if shortest_path(seen.kind, wanted.kind) is None:
        return f"{wanted.kind} has no way back: mesh_tf_to_t5x() has no inverse"
    return "no leaf's shape, or not the same depth, fits on both sides"


def _other_depth(source: Mapping[str, Any], target: Mapping[str, Any], seen: Layout, wanted: Layout) -> Problem | None:
    """Returns the problem of another depth in known layouts."""
    pack = pack_to_t5x(seen.kind)
    first = () if pack is None else (pack,)
    layout = seen if pack is None else layout_after(pack, parameter_leaves(source))
    if pack_to_t5x(wanted.kind) is not None or layout.is_scanned == wanted.is_scanned:
        return None
    scanned, unrolled = (wanted, layout) if wanted.is_scanned else (layout, wanted)
    axis, stacked = next(iter(stacked_depths(scanned, unrolled).items()), (0, dict[str, int]()))
    old, new = (layout.depths, stacked) if wanted.is_scanned else (stacked, wanted.depths)
    towers = [tower for tower in sorted(stacked) if tower in unrolled.depths and old[tower] != new[tower]]
    deeper = dataclasses.replace(unrolled, depths=stacked)
    packs = packs_between(deeper, wanted) if wanted.is_scanned else packs_between(layout, deeper)
    if not towers or packs is None:
        return None
    text = "; its ".join(f"{tower} has {old[tower]} layers, {new[tower]} are wanted" for tower in towers)
    where = r"layers_(\d+)" if wanted.is_scanned else None
    transforms: list[Transform] = [
        RepeatLayers(f"(?:.*/)?{tower}/{where or tower}/.*", new[tower], axis=None if where else axis)
        for tower in towers
    ]
    fix = Fix.setting("pass {}", transforms=(*first, *transforms, *packs))
    return Problem(
        "shape", None, f"the checkpoint's {text}; RepeatLayers makes layer i a copy of layer i * old // new", fix
    )


def _layout_text(layout: Layout, leaves: Mapping[str, Any]) -> str:
    pack = pack_to_t5x(layout.kind)
    if pack is not None:
        return f"{layout.kind} ({layout_after(pack, leaves)})"
    if layout.mixed:
        return f"names of several layouts ({' and '.join(layout.mixed)})"
    return str(layout) if layout.kind != "unknown" else f"unknown names (such as {sorted(leaves)[:2]})"
