"""Decides if a value fits a target leaf, and its conversion.

The same rules hold for what a checkpoint has, what a transform put into the state dict, and what a fallback gives, as a
tree or by a function: shapes are equal, a lossless conversion is done, a lossy one has to be asked for, and float to
integer, complex to real, and number to bool are never done here. The one exception is a step, which may be stored as a
float with a whole value. Python scalars are weakly typed, as in JAX. Every clash is a problem; nothing raises and
nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from orbax_t5x import transforms
from orbax_t5x.errors import Fix, Problem, ProblemKind, RestorePlanError
from orbax_t5x.lazy import Leaf, View, as_view
from orbax_t5x.lazy.value import ComputedLeaf
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.targets import TargetLeaf, impls_of_data, is_key_dtype, key_impl_of
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.dtypes import conversion, kind_of

Origin = Literal["the checkpoint", "the state dict", "the fallback"]

_STEP_NAMES = frozenset({"step", "global_step"})
# A Python scalar takes the dtype of what it meets where that is of the same kind or a later one.
_WEAK_KINDS = {"int": 0, "float": 1, "complex": 2}


class Fitting:
    """Rules by which a plan converts values.

    `narrowed` are the leaves with a dtype replaced by `dtype=`.
    """

    def __init__(self, options: RestoreOptions, narrowed: frozenset[str], note: Callable[[Problem], None]):
        self._lossy_is_allowed = options.allow_lossy_cast
        self._narrowed = narrowed
        self._note = note

    def view(self, name: str, leaf: TargetLeaf, value: Any, origin: Origin, label: str | None = None) -> View | None:
        """Returns a value as a view of the target's shape and dtype."""
        if isinstance(value, View):
            return self._fit(name, leaf, value, origin)
        if isinstance(value, jax.ShapeDtypeStruct):
            fix = "pass values, or a function that returns them"
            return self._problem(
                _origin_kind(origin), name, f"{origin} has an abstract leaf, which has no values", Fix.in_program(fix)
            )
        if type(value) in (int, float, complex):
            value = self._weakly_typed(name, leaf, value, origin)
            if value is None:
                return None
        elif (key_dtype := _key_dtype_of(value)) is not None:
            if not self._key_fits(name, leaf, key_dtype, origin):
                return None
            value = value if isinstance(value, ComputedLeaf) else jax.random.key_data(value)
        elif leaf.kind == "key" and origin == "the fallback":
            message = f"the fallback has no typed PRNG keys, the target keys of {leaf.key_impl!r}"
            text = f"use jax.random.key(seed), or jax.random.wrap_key_data(data, impl={leaf.key_impl!r})"
            return self._problem("dtype", name, message, Fix.in_program(text))
        try:
            view = as_view(value, label or name)
        except (TypeError, ValueError):  # ValueError: lists of several lengths
            message = f"{origin} has a {type(value).__name__}, which is no array"
            return self._problem(
                _origin_kind(origin), name, message, Fix.in_program("put an array, a scalar or a lazy array there")
            )
        return self._fit(name, leaf, view, origin)

    # -- shapes and dtypes

    def _fit(self, name: str, leaf: TargetLeaf, view: View, origin: Origin) -> View:
        if leaf.kind == "key" and not self._stored_key_fits(name, leaf, view):
            return view
        if view.shape != leaf.shape:
            self._shape_problem(name, leaf, view, origin)
            return view
        if leaf.kind == "scalar" and leaf.scalar_type in (int, float, complex):
            # A Python scalar has no width.
            if kind_of(view.dtype) == kind_of(leaf.dtype):
                return view
        match self._conversion(name, leaf, view.dtype, origin):
            case "cast":
                return view.astype(leaf.dtype)
            case "checked":
                return view.cast_checked(leaf.dtype, _does_not_fit)
            case _:
                return view

    def _conversion(
        self, name: str, leaf: TargetLeaf, source: np.dtype, origin: Origin
    ) -> Literal["none", "cast", "checked"]:
        """Chooses the conversion of the dtype; "none" after a problem."""
        change = conversion(source, leaf.dtype)
        if change == "same":
            return "none"
        if change == "lossless":
            return "cast"
        if change == "lossy":
            if self._lossy_is_allowed or (name in self._narrowed and kind_of(source) == "float"):
                return "cast"
        if _is_step(name, leaf) and kind_of(source) in ("int", "float"):
            return "checked"
        self._dtype_problem(name, leaf, source, origin, is_lossy=change == "lossy")
        return "none"

    def _shape_problem(self, name: str, leaf: TargetLeaf, view: View, origin: Origin) -> None:
        impls = _stored_impls(view)
        same_width = view.shape[-1:] == leaf.shape[-1:]
        if origin == "the fallback":
            fix = Fix("give the fallback the target's shape")
        elif leaf.kind == "key" and not same_width:
            fix = _key_width_fix([] if impls else impls_of_data(view.shape[-1:]))
        elif impls and not same_width:
            fix = Fix.by_target(f"give the target such keys ({_key_text(impls[0])}), or the shape of their data")
        else:
            fix = None  # an explanation looks at all shapes together
        source_text = _described_source(name, view)
        if leaf.kind == "key":
            wanted = f"keys of {leaf.key_impl!r} in the target have data of shape {leaf.shape}"
            message = f"{origin} has PRNG key data of shape {view.shape}, {wanted}"
        else:
            keys = f" (the data of PRNG keys of {listed(map(repr, impls), 2)})" if impls else ""
            message = f"{origin} has shape {view.shape}{keys}, the target {leaf.shape}"
        self._note(Problem("shape", name, message + source_text, fix, source_text))

    def _dtype_problem(self, name: str, leaf: TargetLeaf, source: np.dtype, origin: Origin, *, is_lossy: bool) -> None:
        if "object" in (kind_of(source), kind_of(leaf.dtype)):
            self._text_problem(name, leaf, source, origin)
            return
        if origin == "the fallback":
            ways = [Fix("give the fallback the target's dtype")]
        elif is_lossy and leaf.is_param and kind_of(source) == kind_of(leaf.dtype) == "float":
            ways = [Fix.setting("pass {} for the model's parameters", dtype=leaf.dtype.name)]
        else:
            ways = [] if is_lossy else [Fix.adding(transforms.Cast(re.escape(name), leaf.dtype))]
        if is_lossy:  # one for all leaves: a model in another dtype is one decision
            ways.append(Fix.setting("pass {}", allow_lossy_cast=True))
        lost = "would lose values" if is_lossy else "is not done without being asked for"
        message = f"{origin} has dtype {source.name}, the target {leaf.dtype.name}: the conversion {lost}"
        self._problem("dtype", name, message, Fix.any_of(*ways))

    def _text_problem(self, name: str, leaf: TargetLeaf, source: np.dtype, origin: Origin) -> None:
        """Notes text in place of numbers or the reverse."""
        have = "text" if kind_of(source) == "object" else f"dtype {source.name}"
        wanted = "text" if kind_of(leaf.dtype) == "object" else f"dtype {leaf.dtype.name}"
        fix = Fix.by_target(f"give the target {have} there" + (", such as an empty str" if have == "text" else ""))
        if origin == "the fallback":
            fix = Fix(f"give the fallback {wanted} there")
        self._problem("dtype", name, f"{origin} has {have}, the target {wanted}", fix)

    def _weakly_typed(self, name: str, leaf: TargetLeaf, value: complex, origin: Origin) -> Any:
        """Converts a Python scalar as JAX does, weakly typed."""
        kind = _WEAK_KINDS.get(kind_of(np.asarray(value).dtype), len(_WEAK_KINDS))
        if leaf.kind == "key" or kind > _WEAK_KINDS.get(kind_of(leaf.dtype), -1):
            return value
        if isinstance(value, int) and kind_of(leaf.dtype) == "int":
            bounds = ml_dtypes.iinfo(leaf.dtype)
            if not int(bounds.min) <= value <= int(bounds.max):
                message = f"{origin} has the value {value}, which {leaf.dtype.name} cannot hold"
                return self._problem("dtype", name, message, Fix.by_target("give the target a wider dtype"))
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(leaf.dtype)

    # -- typed keys

    def _key_fits(self, name: str, leaf: TargetLeaf, dtype: Any, origin: Origin) -> bool:
        """Tests if typed keys may fill the leaf, or notes a problem."""
        if leaf.kind != "key":
            message = f"{origin} has typed PRNG keys ({dtype}), the target {leaf.dtype.name}"
            keys = Fix.in_program("pass jax.random.key_data(keys)")
            self._problem("dtype", name, message, Fix.any_of(Fix.by_target("give the target typed keys"), keys))
            return False
        impl = key_impl_of(dtype)
        if impl != leaf.key_impl:
            message = f"{origin} has PRNG keys of {impl or dtype!r}, the target keys of {leaf.key_impl!r}"
            fix = Fix.in_program(f"make the keys with jax.random.key(seed, impl={leaf.key_impl!r})")
            self._problem("dtype", name, message, fix)
        return impl == leaf.key_impl

    def _stored_key_fits(self, name: str, leaf: TargetLeaf, view: View) -> bool:
        """Tests if key data may be of the leaf's implementation.

        Key data of one implementation are no key of another, though their shapes may be equal; nor is a part of them.
        """
        others = [impl for impl in _stored_impls(view) if impl != leaf.key_impl]
        for impl in others:
            message = f"the checkpoint has PRNG keys of {impl!r}, the target keys of {leaf.key_impl!r}"
            fix = Fix.by_target(f"give the target keys of that implementation: {_key_text(impl)}")
            self._problem("dtype", name, message, fix)
        return not others

    def _problem(self, kind: ProblemKind, name: str, message: str, fix: Fix) -> None:
        self._note(Problem(kind, name, message, fix))


def _is_step(name: str, leaf: TargetLeaf) -> bool:
    """Returns True for an integer step counter: T5X writes it as a float once it has resumed a run."""
    last = name.removesuffix("/value").rsplit("/", 1)[-1]
    return not leaf.shape and last in _STEP_NAMES and kind_of(leaf.dtype) == "int"


def _stored_impls(view: View) -> list[str]:
    """Returns the recorded implementations of a view's PRNG keys."""
    return sorted({leaf.prng_impl for leaf in view.leaves() if leaf.prng_impl is not None})


def _key_text(impl: str) -> str:
    return f"jax.random.key(seed, impl={impl!r})"


def _key_width_fix(impls: list[str]) -> Fix:
    """Returns the fix for key data of the wrong width."""
    if not impls:
        return Fix("map a leaf to this name whose last dimension is that of such key data")
    names = " or ".join(map(repr, impls))
    text = f"give the target keys of the implementation that made the data, {names}: {_key_text(impls[0])}"
    return Fix.by_target(text)


def _key_dtype_of(value: Any) -> Any:
    """Returns the dtype of typed PRNG keys, or None."""
    if isinstance(value, ComputedLeaf):
        return value.key_dtype
    dtype = getattr(value, "dtype", None)
    return dtype if dtype is not None and is_key_dtype(dtype) else None


def _origin_kind(origin: Origin) -> ProblemKind:
    return "fallback" if origin == "the fallback" else "transform"


def _described_source(name: str, view: View) -> str:
    names = list(dict.fromkeys(leaf.name for leaf in view.leaves()))
    if names == [name]:
        return ""
    return f" (from {listed(names, 2)})" if names else " (a constant)"


def _does_not_fit(message: str, leaf: Leaf) -> RestorePlanError:
    """Makes the error of a step too large for the target's dtype."""
    problem = Problem("dtype", leaf.name, message, Fix.by_target("give the target the stored dtype"))
    return RestorePlanError([problem], path=leaf.path or None)
