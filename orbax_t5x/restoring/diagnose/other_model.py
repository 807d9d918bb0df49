"""What tells that the target is another model than the checkpoint's: more layers, or another kind of feed-forward.

Each makes dozens of missing leaves, and none of them is lost: the model has to be built as the checkpoint's was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.wording import counted

_LAYER = re.compile(r"(?P<tower>(?:.*/)?(?:encoder|decoder))/layers_(?P<number>\d+)/.*")
_FEED_FORWARD = re.compile(r"(?P<layer>.*)/mlp/(?P<kind>wi|wi_0|wi_1)/kernel")
_GATED = "wi_0"
_PLAIN = "wi"


def other_models(missing: Collection[str], source: Collection[str], target: Collection[str]) -> Mapping[str, Problem]:
    """The problem that explains a missing leaf, by its name; leaves that nothing explains are not in it.

    Args:
      missing: names of the target that nothing fills.
      source: names of the state dict.
      target: names of the target.
    """
    depths, wanted = _depths(source), _depths(target)
    kinds = _feed_forward(source)
    found: dict[str, Problem] = {}
    for name in missing:
        layer, feed_forward = _LAYER.fullmatch(name), _FEED_FORWARD.fullmatch(name)
        if layer is not None and 0 < depths.get(layer["tower"], 0) <= int(layer["number"]):
            tower = layer["tower"]
            found[name] = _fewer_layers(tower, depths[tower], wanted[tower])
        elif feed_forward is not None:
            kind = _PLAIN if feed_forward["kind"] == _PLAIN else _GATED
            if kinds.get(feed_forward["layer"], kind) != kind:
                found[name] = _other_feed_forward(kind)
    return found


def _depths(names: Collection[str]) -> dict[str, int]:
    """How many layers each tower has."""
    depths: dict[str, int] = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        depths[match["tower"]] = max(depths.get(match["tower"], 0), int(match["number"]) + 1)
    return depths


def _feed_forward(names: Collection[str]) -> dict[str, str]:
    """Whether each layer is gated, by what stands before `mlp`."""
    matches = filter(None, map(_FEED_FORWARD.fullmatch, names))
    return {match["layer"]: _PLAIN if match["kind"] == _PLAIN else _GATED for match in matches}


def _fewer_layers(tower: str, depth: int, wanted: int) -> Problem:
    message = f"the checkpoint's {tower.rpartition('/')[2]} has {counted(depth, 'layer')}, the target's {wanted}"
    return Problem(
        "missing", None, message, Fix("build the model with as many layers, or give fallback= for the others")
    )


def _other_feed_forward(kind: str) -> Problem:
    gated, plain = "gated (mlp/wi_0, mlp/wi_1)", "not gated (mlp/wi)"
    theirs, ours, activations = (plain, gated, "('relu',)")
    if kind == _PLAIN:
        theirs, ours, activations = gated, plain, "('gelu', 'linear')"
    message = f"the checkpoint's feed-forward layers are {theirs}, and the target's are {ours}"
    fix = f"build the model as the checkpoint's was (T5X: mlp_activations={activations})"
    return Problem("missing", None, message, Fix(fix))
