"""Train states in Orbax v1 (`orbax.checkpoint.experimental.v1`): `orbax_t5x.v1`.

Inside `with ot.v1.context():`, Orbax's own functions save trees with checksums and a record of provenance, as plain
Orbax, and load what is wrapped in an `AbstractTrainState` by the plan of `orbax_t5x.restore`: transformed, sharded,
verified. Everything is in that context; nothing that Orbax has for a whole process is changed, except by `register()`,
which is for tools that make their own context.

Example:
  >>> with ot.v1.context():
  ...     ocp_v1.save(directory / "step", {"w": jnp.ones(3)})
  ...     ocp_v1.load(directory / "step", ot.v1.AbstractTrainState({"w": np.zeros(3, np.float32)}))
  {'w': array([1., 1., 1.], dtype=float32)}
"""

from orbax_t5x.handlers.v1.abstract_state import AbstractTrainState
from orbax_t5x.handlers.v1.contexts import context, register
from orbax_t5x.handlers.v1.handler import V1TrainStateHandler as TrainStateHandler
from orbax_t5x.handlers.v1.loading import load_and_transform

__all__ = ["AbstractTrainState", "TrainStateHandler", "context", "load_and_transform", "register"]
