"""The leaves of a transformed state dict and the places of a target: which goes where, and why one can not.

Pure, and linear in the number of leaves: closest names are looked for only for the first few that are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.errors import Problem, ProblemKind
from orbax_t5x.lazy import LazyArray, View, as_view
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.fallback import Fallback
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.restoring.targets import Target, TargetLeaf
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.translate import Translate
from orbax_t5x.trees.dtypes import conversion, kind_of

# Names shown for a missing leaf, and missing leaves for which they are looked up: each look-up scans every name.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})
_STEP_NAMES = frozenset({"step", "global_step"})
_MESH_TF_NAME = re.compile(r"(encoder|decoder|transformer)/block_\d+/.*|shared/embedding.*|global_step")


class Matcher:
    """Puts the leaves of the transformed state dict into the places of the target."""

    def __init__(
        self,
        checkpoints: Mapping[str, Checkpoint],
        transforms: Sequence[Callable[..., Any]],
        target: Target,
        state: dict[str, Any],
        options: PlanOptions,
        diagnostics: Diagnostics,
        stored_names: Mapping[int, str],
    ):
        self._checkpoints = checkpoints
        self._transforms = tuple(transforms)
        self._target = target
        self._state = state
        self._options = options
        self._diagnostics = diagnostics
        self._stored_names = stored_names
        self._taken: set[str] = set()
        self._missing = 0
        self._x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.dtype(np.int64)
        self._one_process = jax.process_count() == 1
        self.fallback = self._open_fallback()

    # -- the target's side

    def entries(self) -> list[PlanEntry]:
        """One entry per target leaf; problems go to the diagnostics."""
        if self._target.kind == "everything":
            return [
                self._entry(name, TargetLeaf("numpy", as_view(value).shape, np.dtype(as_view(value).dtype)), name)
                for name, value in self._state.items()
                if value is not None
            ]
        leaves = self._with_dtype(self._target.leaves)
        entries = [self._plan_leaf(name, leaf) for name, leaf in leaves.items()]
        if self._missing:
            self._hint_translate()
        if self._options.strict:
            self._note_leftovers()
        return [entry for entry in entries if entry is not None]

    def leftover_sources(self) -> list[str]:
        """Names of checkpoint leaves behind the leftovers of the state dict."""
        if self._target.kind == "everything":
            return []
        names = (name for left in self._leftovers() for name in self._source_names(self._state[left]))
        return list(dict.fromkeys(names))

    def _source_names(self, value: Any) -> tuple[str, ...]:
        """Names of the stored leaves behind a value of the state dict, as the checkpoint (with its prefix) has them."""
        if not isinstance(value, LazyArray):
            return ()
        view = as_view(value)
        if view.is_value:
            return ()
        return tuple(dict.fromkeys(self._stored_names.get(id(leaf), leaf.name) for leaf in view.leaves()))

    def _with_dtype(self, leaves: Mapping[str, TargetLeaf]) -> Mapping[str, TargetLeaf]:
        if self._options.dtype is None:
            return leaves
        wanted = np.dtype(self._options.dtype)
        changed = {
            name: dataclasses.replace(leaf, dtype=wanted)
            for name, leaf in leaves.items()
            if leaf.is_param and leaf.kind in ("jax", "numpy") and kind_of(leaf.dtype) == "float"
        }
        if not changed:
            self._problem(
                "dtype",
                None,
                f"dtype={wanted.name} applies to the floating-point model parameters (under target/ or params/, or "
                "nnx.Param), and the target has none",
                "use transforms=[..., ot.transforms.Cast(pattern, dtype)] and give the target that dtype",
            )
        return {**leaves, **changed}

    def _plan_leaf(self, name: str, leaf: TargetLeaf) -> PlanEntry | None:
        source_name = self._name_in_state(name)
        if leaf.kind == "keep":
            self._taken.add(source_name)
            return PlanEntry(name, (), (), None, None, "keep", leaf=leaf)
        value = self._state.get(source_name)
        if leaf.kind == "none":
            if source_name in self._state and value is None:
                self._taken.add(source_name)
            return PlanEntry(name, (), (), None, None, "keep", leaf=leaf)
        self._check_placing(name, leaf)
        if value is None:
            self._taken.add(source_name)
            return self._plan_fallback(name, leaf, source_name in self._state)
        self._taken.add(source_name)
        return self._entry(name, leaf, source_name)

    def _name_in_state(self, name: str) -> str:
        """The leaf's name; an `nnx.State` saved by stock Orbax has a trailing `value` behind each."""
        if self._target.kind == "nnx" and name not in self._state and f"{name}/value" in self._state:
            return f"{name}/value"
        return name

    def _entry(self, name: str, leaf: TargetLeaf, source_name: str) -> PlanEntry:
        value = self._state[source_name]
        view = as_view(value, name=source_name)
        fitted = self._fit(name, leaf, view)
        return PlanEntry(
            name,
            self._source_names(view),
            leaf.shape,
            leaf.dtype,
            leaf.sharding,
            "value" if view.is_value else "read",
            fitted.describe(),
            self._diagnostics.rule_for.get(source_name, ""),
            self._diagnostics.fidelity.get(source_name, ""),
            fitted,
            leaf,
        )

    def _fit(self, name: str, leaf: TargetLeaf, view: View, origin: str = "the checkpoint") -> View:
        """The view in the target's dtype; a clash is a problem."""
        if tuple(view.shape) != tuple(leaf.shape):
            self._problem(
                "shape",
                name,
                f"{origin} has shape {tuple(view.shape)}, the target {tuple(leaf.shape)} ({_described_source(view)})",
                "give the target the checkpoint's shape, or map it with Reshape, Transpose, Split or another transform",
            )
            return view
        source, wanted = np.dtype(view.dtype), np.dtype(leaf.dtype)
        if leaf.kind == "scalar" and leaf.scalar_type in (int, float, complex) and kind_of(source) == kind_of(wanted):
            wanted = source
        change = conversion(source, wanted)
        if change == "same":
            return view
        if change == "lossless":
            return view.astype(wanted)
        asked = self._options.allow_lossy_cast or (self._options.dtype is not None and leaf.is_param)
        if change == "lossy" and asked:
            return view.astype(wanted)
        is_step = not leaf.shape and name.rsplit("/", 1)[-1] in _STEP_NAMES
        if change == "lossy" and is_step and kind_of(source) == kind_of(wanted) == "int":
            return view.cast_checked(wanted)
        fix = f"use ot.transforms.Cast({re.escape(name)!r}, {wanted.name!r})"
        if change == "lossy":
            fix += ", dtype= for model parameters, or allow_lossy_cast=True"
        lost = "would lose values" if change == "lossy" else "is not done without being asked for"
        self._problem(
            "dtype", name, f"{origin} has dtype {source.name}, the target {wanted.name}: the conversion {lost}", fix
        )
        return view

    def _check_placing(self, name: str, leaf: TargetLeaf) -> None:
        if leaf.kind not in ("jax", "key"):
            return
        if leaf.dtype.name in _WIDE and not self._x64:
            self._problem(
                "dtype",
                name,
                f"the target's dtype {leaf.dtype.name} would be narrowed silently, because jax_enable_x64 is off",
                "set jax.config.update('jax_enable_x64', True), or ask for a 32-bit dtype or a NumPy target",
            )
        if leaf.sharding is None:
            if not self._one_process:
                self._problem(
                    "sharding", name, "the target has no sharding, and there are several processes", "give it one"
                )
            return
        try:
            leaf.sharding.shard_shape(leaf.shape)
        except (ValueError, IndexError) as error:  # JAX raises IndexError for a spec longer than the rank
            message = f"{leaf.sharding} does not fit shape {leaf.shape}: {' '.join(str(error).split())}"
            self._problem("sharding", name, message, "choose a PartitionSpec that divides the shape")

    # -- what is missing

    def _open_fallback(self) -> Fallback | None:
        if self._options.fallback is None:
            return None
        try:
            return Fallback(self._options.fallback)
        except Exception as error:  # whatever the caller's function raises under tracing
            self._problem(
                "fallback",
                None,
                f"the function given as fallback can not be traced: {type(error).__name__}: {error}",
                "pass the tree itself: fallback=init_fn()",
            )
            return None

    def _plan_fallback(self, name: str, leaf: TargetLeaf, is_none: bool) -> PlanEntry | None:
        fidelity = self._diagnostics.fidelity.get(name, "")
        if self.fallback is not None and self.fallback.leaves.get(name) is not None:
            value = self.fallback.leaves[name]
            if self.fallback.traced or isinstance(value, jax.ShapeDtypeStruct):
                return self._plan_traced(name, leaf, value)
            if leaf.kind == "key":
                value = jax.random.key_data(value)
            view = self._fit(name, leaf, as_view(value, name=name), origin="the fallback")
            return PlanEntry(
                name,
                (),
                leaf.shape,
                leaf.dtype,
                leaf.sharding,
                "fallback",
                how=view.describe(),
                fidelity=fidelity,
                view=view,
                leaf=leaf,
            )
        if name in self._diagnostics.explained:
            return None  # the transform that should have made it says why it could not
        self._missing += 1
        closest = self._closest(name) if self._missing <= _LOOKUPS else []
        reason = "the checkpoint has None there" if is_none else "the checkpoint has no such leaf"
        if fidelity == "reset":
            reason = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
        message = reason + (f"; closest: {', '.join(closest)}" if closest else "")
        fix = (
            f"map it with ot.transforms.AssignmentMap([({re.escape(name)!r}, {closest[0]!r})]), or " if closest else ""
        )
        self._problem("missing", name, message, fix + "give fallback= values, or put ... in the target to leave it out")
        return None

    def _plan_traced(self, name: str, leaf: TargetLeaf, value: Any) -> PlanEntry | None:
        fidelity = self._diagnostics.fidelity.get(name, "")
        assert self.fallback is not None
        if not self.fallback.traced:
            self._problem(
                "fallback", name, "the fallback's leaf is abstract", "pass values, or a function that returns them"
            )
        elif leaf.kind != "key" and tuple(value.shape) != tuple(leaf.shape):
            self._problem(
                "shape",
                name,
                f"the fallback has shape {tuple(value.shape)}, the target {leaf.shape}",
                "mend the fallback",
            )
        elif leaf.kind != "key" and conversion(np.dtype(value.dtype), leaf.dtype) in ("lossy", "forbidden"):
            if not (self._options.allow_lossy_cast or (self._options.dtype is not None and leaf.is_param)):
                self._problem(
                    "dtype",
                    name,
                    f"the fallback has dtype {value.dtype}, the target {leaf.dtype}",
                    "mend the fallback's dtype",
                )
        return PlanEntry(name, (), leaf.shape, leaf.dtype, leaf.sharding, "fallback", fidelity=fidelity, leaf=leaf)

    @functools.cached_property
    def _free_names(self) -> ClosestNames:
        free = [other for other in self._state if other not in self._target.leaves]
        return ClosestNames(free or list(self._state))

    def _closest(self, name: str) -> list[str]:
        return self._free_names.to(name, _CLOSEST)

    def _hint_translate(self) -> None:
        formats = {checkpoint.format for checkpoint in self._checkpoints.values()}
        if "tf_bundle" not in formats or any(isinstance(transform, Translate) for transform in self._transforms):
            return
        if any(_MESH_TF_NAME.fullmatch(name) for name in self._state):
            self._problem(
                "missing",
                None,
                f"{self._missing} target leaves are missing, and the checkpoint's names are Mesh TensorFlow's",
                "add transforms=[ot.transforms.Translate()]",
                first=True,
            )

    # -- what is left over

    def _leftovers(self) -> list[str]:
        def is_left(name: str, value: Any) -> bool:
            if value is None or name in self._taken:
                return False
            return not (self._target.kind == "inference" and name.startswith("state/") and name != "state/step")

        return [name for name, value in self._state.items() if is_left(name, value)]

    def _note_leftovers(self) -> None:
        left = self._leftovers()
        if not left:
            return
        shown = ", ".join(left[:_SHOWN_LEFTOVERS]) + (" …" if len(left) > _SHOWN_LEFTOVERS else "")
        self._problem(
            "leftover",
            left[0] if len(left) == 1 else None,
            f"{len(left)} {'leaf' if len(left) == 1 else 'leaves'} of the checkpoint without a place in the target: "
            + shown,
            "strict=False leaves them unread; ot.transforms.Drop(pattern) says so in the rules",
        )

    def _problem(self, kind: ProblemKind, leaf: str | None, message: str, fix: str, first: bool = False) -> None:
        self._diagnostics.problems.insert(
            0 if first else len(self._diagnostics.problems), Problem(kind, leaf, message, fix)
        )


def _described_source(view: View) -> str:
    names = list(dict.fromkeys(leaf.name for leaf in view.leaves()))
    told = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return f"from {told}" if told else "a constant"
