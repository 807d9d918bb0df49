"""Rule packs: functions of a model's dimensions that give one transform, with `.inverse()`, between two trees of
one model.
"""

from __future__ import annotations

from orbax_t5x.rules._pack import RulePack
from orbax_t5x.rules._t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned, t5_unscanned_to_scanned

__all__ = [
    "RulePack",
    "t5_minimal_to_scanned",
    "t5_minimal_to_unscanned",
    "t5_unscanned_to_scanned",
]
