r"""Restore-time transforms: frozen dataclasses that map names and compose lazy views, before a byte is read.

Example:
  >>> stack = ot.transforms.StackLayers(r"encoder/layers_(\d+)/(.*)", r"encoder/layers/\2", axis=0)
  >>> stack({"encoder": {"layers_0": {"w": np.zeros(4)}, "layers_1": {"w": np.ones(4)}}}, {})["encoder"]["layers"]
  {'w': View(shape=(2, 4), dtype=float64, of='encoder/layers_0/w' and 1 more, stack of 2 on axis 0)}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_t5x import on_demand

if TYPE_CHECKING:
    from orbax_t5x.transforms.arrays import Cast, Repeat, Reshape, Transpose
    from orbax_t5x.transforms.assignment_map import AssignmentMap
    from orbax_t5x.transforms.base import Transform
    from orbax_t5x.transforms.chain import Chain
    from orbax_t5x.transforms.dequantize import Dequantize
    from orbax_t5x.transforms.follow.adafactor_slots import AdafactorSlots
    from orbax_t5x.transforms.follow.optimizer import FollowOptimizer
    from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
    from orbax_t5x.transforms.low_rank import AddLowRank
    from orbax_t5x.transforms.names import Drop, Intersect, Keep, Merge, Rename
    from orbax_t5x.transforms.repeat_layers import RepeatLayers
    from orbax_t5x.transforms.sizes import FALLBACK, Pad, Slice
    from orbax_t5x.transforms.sources import Average, Overlay
    from orbax_t5x.transforms.split_concat import Concat, Split
    from orbax_t5x.transforms.translate import Translate

__all__ = [
    "FALLBACK",
    "AdafactorSlots",
    "AddLowRank",
    "AssignmentMap",
    "Average",
    "Cast",
    "Chain",
    "Concat",
    "Dequantize",
    "Drop",
    "FollowOptimizer",
    "Intersect",
    "Keep",
    "Merge",
    "Overlay",
    "Pad",
    "Rename",
    "Repeat",
    "RepeatLayers",
    "Reshape",
    "Slice",
    "Split",
    "StackLayers",
    "Transform",
    "Translate",
    "Transpose",
    "UnstackLayers",
]

# Name -> module that has it.
_PUBLIC = {
    "FALLBACK": "orbax_t5x.transforms.sizes",
    "AdafactorSlots": "orbax_t5x.transforms.follow.adafactor_slots",
    "AddLowRank": "orbax_t5x.transforms.low_rank",
    "AssignmentMap": "orbax_t5x.transforms.assignment_map",
    "Average": "orbax_t5x.transforms.sources",
    "Cast": "orbax_t5x.transforms.arrays",
    "Chain": "orbax_t5x.transforms.chain",
    "Concat": "orbax_t5x.transforms.split_concat",
    "Dequantize": "orbax_t5x.transforms.dequantize",
    "Drop": "orbax_t5x.transforms.names",
    "FollowOptimizer": "orbax_t5x.transforms.follow.optimizer",
    "Intersect": "orbax_t5x.transforms.names",
    "Keep": "orbax_t5x.transforms.names",
    "Merge": "orbax_t5x.transforms.names",
    "Overlay": "orbax_t5x.transforms.sources",
    "Pad": "orbax_t5x.transforms.sizes",
    "Rename": "orbax_t5x.transforms.names",
    "Repeat": "orbax_t5x.transforms.arrays",
    "RepeatLayers": "orbax_t5x.transforms.repeat_layers",
    "Reshape": "orbax_t5x.transforms.arrays",
    "Slice": "orbax_t5x.transforms.sizes",
    "Split": "orbax_t5x.transforms.split_concat",
    "StackLayers": "orbax_t5x.transforms.layers",
    "Transform": "orbax_t5x.transforms.base",
    "Translate": "orbax_t5x.transforms.translate",
    "Transpose": "orbax_t5x.transforms.arrays",
    "UnstackLayers": "orbax_t5x.transforms.layers",
}

if not TYPE_CHECKING:  # a misspelled name is an error to type checkers
    __getattr__ = on_demand.loader(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
