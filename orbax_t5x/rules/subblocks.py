"""Flaxformer's subblocks: every N-th layer is in the same stack."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
from orbax_t5x.transforms.prefix import rename_leaves
from orbax_t5x.trees.flat import FlatState

_IN_LAYERS = re.compile(r"(?P<tower>(?:.*/)?(?:encoder|decoder))/layers_(?P<i>\d+)/(?P<rest>.*)")
_IN_SUBBLOCKS = re.compile(
    r"(?P<tower>(?:.*/)?(?:encoder|decoder))/subblock_(?P<block>\d+)/layers_(?P<i>\d+)/(?P<rest>.*)"
)


@dataclasses.dataclass(frozen=True)
class IntoSubblocks(Transform):
    """Renames layer i to `subblock_{i % count}/layers_{i // count}`."""

    count: int

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        depths: dict[str, int] = {}
        renames: dict[str, str] = {}
        for name in state:
            match = _IN_LAYERS.fullmatch(name)
            if match is not None:
                number, block = divmod(int(match["i"]), self.count)
                depths[match["tower"]] = max(depths.get(match["tower"], 0), int(match["i"]) + 1)
                renames[name] = f"{match['tower']}/subblock_{block}/layers_{number}/{match['rest']}"
        for tower, depth in depths.items():
            if depth % self.count:
                message = f"{tower!r} has {depth} layers, which are not {self.count} subblocks of as many each"
                diagnostics.problem("rule", None, message, Fix("give the pack the model's number of subblocks"))
        return rename_leaves(state, renames, f"in {self.count} subblocks", diagnostics)


@dataclasses.dataclass(frozen=True)
class OutOfSubblocks(Transform):
    """Inverse of `IntoSubblocks`."""

    count: int

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        counts: dict[str, int] = {}
        renames: dict[str, str] = {}
        for name in state:
            match = _IN_SUBBLOCKS.fullmatch(name)
            if match is not None:
                block = int(match["block"])
                counts[match["tower"]] = max(counts.get(match["tower"], 0), block + 1)
                renames[name] = f"{match['tower']}/layers_{int(match['i']) * self.count + block}/{match['rest']}"
        for tower, count in counts.items():
            if count != self.count:
                message = f"{tower!r} has {count} subblocks, and not {self.count}"
                diagnostics.problem("rule", None, message, Fix("give the pack the model's number of subblocks"))
        return rename_leaves(state, renames, f"out of {self.count} subblocks", diagnostics)


def stack_subblocks(count: int, scan_axis: int) -> tuple[Transform, ...]:
    """Makes the transforms that stack layers in subblocks."""
    pattern = r"((?:.*/)?)(encoder|decoder)/(subblock_\d+)/layers_(?P<i>\d+)/(.*)"
    return IntoSubblocks(count), StackLayers(pattern, r"\1\2/\2/\3/\5", scan_axis, require_match=False)


def unstack_subblocks(count: int, scan_axis: int) -> tuple[Transform, ...]:
    """Makes the transforms that unstack them."""
    pattern = r"((?:.*/)?)(encoder|decoder)/\2/(subblock_\d+)/(.*)"
    return UnstackLayers(pattern, r"\1\2/\3/layers_{i}/\4", scan_axis, require_match=False), OutOfSubblocks(count)
