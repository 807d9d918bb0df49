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
from orbax_t5x.lazy import LazyArray, Leaf, View, as_view
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.fallback import Fallback
from orbax_t5x.restoring.fitting import Fitting
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.restoring.target_leaf import TargetLeaf, is_key_dtype
from orbax_t5x.restoring.targets import MODEL_PARAMETERS, Target
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.translate import missing_translation
from orbax_t5x.trees.dtypes import kind_of

# Names shown for a missing leaf, and missing leaves for which they are looked up: each look-up scans every name.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


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
        stored_names: Mapping[Leaf, str],
    ):
        self._checkpoints = checkpoints
        self._transforms = tuple(transforms)
        self._function_views: dict[LazyArray, View] = {}
        self._target = target
        self._state = state
        self._options = options
        self._diagnostics = diagnostics
        self._stored_names = stored_names
        # A leaf of the target that has a problem of its own leaves nothing over.
        self._taken = {problem.leaf for problem in target.problems if problem.leaf is not None}
        self._missing = 0
        self._x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.dtype(np.int64)
        self._one_process = jax.process_count() == 1
        leaves = self._everything() if target.kind == "everything" else target.leaves
        narrowed = self._narrowed(leaves)
        self._leaves = {**leaves, **narrowed} if narrowed else leaves
        self._fitting = Fitting(options, frozenset(narrowed), diagnostics.problems.append)
        self.fallback: Fallback | None = self._open_fallback()

    # -- the target's side

    def entries(self) -> list[PlanEntry]:
        """One entry per target leaf; problems go to the diagnostics."""
        entries = [self._plan_leaf(name, leaf) for name, leaf in self._leaves.items()]
        if self._target.kind != "everything":
            if self._missing:
                self._hint_translation()
            if self._options.strict:
                self._note_leftovers()
        return [entry for entry in entries if entry is not None]

    def leftover_sources(self) -> list[str]:
        """Names of checkpoint leaves behind the leftovers of the state dict."""
        if self._target.kind == "everything":
            return []
        values = (self._state[name] for name in self._leftovers())
        views = (as_view(value) for value in values if isinstance(value, LazyArray))
        return list(dict.fromkeys(name for view in views for name in self._source_names(view.leaves())))

    def _source_names(self, leaves: Sequence[Leaf]) -> tuple[str, ...]:
        """Names of stored leaves as the checkpoint (with its prefix) has them."""
        names = self._stored_names
        if len(leaves) == 1:
            return (names.get(leaves[0], leaves[0].name),)
        return tuple(dict.fromkeys(names.get(leaf, leaf.name) for leaf in leaves))

    def _everything(self) -> dict[str, TargetLeaf]:
        """A place for all that the state dict has, as NumPy."""
        leaves: dict[str, TargetLeaf] = {}
        for name, value in self._state.items():
            if value is not None:
                dtype = getattr(value, "dtype", None)
                if is_key_dtype(np.dtype(object) if dtype is None else dtype):
                    value = jax.random.key_data(value)
                array = value if isinstance(value, LazyArray) else np.asarray(value)
                is_param = name.startswith(MODEL_PARAMETERS) or name == "params"
                leaves[name] = TargetLeaf("numpy", tuple(array.shape), np.dtype(array.dtype), is_param=is_param)
        return leaves

    def _narrowed(self, leaves: Mapping[str, TargetLeaf]) -> dict[str, TargetLeaf]:
        """The leaves that `dtype=` concerns, in that dtype."""
        if self._options.dtype is None:
            return {}
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
        return changed

    def _plan_leaf(self, name: str, leaf: TargetLeaf) -> PlanEntry | None:
        source_name = name
        if leaf.is_variable and name not in self._state and f"{name}/value" in self._state:
            source_name = f"{name}/value"
        value = self._state.get(source_name)
        if leaf.kind == "keep" or leaf.kind == "none":
            if leaf.kind == "keep" or value is None:
                self._taken.add(source_name)
            return PlanEntry(name, (), (), None, None, "keep", leaf=leaf)
        if leaf.kind == "jax" or leaf.kind == "key":
            self._check_placing(name, leaf)
        self._taken.add(source_name)
        if value is None:
            return self._plan_fallback(name, leaf, source_name in self._state)
        return self._entry(name, leaf, source_name, value)

    def _entry(self, name: str, leaf: TargetLeaf, source_name: str, value: Any) -> PlanEntry | None:
        """What the state dict has for a leaf, as an entry; one that does not fit stays as it is."""
        origin = "the checkpoint" if isinstance(value, LazyArray) else "the state dict"
        if isinstance(value, LazyArray) and not isinstance(value, View):
            # Two leaves may have one array: its function is called once for both.
            value = self._function_views.setdefault(value, as_view(value, source_name))
        view = self._fitting.view(name, leaf, value, origin, source_name)
        if view is None:
            return None
        stored = view.leaves()
        is_value = all([one.is_value for one in stored])
        return PlanEntry(
            name,
            () if is_value else self._source_names(stored),
            leaf.shape,
            leaf.dtype,
            leaf.sharding,
            "value" if is_value else "read",
            view.describe(),
            self._diagnostics.rule_for.get(source_name, ""),
            self._diagnostics.fidelity.get(source_name, ""),
            view,
            leaf,
            stored,
        )

    def _check_placing(self, name: str, leaf: TargetLeaf) -> None:
        if not self._x64 and leaf.dtype in _WIDE:
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
        clash = _placing_clash(leaf.sharding, leaf.shape)
        if clash:
            message = f"{leaf.sharding} does not fit shape {leaf.shape}: {clash}"
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
        value = None if self.fallback is None else self.fallback.leaves.get(name)
        if self.fallback is None or value is None:
            self._note_missing(name, fidelity, is_none)
            return None
        if self.fallback.traced:
            self._fitting.check_abstract(name, leaf, value)
            view = None
        else:
            view = self._fitting.view(name, leaf, value, "the fallback")
        return PlanEntry(
            name,
            (),
            leaf.shape,
            leaf.dtype,
            leaf.sharding,
            "fallback",
            how="" if view is None else view.describe(),
            fidelity=fidelity,
            view=view,
            leaf=leaf,
            leaves=() if view is None else view.leaves(),
        )

    def _note_missing(self, name: str, fidelity: str, is_none: bool) -> None:
        if name in self._diagnostics.explained:
            return  # the transform that should have made it says why it could not
        self._missing += 1
        closest = self._closest_names.to(name, _CLOSEST) if self._missing <= _LOOKUPS else []
        reason = "the checkpoint has None there" if is_none else "the checkpoint has no such leaf"
        if fidelity == "reset":
            reason = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
        message = reason + (f"; closest: {', '.join(closest)}" if closest else "")
        fix = (
            f"map it with ot.transforms.AssignmentMap([({re.escape(name)!r}, {closest[0]!r})]), or " if closest else ""
        )
        self._problem("missing", name, message, fix + "give fallback= values, or put ... in the target to leave it out")

    @functools.cached_property
    def _closest_names(self) -> ClosestNames:
        free = [other for other in self._state if other not in self._target.leaves]
        return ClosestNames(free or list(self._state))

    def _hint_translation(self) -> None:
        formats = {checkpoint.format for checkpoint in self._checkpoints.values()}
        fix = missing_translation(formats, self._transforms, self._state)
        if fix is not None:
            message = f"{self._missing} target leaves are missing, and the checkpoint's names are Mesh TensorFlow's"
            self._diagnostics.problems.insert(0, Problem("missing", None, message, fix))

    # -- what is left over

    def _leftovers(self) -> list[str]:
        target = self._target
        slots = tuple((f"{name}/state/" if name else "state/") for name in target.inference_states)
        steps = {f"{prefix}step" for prefix in slots}

        def is_left(name: str, value: Any) -> bool:
            if value is None or name in self._taken:
                return False
            if slots and name.startswith(slots) and name not in steps:
                return False
            return not (target.kept and target.is_kept(name))

        return [name for name, value in self._state.items() if is_left(name, value)]

    def _note_leftovers(self) -> None:
        left = self._leftovers()
        if not left:
            return
        self._problem(
            "leftover",
            left[0] if len(left) == 1 else None,
            f"{leaves_text(len(left))} of the checkpoint without a place in the target: "
            + listed(left, _SHOWN_LEFTOVERS),
            "strict=False leaves them unread; ot.transforms.Drop(pattern) says so in the rules",
        )

    def _problem(self, kind: ProblemKind, leaf: str | None, message: str, fix: str) -> None:
        self._diagnostics.problems.append(Problem(kind, leaf, message, fix))


@functools.lru_cache(maxsize=1 << 14)
def _placing_clash(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Why a sharding does not fit a shape, in JAX's words; empty where it does."""
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:  # JAX raises IndexError for a spec longer than the rank
        return " ".join(str(error).split())
    return ""
