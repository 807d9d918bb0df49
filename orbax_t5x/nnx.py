"""Targets that are `flax.nnx.State`s.

Leaves are by path, and put back with their types and metadata.

`orbax_t5x.restore` takes states and abstract modules as they are; `flatten_target` is how it names their leaves.

Example:
  >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
  >>> leaves, _ = ot.nnx.flatten_target(nnx.state(model))
  >>> [(name, leaf.shape) for name, leaf, _ in leaves]
  [('bias', (3,)), ('kernel', (2, 3))]
"""

from __future__ import annotations

from orbax_t5x.trees.named_leaves import flatten_target

__all__ = ["flatten_target"]
