"""Values for leaves that a checkpoint lacks.

A function is called under JAX's tracing. What it computes with JAX is an array without values until a plan is
executed, and then only the missing ones are computed, under `jax.jit`, straight into their shardings. All else that it
returns (NumPy arrays, Python scalars, arrays that it has from outside) are values, which are taken as those of a tree
are: JAX would narrow them to 32 bits and to its own types first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from orbax_t5x.concurrency import call_of_user
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy.value import ComputedLeaf
from orbax_t5x.restoring.targets import TargetLeaf, flatten_target, is_key_dtype, key_data_shape, require_finite


def open_fallback(
    fallback: Any, note: Callable[[Problem], None]
) -> tuple[Mapping[str, Any] | None, Computation | None]:
    """Returns a fallback's values by name, and the computation of the rest.

    Without values after problems, which `note` takes. The computation holds none of the values.
    """
    values: dict[str, Any] = {}

    def computed() -> dict[str, Any]:
        given = _leaves_of(fallback())
        values.update((name, value) for name, value in given.items() if not _is_computed(value))
        return {name: value for name, value in given.items() if _is_computed(value)}

    try:
        if not _is_function(fallback):
            return _leaves_of(fallback), None
        arrays: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(computed)
    except RestorePlanError as error:
        for problem in error.problems:
            note(problem)
        return None, None
    except Exception as error:  # whatever the caller's function raises under tracing
        message = f"the function given as fallback cannot be traced: {type(error).__name__}: {error}"
        fix = Fix.setting("pass the tree itself that the function makes as {}", fallback=...)
        note(Problem("fallback", None, message, fix))
        return None, None
    leaves = {**values, **{name: _computed_leaf(name, array) for name, array in arrays.items()}}
    return leaves, Computation(fallback, arrays) if arrays else None


def _computed_leaf(name: str, array: jax.ShapeDtypeStruct) -> ComputedLeaf:
    if is_key_dtype(array.dtype):
        return ComputedLeaf(name, key_data_shape(array.shape, array.dtype), np.dtype(np.uint32), array.dtype)
    return ComputedLeaf(name, array.shape, np.dtype(array.dtype))


class Computation:
    """Computation of leaves by a fallback function."""

    def __init__(self, function: Callable[[], Any], arrays: Mapping[str, jax.ShapeDtypeStruct]):
        self._function = function
        self._arrays = arrays

    def __call__(self, leaves: Mapping[str, TargetLeaf]) -> dict[str, Any]:
        """Computes named leaves, each straight into its sharding."""
        together: dict[Hashable, list[str]] = {}
        for name, leaf in leaves.items():
            together.setdefault(_devices(leaf), []).append(name)
        values: dict[str, Any] = {}
        for names in together.values():
            values.update(zip(names, self._compute_together(names, leaves), strict=True))
        return values

    def _compute_together(self, names: Sequence[str], leaves: Mapping[str, TargetLeaf]) -> tuple[Any, ...]:
        """Computes the named leaves under a single `jax.jit`."""

        def missing() -> tuple[Any, ...]:
            given = _leaves_of(call_of_user(self._function))
            self._check_planned(names, given)
            wanted = ((given[name], leaves[name]) for name in names)
            return tuple(value if leaf.kind == "key" else value.astype(leaf.dtype) for value, leaf in wanted)

        placings = tuple(leaves[name].placing for name in names)
        if placings[0] is None:
            return jax.jit(missing)()
        return jax.jit(missing, out_shardings=placings)()

    def _check_planned(self, names: Sequence[str], given: Mapping[str, Any]) -> None:
        """Compares shapes and dtypes with the plan's."""
        problems: list[Problem] = []
        for name in names:
            value, planned = given.get(name), self._arrays[name]
            if _shape_text(value) != _shape_text(planned):
                message = (
                    f"the fallback gives {_shape_text(value)}, and gave {_shape_text(planned)} when the plan was made"
                )
                fix = "plan and execute under the same JAX settings, with a function that gives the same each time"
                problems.append(Problem("fallback", name, message, Fix.in_program(fix)))
        if problems:
            raise RestorePlanError(problems)


def abstract_tree(fallback: Any) -> Any:
    """Makes a target of a fallback: a tree or a function's result."""
    if not _is_function(fallback):
        return fallback
    values: list[Any] = []
    structures: list[Any] = []

    def computed() -> list[Any]:
        tree = call_of_user(fallback)
        require_finite(tree, "fallback")
        leaves, structure = jax.tree.flatten(tree)
        structures.append(structure)
        values.extend(None if _is_computed(leaf) else leaf for leaf in leaves)
        return [leaf for leaf in leaves if _is_computed(leaf)]

    arrays = iter(jax.eval_shape(computed))
    return jax.tree.unflatten(structures[0], [next(arrays) if leaf is None else leaf for leaf in values])


def _is_function(fallback: Any) -> bool:
    return callable(fallback) and not isinstance(fallback, jax.Array | np.ndarray)


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tracer)


def _shape_text(value: Any) -> str:
    if not isinstance(value, Tracer | np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return f"a {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _leaves_of(tree: Any) -> dict[str, Any]:
    given = flatten_target(tree, "fallback").original
    return {name: leaf for name, leaf in given.items() if leaf is not None and leaf is not ...}


def _devices(leaf: TargetLeaf) -> Hashable:
    """Returns the devices that a `jax.jit` may share, or None."""
    if leaf.sharding is None:
        return None
    if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
        return tuple(leaf.sharding.mesh.devices.ravel().tolist())
    return tuple(leaf.sharding.device_set) if len(leaf.sharding.device_set) == 1 else leaf.sharding
