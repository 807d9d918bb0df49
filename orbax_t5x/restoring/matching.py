"""Matches a state dict's leaves with a target's leaves."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, ProblemKind
from orbax_t5x.lazy import LazyArray, Leaf, View, as_view
from orbax_t5x.lazy.cast import CastNode
from orbax_t5x.lazy.node import LeafNode, Node
from orbax_t5x.lazy.value import ComputedLeaf, has_unfilled
from orbax_t5x.optim.moments import OptimizerStructure, find_optimizer
from orbax_t5x.optim.optimizer_names import is_in_optimizer, may_be_optimizer
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import PlanEntry
from orbax_t5x.restoring.targets import MissingLeaf, Target, TargetLeaf, is_key_dtype, is_parameter_name
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import compile_pattern, pattern_text
from orbax_t5x.trees.flat import parents

if TYPE_CHECKING:
    from orbax_t5x.restoring.fitting import Fitting

# Of leaves that do not fit as they are.
_new_fitting: Callable[..., Fitting] = on_demand.function("orbax_t5x.restoring.fitting", "Fitting")
_as_dtype = on_demand.function("orbax_t5x.transforms.dtype_names", "as_dtype")
# Of leaves from a fallback.
# Of padded leaves only.
_fill: Callable[[Node, Node], Node] = on_demand.function("orbax_t5x.lazy.fill", "fill")
_NOTHING_RESTORED = Fix.any_of(
    Fix("give transforms that lead from the checkpoint's names to the target's"),
    Fix.in_program("if nothing of the checkpoint is wanted, pass fallback_for=['.*']"),
)
_SHOWN_NAMES = 3
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


class Matcher:
    """Matcher of a transformed state dict's leaves with a target's.

    Attributes:
      target, state, diagnostics: as given; `fallback` has values for missing leaves by name.
      problems: of target leaves for which there is a value that cannot be used.
      missing: the leaves of the target that nothing fills, in order.
      restores_nothing: whether there is no value for the target but what the fallback gives; valid after `entries`.
      replaced: stored shapes of leaves that `fallback_for` names, whose shape is another in the target; by name.
      unfilled: names of the target's leaves for which the state dict has nothing of their shape, in order; some of
        them the fallback may fill. An optimizer's leaves that were reset are not among them.
    """

    def __init__(
        self,
        target: Target,
        options: RestoreOptions,
        fallback: Mapping[str, Any] | None,
        stored_names: Mapping[Leaf, str],
        state: Mapping[str, Any],
        diagnostics: Diagnostics,
    ):
        self.target = target
        self.state = state
        self.diagnostics = diagnostics
        self.problems: list[Problem] = []
        self.missing: list[MissingLeaf] = []
        self.unfilled: list[str] = []
        self.replaced: dict[str, tuple[int, ...]] = {}
        self.restores_nothing = False
        self._function_views: dict[LazyArray, View] = {}
        self._options = options
        self._fallback = fallback
        patterns = options.fallback_for
        self._fillable = None if patterns is None else [compile_pattern(one, "fallback_for") for one in patterns]
        self._stored_names = stored_names
        # The leaf of a checkpoint under the name of a faulty target leaf is not left over.
        self._taken = {problem.leaf for problem in target.problems if problem.leaf is not None}
        self._x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.dtype(np.int64)
        self._one_process = jax.process_count() == 1
        # By identity: like leaves of a target are one object.
        self._is_placeable: dict[int, bool] = {}
        leaves = self._everything() if target.kind == "everything" else target.leaves
        narrowed = {} if options.dtype is None else self._narrowed(leaves, _as_dtype(options.dtype))
        self._leaves = {**leaves, **narrowed} if narrowed else leaves
        self._narrowed_names = frozenset(narrowed)

    @functools.cached_property
    def _fitting(self) -> Fitting:
        return _new_fitting(self._options, self._narrowed_names, self.problems.append)

    # -- the target's side

    def entries(self) -> list[PlanEntry]:
        """Returns an entry per target leaf."""
        entries: list[PlanEntry] = []
        for name, leaf in self._leaves.items():
            value = self.state.get(name)
            if type(value) is not View or (entry := self._bare_entry(name, leaf, value.node, value)) is None:
                entry = self._plan_leaf(name, leaf)
            if entry is not None:
                entries.append(entry)
        if self._fallback is not None:
            self._note_nothing_restored(entries)
        if self.replaced and self.problems:
            self._name_their_moments()
        return entries

    def _note_nothing_restored(self, entries: Sequence[PlanEntry]) -> None:
        """Notes a problem if only the fallback gives values."""
        filled = sum(entry.action == "fallback" for entry in entries)
        barred = sum(one.is_barred for one in self.missing)
        self.restores_nothing = bool(barred or (filled and self._fillable is None)) and not self._has_place()
        if self.restores_nothing:
            count = counted(filled + barred, "leaf", "leaves")
            message = f"no leaf of the checkpoint has a place in the target, whose {count} the fallback would fill"
            self.problems.insert(0, Problem("nothing_restored", None, message, _NOTHING_RESTORED))

    def _has_place(self) -> bool:
        """Tests if a target leaf has the name of a checkpoint's value."""
        return any(
            value is not None
            and (name in self._taken or self.target.is_kept(name))
            and not (isinstance(value, View) and self._stored_names.keys().isdisjoint(value.leaves()))
            for name, value in self.state.items()
        )

    @functools.cached_property
    def leftovers(self) -> list[str]:
        """Names of the state dict that no target leaf takes."""
        target = self.target
        if target.kind == "everything":
            return []
        left = [name for name, value in self.state.items() if value is not None and name not in self._taken]
        left += self.diagnostics.unplaced
        if target.inference_states:
            slots = tuple((f"{name}/state/" if name else "state/") for name in target.inference_states)
            steps = {f"{prefix}step" for prefix in slots}
            left = [name for name in left if name in steps or not name.startswith(slots)]
        return [name for name in left if not target.is_kept(name)] if target.kept else left

    def leftover_sources(self) -> list[str]:
        """Lists the names of the leftovers' checkpoint leaves."""
        values = (self.state.get(name, self.diagnostics.unplaced.get(name)) for name in self.leftovers)
        views = (as_view(value) for value in values if isinstance(value, LazyArray))
        return list(dict.fromkeys(name for view in views for name in self._source_names(view.leaves())))

    def _source_names(self, leaves: Sequence[Leaf]) -> tuple[str, ...]:
        """Returns the names of stored leaves in the checkpoint, with its prefix."""
        names = self._stored_names
        if len(leaves) == 1:
            return (names.get(leaves[0], leaves[0].name),)
        return tuple(dict.fromkeys(names.get(leaf, leaf.name) for leaf in leaves))

    def _everything(self) -> dict[str, TargetLeaf]:
        """Makes a NumPy target leaf for every leaf of the state dict."""
        leaves: dict[str, TargetLeaf] = {}
        for name, value in self.state.items():
            if value is not None:
                dtype = getattr(value, "dtype", None)
                if is_key_dtype(np.dtype(object) if dtype is None else dtype):
                    value = jax.random.key_data(value)
                try:
                    array = value if isinstance(value, LazyArray) else as_view(value, name)
                except (TypeError, ValueError):
                    leaves[name] = TargetLeaf("numpy")  # of no array: a problem when it is planned
                    continue
                shape, dtype = tuple(array.shape), np.dtype(array.dtype)
                leaves[name] = TargetLeaf("numpy", shape, dtype, is_param=is_parameter_name(name))
        return leaves

    def _narrowed(self, leaves: Mapping[str, TargetLeaf], wanted: np.dtype) -> dict[str, TargetLeaf]:
        """Returns the leaves that `dtype=` concerns, in that dtype."""
        changed = {
            name: dataclasses.replace(leaf, dtype=wanted) for name, leaf in leaves.items() if leaf.is_float_param
        }
        if not changed:
            message = (
                f"dtype={wanted.name} applies to the floating-point model parameters (under target/ or params/, or "
                "nnx.Param), and the target has none"
            )
            way = "add ot.transforms.Cast(pattern, dtype) to {} and give the target that dtype"
            self._problem("dtype", None, message, Fix.setting(way, transforms=...))
        return changed

    def _bare_entry(self, name: str, leaf: TargetLeaf, node: Node, view: View) -> PlanEntry | None:
        """Makes the entry of a leaf that fits, or returns None."""
        if type(node) is not LeafNode or node.shape != leaf.shape or node.dtype != leaf.dtype:
            return None
        if (is_placeable := self._is_placeable.get(id(leaf))) is None:
            is_placeable = leaf.kind == "numpy" or (leaf.kind == "jax" and not self._placing_problems(leaf))
            self._is_placeable[id(leaf)] = is_placeable
        stored = node.leaf
        if stored.is_value or not is_placeable:
            return None
        self._taken.add(name)
        source, rule = self._stored_names.get(stored, stored.name), self.diagnostics.rule_for.get(name, "")
        made, fidelity = (leaf.shape, leaf.dtype, leaf.sharding), self.diagnostics.fidelity.get(name, "")
        return PlanEntry(name, (source,), *made, "read", "", rule, fidelity, view, leaf, (stored,))

    def _plan_leaf(self, name: str, leaf: TargetLeaf) -> PlanEntry | None:
        source_name = name
        if leaf.is_variable and name not in self.state and f"{name}/value" in self.state:
            source_name = f"{name}/value"
        value = self.state.get(source_name)
        if leaf.kind == "keep" or leaf.kind == "none":
            if leaf.kind == "keep" or value is None:
                self._taken.add(source_name)
            return PlanEntry(name, (), (), None, None, "keep", leaf=leaf)
        if leaf.kind == "jax" or leaf.kind == "key":
            for kind, message, fix in self._placing_problems(leaf):
                self._problem(kind, name, message, fix)
        self._taken.add(source_name)
        if value is None:
            return self._plan_fallback(name, leaf, source_name in self.state)
        if isinstance(value, LazyArray | np.ndarray) and tuple(value.shape) != leaf.shape and self._is_new(name):
            self.replaced[name] = tuple(value.shape)
            return self._plan_fallback(name, leaf, is_none=False)
        return self._entry(name, leaf, source_name, value)

    def _entry(self, name: str, leaf: TargetLeaf, source_name: str, value: Any) -> PlanEntry | None:
        """Makes a leaf's entry from a value of the state dict."""
        # A view, as most values are, is a lazy array; that is quick to see by its exact type.
        is_lazy = isinstance(value, View) or isinstance(value, LazyArray)
        origin = "the checkpoint" if is_lazy else "the state dict"
        if is_lazy and not isinstance(value, View):
            # Two leaves may have one array: its function is called once for both.
            value = self._function_views.setdefault(value, as_view(value, source_name))
        view = self._fitting.view(name, leaf, value, origin, source_name)
        if view is None or view.shape != leaf.shape:
            self.unfilled.append(name)
        if view is None:
            return None
        stored = view.leaves()
        if has_unfilled(stored):
            view = self._filled(name, leaf, view)
            if view is None:
                return None
            stored = view.leaves()
        read = [one for one in stored if not one.is_value]
        sources, action = (self._source_names(read), "read") if read else ((), "value")
        rule, fidelity = (
            found.get(source_name, "") for found in (self.diagnostics.rule_for, self.diagnostics.fidelity)
        )
        made = leaf.shape, leaf.dtype, leaf.sharding
        return PlanEntry(name, sources, *made, action, view.describe(), rule, fidelity, view, leaf, stored)

    def _filled(self, name: str, leaf: TargetLeaf, view: View) -> View | None:
        """Fills a padded view from the fallback, or returns None."""
        value = None if self._fallback is None else self._fallback.get(name)
        if value is None:
            lack = "no fallback was given" if self._options.fallback is None else "that has no such leaf"
            message = f"Pad takes new elements from the fallback, and {lack}"
            value = Fix.setting(f"give {{}} a value of shape {leaf.shape} for it", fallback=...)
            self._problem("fallback", name, message, Fix.any_of(value, Fix("pad with a number")))
            return None
        given = self._fitting.view(name, leaf, value, "the fallback")
        if given is None or (given.shape, given.dtype) != (view.shape, view.dtype):
            return None  # a shape or dtype that does not fit is a problem already
        try:
            return View(_fill(view.node, given.node))
        except ValueError as error:
            message = f"Pad takes new elements from the fallback, but their places are not known after this: {error}"
            self._problem("transform", name, message, Fix("put Pad after that transform, or pad with a number"))
            return None

    def _placing_problems(self, leaf: TargetLeaf) -> list[tuple[ProblemKind, str, Fix]]:
        """Returns the problems with the array that JAX is to make."""
        found: list[tuple[ProblemKind, str, Fix]] = []
        if not self._x64 and leaf.dtype in _WIDE:
            message = f"the target's dtype {leaf.dtype.name} would be narrowed silently, because jax_enable_x64 is off"
            way = "set jax.config.update('jax_enable_x64', True), or ask for a 32-bit dtype or a NumPy target"
            found.append(("dtype", message, Fix.in_program(way)))
        if leaf.sharding is None:
            if not self._one_process:
                message = "the target leaf has no sharding, and there are several processes"
                found.append(("sharding", message, Fix.by_target("give the leaf a sharding")))
            return found
        clash, fix = _placing_clash(leaf.sharding, leaf.shape)
        if clash:
            found.append(("sharding", f"{leaf.sharding} {clash}", Fix.by_target(fix)))
        return found

    # -- what is missing

    def unused_patterns(self) -> list[str]:
        """Returns the patterns of `fallback_for` that match no leaf of the target."""
        patterns = self._fillable or ()
        return [pattern_text(one) for one in patterns if not any(map(one.fullmatch, self._leaves))]

    def _is_named(self, name: str) -> bool:
        """Returns True if `fallback_for` names a leaf."""
        return any(pattern.fullmatch(name) for pattern in self._fillable or ())

    def _is_new(self, name: str) -> bool:
        """Returns True if `fallback_for` names a leaf of the fallback."""
        return self._fallback is not None and name in self._fallback and self._is_named(name)

    def _name_their_moments(self) -> None:
        """Proposes to name the moments of parameters that the fallback gives in another shape."""
        ends = [f"/{name.partition('/')[2] or name}/" for name in self.replaced]
        shapes = [problem.leaf for problem in self.problems if problem.kind == "shape" and problem.leaf]
        moments = [name for name in shapes if is_in_optimizer(name) and any(end in f"/{name}/" for end in ends)]
        patterns = (*map(pattern_text, self._fillable or ()), *map(re.escape, moments))
        fix = Fix.setting("name the moments of a parameter that is new, too: pass {}", fallback_for=patterns)
        self.problems[:] = [
            dataclasses.replace(problem, fix=fix) if problem.leaf in moments else problem for problem in self.problems
        ]

    def warnings_of_fills(self, entries: Sequence[PlanEntry]) -> list[str]:
        """Describes leaves that the fallback fills in place of stored ones, or beside restored moments."""
        warnings: list[str] = []
        if self.replaced:
            shapes = [f"{name} (the checkpoint has {shape})" for name, shape in self.replaced.items()]
            count = counted(len(shapes), "leaf is", "leaves are")
            warnings.append(
                f"{count} taken from the fallback, though the checkpoint has one of another shape: "
                f"{listed(shapes, _SHOWN_NAMES)}"
            )
        beside, unused = self._begun_anew(entries)
        if beside or unused:
            reason = "beside restored ones of other parameters" if beside else "and the checkpoint's have no place"
            count = counted(len(beside or unused), "leaf of the optimizer begins", "leaves of the optimizer begin")
            shown = listed(beside or unused, _SHOWN_NAMES)
            warnings.append(f"{count} anew from the fallback, {reason}: {shown}")
        return warnings

    def _begun_anew(self, entries: Sequence[PlanEntry]) -> tuple[list[str], list[str]]:
        """Lists moments from the fallback beside restored ones of their kind, and leaves that nobody called new."""
        filled = {entry.name: entry for entry in entries if entry.action == "fallback"}
        beside: list[str] = []
        optimizer = find_optimizer({entry.name: entry for entry in entries}) if filled else OptimizerStructure()
        for moments in optimizer.moments:
            begun = [] if moments.is_copy else [slot for slot in moments.slots.values() if slot in filled]
            beside += begun if len(begun) < len(moments.slots) else []
        if not any(map(may_be_optimizer, self.leftovers)):
            return beside, []
        return beside, [name for name in filled if may_be_optimizer(name) and not self._is_named(name)]

    def _plan_fallback(self, name: str, leaf: TargetLeaf, is_none: bool) -> PlanEntry | None:
        fidelity = self.diagnostics.fidelity.get(name, "")
        if fidelity != "reset":
            self.unfilled.append(name)
        value = None if self._fallback is None else self._fallback.get(name)
        may_fill = self._fillable is None or self._is_named(name)
        if self._fillable is None or not may_fill:
            self._raise_broken_parent(name)
        if value is None or not may_fill:
            # The transform that should have made an explained one says why it could not.
            if name not in self.diagnostics.explained:
                is_barred = value is not None and not may_fill
                self.missing.append(MissingLeaf(name, leaf, is_none, fidelity == "reset", is_barred))
            return None
        view = self._fitting.view(name, leaf, value, "the fallback")
        if view is not None and _is_left_to_jax(leaf, view):
            view = None
        made = leaf.shape, leaf.dtype, leaf.sharding
        how, leaves = ("", ()) if view is None else (view.describe(), view.leaves())
        return PlanEntry(name, (), *made, "fallback", how, "", fidelity, view, leaf, leaves)

    def _raise_broken_parent(self, name: str) -> None:
        """Raises the error of a broken item with the leaf."""
        for parent in parents(name):
            if isinstance(value := self.state.get(parent), View):
                for leaf in value.leaves():
                    leaf.raise_error()

    def _problem(self, kind: ProblemKind, leaf: str | None, message: str, fix: Fix) -> None:
        self.problems.append(Problem(kind, leaf, message, fix))


def _is_left_to_jax(leaf: TargetLeaf, view: View) -> bool:
    """Tests if JAX computes an array straight into its leaf.

    What stays on the host is cast there, because JAX may not have its dtype, and so is what has its values checked.
    """
    is_checked = isinstance(view.node, CastNode) and view.node.mismatch is not None
    is_computed = any(isinstance(stored, ComputedLeaf) for stored in view.leaves())
    return is_computed and not is_checked and not leaf.is_on_host


@functools.lru_cache(maxsize=1 << 14)
def _placing_clash(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[str, str]:
    """Returns JAX's reason against a sharding, and the fix."""
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:  # JAX raises IndexError for a spec longer than the rank
        reason = " ".join(str(error).split())
        return f"does not fit shape {shape}: {reason}", "choose a PartitionSpec that divides the shape"
    except Exception as error:
        return _not_indexed(error)
    try:
        sharding.devices_indices_map(shape)
    except Exception as error:  # NotImplementedError for unreduced axes, and for some Manual ones AssertionError
        return _not_indexed(error)
    return "", ""


def _not_indexed(error: Exception) -> tuple[str, str]:
    # After its first sentence JAX asks for a report of the error, which is not JAX's.
    reason = " ".join(str(error).split()).partition(". Please ")[0]
    clash = f"does not determine the index box of each device: {type(error).__name__}: {reason}".rstrip(": ")
    return clash, "choose a PartitionSpec without unreduced axes, over axes of a mesh that are Auto or Explicit"
