"""Values for what a checkpoint lacks: a tree of them, or a function of which only the missing leaves are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from orbax_t5x.errors import Problem
from orbax_t5x.lazy import BlockingLeaf, Box, ReadStats, Request
from orbax_t5x.restoring.target_leaf import TargetLeaf
from orbax_t5x.restoring.targets import flatten_target


class ComputedLeaf(BlockingLeaf):
    """A leaf of what a fallback function returns; it has values only while a plan is executed.

    Attributes:
      target: what the target wants of it.
    """

    is_value = True

    def __init__(self, name: str, target: TargetLeaf):
        self.name = name
        self.target = target
        self.shape: tuple[int, ...] = target.shape
        self.dtype: np.dtype = target.dtype

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """None: no byte of a checkpoint is read."""
        return 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Refuses."""
        self.read_blocking(requests, stats)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Refuses: an execution reads from the array that it has computed instead."""
        raise ValueError(f"{self.name}: what a fallback function returns is computed when a plan is executed")


class Fallback:
    """Values for what the checkpoint lacks: a tree, or a function of which only the missing leaves are computed.

    Attributes:
      leaves: by name; for a function their shapes and dtypes.
      traced: whether it is a function.
    """

    def __init__(self, fallback: Any):
        self._function = fallback if callable(fallback) and not isinstance(fallback, jax.Array | np.ndarray) else None
        tree = fallback if self._function is None else jax.eval_shape(self._function)
        given = flatten_target(tree).original
        self.leaves: Mapping[str, Any] = {
            name: leaf for name, leaf in given.items() if leaf is not None and leaf is not ...
        }
        self.traced: bool = self._function is not None

    def compute(self, leaves: Mapping[str, TargetLeaf]) -> dict[str, Any]:
        """The named leaves of what the function returns, each computed straight into its place.

        Returns:
          A `jax.Array` for every leaf, in the target's dtype unless the leaf stays on the host.
        """
        together: dict[Hashable, list[str]] = {}
        for name, leaf in leaves.items():
            together.setdefault(_devices(leaf), []).append(name)
        values: dict[str, Any] = {}
        for names in together.values():
            values.update(zip(names, self._compute_together(names, leaves), strict=True))
        return values

    def _compute_together(self, names: Sequence[str], leaves: Mapping[str, TargetLeaf]) -> tuple[Any, ...]:
        """The named leaves, under one `jax.jit`: the function runs once, and what nobody wants of it does not."""
        function = self._function
        assert function is not None

        def missing() -> tuple[Any, ...]:
            given = flatten_target(function()).original
            return tuple(_in_dtype(given[name], leaves[name]) for name in names)

        placings = tuple(leaves[name].placing for name in names)
        if placings[0] is None:
            return jax.jit(missing)()
        return jax.jit(missing, out_shardings=placings)()


def open_fallback(fallback: Any, note: Callable[[Problem], None]) -> Fallback | None:
    """The caller's fallback; None, and a problem, where it cannot be used.

    Args:
      fallback: a tree, a function, or None.
      note: takes the problem.
    """
    if fallback is None:
        return None
    try:
        return Fallback(fallback)
    except Exception as error:  # whatever the caller's function raises under tracing
        message = f"the function given as fallback can not be traced: {type(error).__name__}: {error}"
        note(Problem("fallback", None, message, "pass the tree itself: fallback=init_fn()"))
        return None


def _in_dtype(value: Any, leaf: TargetLeaf) -> Any:
    if leaf.kind == "key":
        return value
    # What stays on the host is converted there: JAX may not have its dtype.
    return jax.numpy.asarray(value) if leaf.is_on_host else jax.numpy.asarray(value).astype(leaf.dtype)


def _devices(leaf: TargetLeaf) -> Hashable:
    """What leaves have in common that one `jax.jit` may compute: the same devices in the same order, or none."""
    if leaf.sharding is None:
        return None
    if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
        return tuple(leaf.sharding.mesh.devices.ravel().tolist())
    return tuple(leaf.sharding.device_set) if len(leaf.sharding.device_set) == 1 else leaf.sharding
