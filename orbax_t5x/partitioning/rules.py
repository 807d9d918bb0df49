"""Rules from logical axes or names of leaves to mesh axes.

Flax's `logical_to_mesh_axes` applies the rules for logical axes. A logical axis without a rule, a rule for a logical
axis whose mesh axis the mesh lacks, and a leaf without axes mean: not split. A dimension that its mesh axes do not
divide is a problem, since JAX would refuse it later; so is an unknown mesh axis in a user's own `PartitionSpec`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from orbax_t5x.text.wording import did_you_mean

MeshAxes = str | tuple[str, ...] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes | PartitionSpec]]
"""Pairs of a logical axis and its mesh axes, or of a pattern of whole leaf names and a `PartitionSpec`."""

AxisNames = Sequence[MeshAxes] | PartitionSpec
"""Logical axis names of the dimensions of one leaf."""

STANDARD_LOGICAL_AXIS_RULES: Sequence[tuple[str, MeshAxes]] = (
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
    ("relpos_buckets", None),
    ("abspos_buckets", None),
    ("length", None),
    ("layers", None),
    ("stack", None),
    ("mlp_activations", None),
)
"""T5X's rules for a mesh with the axes `data` and `model`: batches over `data`, wide dimensions over `model`.

Example:
  >>> dict(ot.STANDARD_LOGICAL_AXIS_RULES)["mlp"]
  'model'
"""


class AxisRules:
    """The rules of a call on a mesh.

    Attributes:
      problems: leaves that do not fit, as text.
      is_empty: whether there are no rules at all.
      has_patterns: whether some rules are for names of leaves.
      unused_patterns: those that no leaf has taken yet.
    """

    def __init__(self, rules: LogicalAxisRules, mesh: Mesh | AbstractMesh):
        if isinstance(rules, str) or any(isinstance(rule, str) or len(rule) != 2 for rule in rules):
            pairs = "[(logical axis, mesh axes), …] or [(regex, PartitionSpec), …]"
            raise TypeError(f"the rules are pairs, {pairs}, not {rules!r}")
        self._mesh = mesh
        self._patterns = [(_compiled(name), spec) for name, spec in rules if isinstance(spec, PartitionSpec)]
        self._axes = self._on_mesh((name, axes) for name, axes in rules if not isinstance(axes, PartitionSpec))
        self.problems: list[str] = []
        self.is_empty: bool = not rules
        self.has_patterns: bool = bool(self._patterns)
        self.unused_patterns: dict[str, None] = dict.fromkeys(pattern.pattern for pattern, _ in self._patterns)

    def has_pattern_for(self, name: str) -> bool:
        """Reports whether a pattern matches a leaf's whole name."""
        return any(pattern.fullmatch(name) for pattern, _ in self._patterns)

    def pattern_of(self, name: str) -> str | None:
        """Returns the first pattern that matches the whole name, or None."""
        found = next((pattern.pattern for pattern, _ in self._patterns if pattern.fullmatch(name)), None)
        if found is not None:
            self.unused_patterns.pop(found, None)
        return found

    def by_name(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec of the first matching pattern."""
        pattern, spec = next(rule for rule in self._patterns if rule[0].fullmatch(name))
        named = [axis for axes in spec for axis in _names_of(axes)]
        twice = [axis for axis in dict.fromkeys(named) if named.count(axis) > 1]
        if twice:
            axes = ", ".join(map(repr, twice))
            self.problems.append(f"{name}: the rule {pattern.pattern!r} has {spec}, which names {axes} more than once")
            return PartitionSpec()
        lacking = [axis for axis in named if axis not in self._mesh.axis_names]
        for axis in lacking:
            axes = ", ".join(map(repr, self._mesh.axis_names))
            hint = did_you_mean(axis, map(str, self._mesh.axis_names))
            self.problems.append(
                f"{name}: the rule {pattern.pattern!r} has {spec}, and the mesh has no axis {axis!r} but {axes}{hint}"
            )
        if lacking:
            return PartitionSpec()
        kept = self.on_mesh(spec)
        if len(kept) > len(shape):
            self.problems.append(
                f"{name}: {kept} for shape {shape}: the rule {pattern.pattern!r} has more dimensions; put a rule of "
                f"its own before it: ({re.escape(name)!r}, PartitionSpec())"
            )
            return PartitionSpec()
        return self.checked(kept, shape, name)

    def on_mesh(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without the mesh axes that the mesh lacks."""
        return PartitionSpec(*(self._present(axes) for axes in spec))

    def checked(self, spec: PartitionSpec, shape: tuple[int, ...], name: str) -> PartitionSpec:
        """Returns a leaf's spec after checking that it divides the shape."""
        return self._checked(spec, spec, shape, name)

    def by_logical_axes(self, names: AxisNames | None, shape: tuple[int, ...], where: str) -> PartitionSpec:
        """Returns the mesh axes of a leaf with logical axes.

        The model names an axis for each dimension, or None.
        """
        if names is None:
            return PartitionSpec()
        if len(names) != len(shape):
            self.problems.append(f"{where}: {len(names)} logical axes {tuple(names)} for shape {shape}")
            return PartitionSpec()
        spec = logical_to_mesh_axes(cast(Any, tuple(names)), self._axes)
        assert spec is not None
        return self._checked(spec, names, shape, where)

    def by_metadata(
        self, names: AxisNames, shape: tuple[int, ...], own_rules: LogicalAxisRules, where: str
    ) -> PartitionSpec:
        """Returns the mesh axes of a leaf with partitioning metadata.

        Its names are logical axes or the mesh's own.

        Args:
          names: for the first dimensions, as in a PartitionSpec.
          shape: of the leaf.
          own_rules: rules that the metadata has itself; they go first.
          where: the leaf's name.
        """
        logical = {name for name, _ in (*own_rules, *self._axes)}
        of_the_mesh = [(axis, axis) for axis in self._mesh.axis_names if axis not in logical]
        rules = (*self._on_mesh(own_rules), *self._axes, *of_the_mesh)
        given = tuple(self._present(name) if isinstance(name, tuple) else name for name in names)
        if len(given) > len(shape):
            self.problems.append(
                f"{where}: {len(given)} axes {tuple(names)} for shape {shape}; give it a rule of its own: "
                f"({re.escape(where)!r}, PartitionSpec())"
            )
            return PartitionSpec()
        spec = logical_to_mesh_axes(cast(Any, given), rules)
        assert spec is not None
        return self._checked(spec, names, shape, where)

    def _checked(self, spec: PartitionSpec, names: AxisNames, shape: tuple[int, ...], where: str) -> PartitionSpec:
        """Returns the spec, after checking that it divides the shape."""
        for size, name, mesh_axes in zip(shape, names, spec, strict=False):
            axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes or ())
            devices = math.prod(self._mesh.shape[axis] for axis in axes)
            if size % devices:
                is_logical = isinstance(name, str) and (name,) != axes
                dimension = f"logical axis {name!r}" if is_logical else "a dimension"
                rule = f"({name!r}, None)" if is_logical else f"({re.escape(where)!r}, PartitionSpec())"
                self.problems.append(
                    f"{where}: {dimension} has size {size}, which mesh axis {'*'.join(axes)} of size {devices} does "
                    f"not divide; give it the rule {rule} or another mesh"
                )
        return spec

    def _on_mesh(self, rules: Iterable[tuple[str, MeshAxes | PartitionSpec]]) -> tuple[tuple[str, MeshAxes], ...]:
        """Drops mesh axes that the mesh lacks from the rules.

        A rule with such axes only leaves room for a later rule.
        """
        kept: list[tuple[str, MeshAxes]] = []
        for logical, mesh_axes in rules:
            present = self._present(mesh_axes)
            if mesh_axes is None or present is not None:
                kept.append((logical, present))
        return tuple(kept)

    def _present(self, mesh_axes: MeshAxes | PartitionSpec) -> MeshAxes:
        """Drops mesh axes that the mesh lacks, or returns None."""
        if mesh_axes is None or isinstance(mesh_axes, str):
            return mesh_axes if mesh_axes in self._mesh.axis_names else None
        return tuple(axis for axis in mesh_axes if axis in self._mesh.axis_names) or None


def _compiled(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name)
    except re.error as error:
        raise ValueError(f"the rule {name!r} is no regular expression: {error}") from None


def _names_of(axes: Any) -> tuple[str, ...]:
    """Lists the mesh axes of a dimension of a spec."""
    return axes if isinstance(axes, tuple) else (axes,) if isinstance(axes, str) else ()
