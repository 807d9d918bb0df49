"""`flax.nnx.State` as a target: leaves by path, put back with their types and metadata.

`orbax_t5x.restore` takes states and abstract modules as they are; `flatten_target` is how it names their leaves.
"""

from __future__ import annotations

from orbax_t5x.trees.nnx_states import flatten_target

__all__ = ["flatten_target"]
