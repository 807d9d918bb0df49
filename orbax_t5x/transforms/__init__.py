r"""Restore-time transforms: frozen dataclasses that compose lazy views.

Example:
  >>> stack = ot.transforms.StackLayers(r"encoder/layers_(\d+)/(.*)", r"encoder/layers/\2", axis=0)
  >>> stack({"encoder": {"layers_0": {"w": np.zeros(4)}, "layers_1": {"w": np.ones(4)}}}, {})["encoder"]["layers"]
  {'w': View(shape=(2, 4), dtype=float64, of='encoder/layers_0/w' and 1 more, stack of 2 on axis 0)}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_t5x import on_demand

# For type checkers; the alias makes a name public.
if TYPE_CHECKING:
    from orbax_t5x.transforms.arrays import Affine as Affine
    from orbax_t5x.transforms.arrays import Cast as Cast
    from orbax_t5x.transforms.arrays import Repeat as Repeat
    from orbax_t5x.transforms.arrays import Reshape as Reshape
    from orbax_t5x.transforms.arrays import Transpose as Transpose
    from orbax_t5x.transforms.assignment_map import AssignmentMap as AssignmentMap
    from orbax_t5x.transforms.base import Transform as Transform
    from orbax_t5x.transforms.dequantize import Dequantize as Dequantize
    from orbax_t5x.transforms.follow.adafactor_slots import AdafactorSlots as AdafactorSlots
    from orbax_t5x.transforms.follow_optimizer import FollowOptimizer as FollowOptimizer
    from orbax_t5x.transforms.inverses import inverse as inverse
    from orbax_t5x.transforms.layers import Concat as Concat
    from orbax_t5x.transforms.layers import Split as Split
    from orbax_t5x.transforms.layers import StackLayers as StackLayers
    from orbax_t5x.transforms.layers import UnstackLayers as UnstackLayers
    from orbax_t5x.transforms.low_rank import AddLowRank as AddLowRank
    from orbax_t5x.transforms.names import Drop as Drop
    from orbax_t5x.transforms.names import Intersect as Intersect
    from orbax_t5x.transforms.names import Keep as Keep
    from orbax_t5x.transforms.names import Merge as Merge
    from orbax_t5x.transforms.names import Rename as Rename
    from orbax_t5x.transforms.repeat_layers import RepeatLayers as RepeatLayers
    from orbax_t5x.transforms.run import Chain as Chain
    from orbax_t5x.transforms.sizes import FALLBACK as FALLBACK
    from orbax_t5x.transforms.sizes import Pad as Pad
    from orbax_t5x.transforms.sizes import Slice as Slice
    from orbax_t5x.transforms.sources import Average as Average
    from orbax_t5x.transforms.sources import Overlay as Overlay
    from orbax_t5x.transforms.translate import Translate as Translate

# The public list: name -> module that has it. A test holds it equal to the imports above.
MODULE_OF = {
    "FALLBACK": "orbax_t5x.transforms.sizes",
    "AdafactorSlots": "orbax_t5x.transforms.follow.adafactor_slots",
    "AddLowRank": "orbax_t5x.transforms.low_rank",
    "Affine": "orbax_t5x.transforms.arrays",
    "AssignmentMap": "orbax_t5x.transforms.assignment_map",
    "Average": "orbax_t5x.transforms.sources",
    "Cast": "orbax_t5x.transforms.arrays",
    "Chain": "orbax_t5x.transforms.run",
    "Concat": "orbax_t5x.transforms.layers",
    "Dequantize": "orbax_t5x.transforms.dequantize",
    "Drop": "orbax_t5x.transforms.names",
    "FollowOptimizer": "orbax_t5x.transforms.follow_optimizer",
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
    "Split": "orbax_t5x.transforms.layers",
    "StackLayers": "orbax_t5x.transforms.layers",
    "Transform": "orbax_t5x.transforms.base",
    "Translate": "orbax_t5x.transforms.translate",
    "Transpose": "orbax_t5x.transforms.arrays",
    "UnstackLayers": "orbax_t5x.transforms.layers",
    "inverse": "orbax_t5x.transforms.inverses",
}

if not TYPE_CHECKING:  # a misspelled name is an error to type checkers
    __all__, __getattr__, __dir__ = on_demand.public(__name__, MODULE_OF)
