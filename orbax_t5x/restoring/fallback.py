"""Values for what a checkpoint lacks: a tree of them, or a function of which only the missing leaves are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.restoring.targets import flatten_target


class Fallback:
    """Values for what the checkpoint lacks: a tree, or a function of which only the missing leaves are computed."""

    def __init__(self, fallback: Any):
        self._function = fallback if callable(fallback) and not isinstance(fallback, jax.Array | np.ndarray) else None
        tree = fallback if self._function is None else jax.eval_shape(self._function)
        self.leaves: Mapping[str, Any] = flatten_target(tree).original
        self.traced = self._function is not None

    def compute(self, names: Sequence[str], shardings: Sequence[Any], dtypes: Sequence[Any]) -> tuple[Any, ...]:
        """The named leaves, computed under one `jax.jit` straight into their shardings."""
        function = self._function
        assert function is not None

        def missing() -> tuple[Any, ...]:
            leaves = flatten_target(function()).original
            return tuple(
                jax.numpy.asarray(leaves[name]).astype(dtype) if dtype is not None else leaves[name]
                for name, dtype in zip(names, dtypes, strict=True)
            )

        return jax.jit(missing, out_shardings=tuple(shardings))()
