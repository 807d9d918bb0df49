"""Orbax's own transformations (`orbax.checkpoint.experimental.model_surgery`) as transforms on lazy leaves.

Orbax's functions rename, fuse, repeat, stack and nest a flat dict of arrays in memory. Here Orbax's code runs on views:
a function is copied with other values for its globals `np`, `jnp` and `jax`, whose few functions that it calls
compose views. So nothing is read, each process reads its own shards, and the result is Orbax's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View, as_view, broadcast_to, repeat
from orbax_t5x.lazy.box import normalize_axis
from orbax_t5x.lazy.several import concatenate, stack
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState, NameClashError, flatten
from orbax_t5x.trees.pytree_names import leaf_name

_MODULE = "orbax.checkpoint.experimental.model_surgery."
# Of how Orbax computes, or where the result is: nothing here is in memory, and the target has the shardings.
_WITHOUT_EFFECT = frozenset({"inplace", "sort_by_size", "target_sharding", "unique_regex", "compiled_unique"})


@dataclasses.dataclass(frozen=True)
class ModelSurgery(Transform):
    """A transformation of Orbax.

    Attributes:
      name: of the function that made it, such as "rename_by_regex".
      settings: the arguments that it was made with, as pairs.
    """

    name: str
    settings: tuple[tuple[str, Any], ...]
    _function: Callable[..., Any] = dataclasses.field(repr=False, compare=False)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        given = {
            name: as_view(value, name=name) if hasattr(value, "shape") and hasattr(value, "dtype") else value
            for name, value in state.items()
        }
        try:
            on_views = _copy_function(self._function, _globals_of(self._function.__module__))
            result = on_views(dict(given))
            flat = {
                name: value.view() if isinstance(value, _FilledStack) else value
                for name, value in _named_leaves(result).items()
            }
        except NameClashError as error:
            diagnostics.problem("duplicate", error.names[0], f"{self.name}: {error}")
            return dict(state)
        except (AssertionError, ValueError, TypeError, IndexError, KeyError) as error:
            # What Orbax's functions, and the views, raise about names and shapes.
            diagnostics.problem("transform", None, f"{self.name}: {error}")
            return dict(state)
        self._check_nothing_lost(given, flat, diagnostics)
        names_of = {id(value): name for name, value in given.items()}
        rule = self.describe()
        changed = {name: (names_of.get(id(value), name), rule) for name, value in flat.items()}
        diagnostics.record_origins(
            {name: origin for name, origin in changed.items() if given.get(name) is not flat[name]}
        )
        return flat

    def _check_nothing_lost(self, given: FlatState, result: FlatState, diagnostics: Diagnostics) -> None:
        """Records leaves that lost their names to other leaves."""
        if dict(self.settings).get("target") is not None:
            return  # keeps what the target has
        used = {leaf for value in result.values() if isinstance(value, View) for leaf in value.leaves()}
        for name, value in given.items():
            if isinstance(value, View) and used.isdisjoint(value.leaves()):
                message = f"{self.name} leaves out {name!r}: another leaf gets its new name, or its index is too large"
                diagnostics.problem("duplicate", name, message, Fix("give each leaf a name of its own"))


def adopt_orbax(transform: Any) -> Any:
    """Converts a transformation of Orbax to a transform."""
    if not isinstance(transform, types.FunctionType) or not str(transform.__module__).startswith(_MODULE):
        return transform
    settings = inspect.getclosurevars(transform).nonlocals
    kept = sorted((name, value) for name, value in settings.items() if name not in _WITHOUT_EFFECT)
    return ModelSurgery(transform.__qualname__.split(".")[0], tuple(kept), transform)


def _named_leaves(tree: Any) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return flatten(tree)
    # `unflatten(target=…)` returns the target's own containers.
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# -- what Orbax's functions compute with


class _FilledStack:
    """A stack with given entries and a filled rest."""

    def __init__(self, shape: Sequence[int], dtype: Any):
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        self._filling: Any = np.ones((), dtype)
        self._entries: dict[int, View] = {}
        self._axis = 0

    def __mul__(self, number: Any) -> _FilledStack:
        self._filling = self._filling * number
        return self

    def astype(self, dtype: Any) -> _FilledStack:
        self._dtype = np.dtype(dtype)
        return self

    def __setitem__(self, key: tuple[Any, ...], value: View) -> None:
        self._axis = next(axis for axis, index in enumerate(key) if not isinstance(index, slice))
        self._entries[key[self._axis]] = value

    def view(self) -> View:
        shape = (*self._shape[: self._axis], *self._shape[self._axis + 1 :])
        filling = broadcast_to(np.asarray(self._filling).astype(self._dtype), shape)
        entries = [self._entries.get(index, filling) for index in range(self._shape[self._axis])]
        return stack([entry.astype(self._dtype) for entry in entries], self._axis)


def _repeat_elements(array: View, repeats: int, axis: int) -> View:
    """Repeats each element along an axis, as `numpy.repeat`."""
    at = normalize_axis(axis, array.ndim)
    shape = (*array.shape[:at], array.shape[at] * repeats, *array.shape[at + 1 :])
    return repeat(array, repeats, at + 1).reshape(shape)


class _NoArray:
    """Class of no value: no view is a `jax.Array` in memory."""


_NUMPY = types.SimpleNamespace(
    ndarray=View,
    ones=_FilledStack,
    stack=lambda arrays, axis=0: stack(list(arrays), axis),
    concatenate=lambda arrays, axis=0: concatenate(list(arrays), axis),
    repeat=_repeat_elements,
)
_JAX = types.SimpleNamespace(Array=_NoArray, device_put=lambda array, sharding: array)


@functools.cache
def _globals_of(module: str) -> dict[str, Any]:
    """Returns globals of Orbax's modules, for views."""
    own = vars(sys.modules[module])
    replaced = {**own, "np": _NUMPY, "jnp": _NUMPY, "jax": _JAX}
    for name, value in own.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is own:
            replaced[name] = _copy_function(value, replaced)
    return replaced


def _copy_function(function: types.FunctionType, new_globals: dict[str, Any]) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__, new_globals, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
