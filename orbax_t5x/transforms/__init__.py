r"""Restore-time transforms: frozen dataclasses that map names and compose lazy views, before a byte is read.

Example:
  >>> stack = ot.transforms.StackLayers(r"encoder/layers_(\d+)/(.*)", r"encoder/layers/\2", axis=0)
  >>> stack({"encoder": {"layers_0": {"w": np.zeros(4)}, "layers_1": {"w": np.ones(4)}}}, {})["encoder"]["layers"]
  {'w': View(shape=(2, 4), dtype=float64, of='encoder/layers_0/w' and 1 more, stack of 2 on axis 0)}
"""

from __future__ import annotations

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
