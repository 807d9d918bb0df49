"""Shardings of whole states, from a model's axes or leaves' names.

T5X's and linen's models name logical axes, NNX's variables those of the mesh or logical ones; `rules` decides which
mesh axis each is split over (`rules.py`), and `with_shardings` applies that to a whole state (`states.py`). The result
has a `NamedSharding` on every leaf and no array.
"""

from orbax_t5x.partitioning.rules import STANDARD_LOGICAL_AXIS_RULES, LogicalAxisRules, MeshAxes
from orbax_t5x.partitioning.states import with_shardings

__all__ = ["STANDARD_LOGICAL_AXIS_RULES", "LogicalAxisRules", "MeshAxes", "with_shardings"]
