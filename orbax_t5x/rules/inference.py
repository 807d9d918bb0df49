"""Finds the rule pack between two trees by names and shapes.

The layouts of both sides come first (`layouts`), then what is left: the prefix of the parameters, and whether the
target has a place for the optimizer's state. Nothing is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.lazy import View, as_view, broadcast_to
from orbax_t5x.optim.optimizer_names import is_in_optimizer, is_step
from orbax_t5x.rules.graph import pack_function, pack_to_t5x, shortest_path
from orbax_t5x.rules.layouts import Layout, axes_between, find_layout, heads_of, leaves_of
from orbax_t5x.rules.pack import RulePack, join_packs
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.dequantize import scales_beside
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.names import Drop
from orbax_t5x.transforms.prefix import change_between
from orbax_t5x.transforms.run import run_and_place

# The group is of a layer's bias only.
_BIAS = re.compile(r"(?:.*/)?(?:encoder|decoder)/(layers_\d+/)?relpos_bias/rel_embedding")
# What a target without an optimizer has no place for.
_TRAINING = (r"state/param_states/.*", r"opt_state/.*", r"state/step", r"step")
_adafactor_slots = on_demand.function("orbax_t5x.transforms.follow.adafactor_slots", "AdafactorSlots")
_convert_slots = on_demand.function("orbax_t5x.optim.factored_state", "convert_slots")
_refusal_between = on_demand.function("orbax_t5x.rules.no_pack", "refusal_between")


def parameter_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves that are not the optimizer's."""
    return {name: leaf for name, leaf in leaves.items() if not is_in_optimizer(name) and not is_step(name)}


def packs_between(source: Layout, target: Layout) -> list[RulePack] | None:
    """Returns the packs between T5X's or MaxText's layouts."""
    path = shortest_path(source.kind, target.kind)
    axes = axes_between(source, target) if path else {}
    if path is None or axes is None:
        return None
    heads = next(filter(None, (heads_of(end, axes.get(end.kind)) for end in (source, target))), None)
    dimensions: dict[str, Any] = {} if heads is None else {"num_heads": heads[0], "head_dim": heads[1]}
    dimensions["bias_per_layer"] = source.has_own_biases or target.has_own_biases
    packs: list[RulePack] = []
    for step in path:
        stacked = next((end for end in (source, target) if end.kind == step.edge.target and end.is_scanned), None)
        given = dict(dimensions)
        if stacked is not None:
            given |= {"scan_axis": axes[stacked.kind], "subblocks": stacked.subblocks}
        if not given.keys() >= set(step.edge.arguments):
            return None
        packs.append(step.pack(given))
    return packs


def infer(source_leaves: Any, target_leaves: Any) -> RulePack:
    """Finds the rule pack that maps a checkpoint's leaves to a target's.

    Where the target has no place for the checkpoint's optimizer state or step, the pack drops them.

    Args:
      source_leaves: an opened checkpoint, its `leaves`, or a nested state dict.
      target_leaves: whatever a restore takes as its target, or leaves by name.

    Returns:
      A transform. `print(pack.name)` shows its name, `pack.found` the layouts found, and `pack.parts` are the
      equivalent transforms. It has no steps where the target's names are the checkpoint's.

    Raises:
      RestorePlanError: no pack leads from one to the other; the text describes both.

    Example:
      >>> state = {f"target/encoder/layers_{number}/attention/query/kernel": np.ones((16, 8)) for number in range(3)}
      >>> ot.rules.infer(state, {"target/encoder/encoder/attention/query/kernel": np.ones((16, 3, 2, 4))})
      <RulePack from minimal (encoder of 3 layers) to scanned: t5_minimal_to_scanned(num_heads=2, head_dim=4)>
    """
    pack = find_pack(source_leaves, target_leaves)
    if pack is None:
        raise _refusal_between(leaves_of(source_leaves), leaves_of(target_leaves))
    return pack


def find_pack(source_leaves: Any, target_leaves: Any, settings: Diagnostics | None = None) -> RulePack | None:
    """Finds the pack of `infer`; `settings` are those of the restore."""
    settings = settings or Diagnostics()
    source, target = leaves_of(source_leaves), leaves_of(target_leaves)
    seen, wanted = layouts_of(source, target)
    is_one_layout = seen.kind == wanted.kind or "unknown" in (seen.kind, wanted.kind)
    if is_one_layout and _wanted_names(target) <= source.keys():
        pack = RulePack((), (), "nothing to map")
    else:
        pack = _find_names(source, target, seen, wanted)
    if pack is None:
        return None
    views = views_or_zeros(source)
    names = _applied(pack, views, target, settings)
    biases = _between_biases(names, target)
    if biases is not None:
        pack = join_packs((*pack.parts, biases), (biases.inverse(), *pack.inverse().parts) if pack.has_inverse else ())
        names = _applied(pack, views, target, settings)
    if scales_beside(names, names) and not scales_beside(target, target):
        pack = join_packs((*pack.parts, pack_function("scaled_fp8_to_float32")()), ())
        names = _applied(pack, views, target, settings)
    slots = slots_between(names, target)
    if slots:
        pack = join_packs((*pack.parts, *slots), (*slots, *pack.inverse().parts) if pack.has_inverse else ())
        names = _applied(pack, views, target, settings)
    dropped = without_place(names, target)
    if dropped:
        drop = Drop(dropped)
        pack = join_packs((*pack.parts, drop), pack.inverse().parts if pack.has_inverse else ())
    return dataclasses.replace(pack, found=f"from {seen} to {wanted}: {pack.name}")


def _applied(pack: RulePack, source: Mapping[str, Any], target: Mapping[str, Any], settings: Diagnostics) -> Any:
    return run_and_place((pack,), source, target, diagnostics=settings.settings())


def to_minimal(leaves: Mapping[str, Any]) -> RulePack | None:
    """Returns the pack to T5X's minimal names, or None.

    Layers that are stacked are taken for stacked on axis 1, as T5X stacks them. Heads stay split.
    """
    layout = find_layout(parameter_leaves(leaves))
    if layout.is_scanned and "maxtext" not in layout.kind:
        subblocks = layout.subblocks if "subblocks" in layout.kind else None
        return pack_function("t5_unscanned_to_scanned")(scan_axis=1, subblocks=subblocks).inverse()
    pack = pack_to_t5x(layout.kind)
    rest = None if pack is None else to_minimal(pack.apply(views_or_zeros(leaves), {}, Diagnostics()))
    return pack if pack is None or rest is None else join_packs((*pack.parts, *rest.parts), ())


def _wanted_names(target: Mapping[str, Any]) -> set[str]:
    return {name for name, leaf in target.items() if leaf is not None and leaf is not ...}


def layouts_of(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Layout, Layout]:
    """Finds the layouts of two trees."""
    return find_layout(parameter_leaves(source)), find_layout(parameter_leaves(target))


def _find_names(source: Mapping[str, Any], target: Mapping[str, Any], seen: Layout, wanted: Layout) -> RulePack | None:
    """Finds the pack for names that differ."""
    pack = _pack_between(parameter_leaves(source), parameter_leaves(target), seen, wanted)
    if pack is None and "unknown" in (seen.kind, wanted.kind):
        # The prefix may be all that differs.
        renaming = _same_layout(source, target)
        if renaming.steps and _wanted_names(target) <= run_and_place((renaming,), source, target).keys():
            return renaming
    return pack if pack is None or pack.steps else _same_layout(source, target)


def _same_layout(source: Mapping[str, Any], target: Mapping[str, Any]) -> RulePack:
    """Renames to another prefix or kind of train state."""
    change = change_between(source, target)
    parts: tuple[Transform, ...] = ()
    back: tuple[Transform, ...] = ()
    if change is not None:
        parts, back = (change.transform(),), (change.reversed().transform(),)
    return join_packs(parts, back) if parts else RulePack((), (), "nothing to map")


def slots_between(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Transform, ...]:
    """Returns the conversion between T5X's and Optax's Adafactor, or None."""
    have, want = ({name: leaf for name, leaf in side.items() if hasattr(leaf, "shape")} for side in (source, target))
    found = _convert_slots(have, want)
    if found.renames and not found.problems and found.renames.keys() <= want.keys():
        return (_adafactor_slots(),)
    return ()


def without_place(names: Iterable[str], target: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns patterns of training state that the target lacks."""
    names = list(names)
    patterns: list[str] = []
    for pattern in _TRAINING:
        found = [name for name in names if re.fullmatch(pattern, name)]
        # A state of which a part fits is the target's own: what is missing there is for the plan to say.
        if found and not any(name in target for name in found):
            patterns.append(pattern)
    return tuple(patterns)


def _pack_between(
    source: Mapping[str, Any], target: Mapping[str, Any], seen: Layout, wanted: Layout
) -> RulePack | None:
    """Returns the pack between two layouts, or None.

    The dimensions come from T5X's layouts, to which the names of other programs are led on either side.
    """
    path = None if "unknown" in (seen.kind, wanted.kind) else shortest_path(seen.kind, wanted.kind)
    if path is None:
        return None
    if any(step.edge.arguments for step in path):
        first, last = (pack_to_t5x(layout.kind) for layout in (seen, wanted))
        between = packs_between(
            seen if first is None else layout_after(first, source),
            wanted if last is None else layout_after(last, target),
        )
        if between is None:
            return None
        steps = [*_pack_parts(first), *between, *([] if last is None else _pack_parts(last.inverse()))]
    else:
        steps = [step.pack({}) for step in path]
    if not steps:
        return RulePack((), (), "nothing to map")
    return join_packs(steps, [pack.inverse() for pack in reversed(steps) if pack.has_inverse])


def _between_biases(names: Iterable[str], target: Iterable[str]) -> RulePack | None:
    """Returns the pack between biases of towers and layers."""
    found, wanted = ({bool(match[1]) for match in map(_BIAS.fullmatch, side) if match} for side in (names, target))
    if len(found) != 1 or len(wanted) != 1 or found == wanted:
        return None
    pack = pack_function("t5_minimal_to_unscanned")()
    return pack if wanted == {True} else pack.inverse()


def _pack_parts(pack: RulePack | None) -> list[RulePack]:
    return [] if pack is None else [part for part in pack.parts if isinstance(part, RulePack)]


def layout_after(pack: RulePack, source: Mapping[str, Any]) -> Layout:
    """Returns the layout that a pack makes of a source."""
    notes = Diagnostics()
    mapped = pack.apply(views_or_zeros(source), {}, notes)
    return find_layout(parameter_leaves({name: leaf for name, leaf in mapped.items() if name not in notes.explained}))


def views_or_zeros(leaves: Mapping[str, Any]) -> dict[str, View]:
    """Converts arrays to views; abstract arrays to zeros."""
    views: dict[str, View] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        with contextlib.suppress(TypeError, ValueError):  # texts, None, `...` and typed PRNG keys
            views[name] = as_view(leaf, name=name)
    return views
