"""Flattens targets: leaves by name, and their rebuilder.

Any pytree is a target. T5X's train states and `nnx` states and modules name their own leaves, alone or inside other
containers. Nothing here touches array bytes, and nothing imports Flax: a train state is known by its methods, and
`nnx.State` can only be met where `flax.nnx` is loaded already. A leaf that nothing can be restored into is a problem,
never an exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding

from orbax_t5x.errors import Fix, Problem, ProblemKind, RestorePlanError
from orbax_t5x.trees.dtypes import kind_of
from orbax_t5x.trees.flat import EndlessTreeError, flatten, parents, unflatten
from orbax_t5x.trees.named_leaves import (
    NamedLeaf,
    flatten_node,
    is_nnx_node,
    is_train_state,
    names_itself,
    require_levels,
)
from orbax_t5x.trees.pytree_names import leaf_name, names_in_dicts

Kind = Literal["jax", "key", "numpy", "scalar", "keep", "none"]
Rebuild = Callable[[Mapping[str, Any]], Any]

_MODEL_PARAMETERS = frozenset({"target", "params"})

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)
# Orbax's descriptions of NumPy arrays have a shape and a dtype, and no sharding as those of `jax.Array` have one.
_ORBAX = "orbax."
_GIVE_MESH = "call this within `with jax.set_mesh(mesh):` of a mesh with these axes, or give NamedShardings on a mesh"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TargetLeaf:
    """Description of a leaf of the target.

    Attributes:
      kind: "jax" (a `jax.Array`), "key" (a typed PRNG key), "numpy", "scalar" (of `scalar_type`), "keep" (a
        placeholder, stays as it is) or "none" (no leaf, only a name).
      shape, dtype: as stored; for a typed key those of its uint32 key data.
      sharding: of the array to make; None for what stays on the host, and for "one device".
      layout: a `jax.experimental.layout.Format` where the target asks for a layout that is not the default, else None.
      scalar_type: the Python or NumPy type of a scalar.
      key_impl: the implementation's name of a typed PRNG key.
      is_param: whether `dtype=` applies to it where it is of a floating-point type.
      is_variable: whether it is the value of an `nnx.Variable`, behind whose name stock Orbax writes `/value`.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    sharding: jax.sharding.Sharding | None = None
    layout: Any = None
    scalar_type: type | None = None
    key_impl: str | None = None
    is_param: bool = False
    is_variable: bool = False

    @property
    def is_on_host(self) -> bool:
        """True for a NumPy array or a scalar."""
        return self.kind in ("numpy", "scalar")

    @property
    def is_float_param(self) -> bool:
        """True for a leaf that `dtype=` casts: a model parameter."""
        return self.is_param and self.kind in ("jax", "numpy") and kind_of(self.dtype) == "float"

    @property
    def placing(self) -> Any:
        """The `device` argument for `jax.device_put`."""
        return self.layout if self.layout is not None else self.sharding


class MissingLeaf(NamedTuple):
    """A leaf of the target that nothing fills.

    `is_none`: the checkpoint has None under the name. `is_reset`: a transform found that it has no counterpart.
    `is_barred`: the fallback has a value, and `fallback_for` does not let it fill the leaf.
    """

    name: str
    leaf: TargetLeaf
    is_none: bool
    is_reset: bool
    is_barred: bool = False


def describe_leaf(name: str, leaf: Any, *, is_param: bool = False, is_variable: bool = False) -> TargetLeaf | Problem:
    """Describes a leaf of the target, or returns the problem with it."""
    if leaf is Ellipsis:
        return TargetLeaf("keep")
    if leaf is None:
        return TargetLeaf("none")
    if isinstance(leaf, np.ndarray):
        return TargetLeaf("numpy", leaf.shape, leaf.dtype, is_param=is_param, is_variable=is_variable)
    if isinstance(leaf, type) and issubclass(leaf, _SCALARS):
        with contextlib.suppress(TypeError):  # np.generic and other abstract classes make no value
            leaf = leaf()
    if isinstance(leaf, _SCALARS):
        return _describe_scalar(leaf, is_param, is_variable)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        if not jax.tree_util.tree_leaves(leaf):  # a node without leaves, such as Flax's names of axes in an NNX state
            return TargetLeaf("keep")
        return _unknown(name, leaf, f"a leaf of type {type(leaf).__name__} can not be restored into")
    if type(leaf).__module__.startswith(_ORBAX) and not hasattr(type(leaf), "sharding"):
        return TargetLeaf("numpy", tuple(shape), np.dtype(dtype), is_param=is_param, is_variable=is_variable)
    try:
        sharding = getattr(leaf, "sharding", None)
    except (TypeError, ValueError) as error:  # JAX puts a PartitionSpec on the mesh in use when it is asked for
        message = f"its PartitionSpec does not fit the mesh in use: {error}"
        return Problem("sharding", name, message, Fix.in_program(_GIVE_MESH))
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = None
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sharding = _on_mesh_in_use(name, sharding)
        if isinstance(sharding, Problem):
            return sharding
    if not isinstance(dtype, np.dtype):
        try:
            if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
                return _describe_key(name, leaf, sharding, is_variable)
            dtype = np.dtype(dtype)
        except TypeError:
            return _unknown(name, leaf, f"its dtype {dtype!r} is neither NumPy's nor JAX's")
    layout = _special_layout(leaf, sharding)
    return TargetLeaf("jax", tuple(shape), dtype, sharding, layout, is_param=is_param, is_variable=is_variable)


def _unknown(name: str, leaf: Any, message: str) -> Problem:
    fix = "use jax.ShapeDtypeStruct, jax.Array, np.ndarray, a scalar, or ... to leave it out"
    if callable(getattr(leaf, "init", None)) and callable(getattr(leaf, "apply", None)):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        message = f"{kind.__name__} is a model, and a target has the shapes of what it holds"
        fix = "pass jax.eval_shape(model.init, …), with what model.init takes"
    elif isinstance(leaf, type):
        message = f"{leaf.__name__} is a class, and a target has the shapes of what an object of it holds"
        fix = (
            f"pass nnx.eval_shape(lambda: {leaf.__name__}(…)) of an NNX model, or jax.eval_shape(function) with a "
            "function that makes the object"
        )
    elif callable(leaf):
        fix = (
            "give the shapes of what it makes: jax.eval_shape(function), of a linen model jax.eval_shape(model.init, …)"
        )
    return Problem("target", name, message, Fix.by_target(fix))


def _describe_scalar(leaf: Any, is_param: bool, is_variable: bool) -> TargetLeaf:
    if isinstance(leaf, str | bytes):
        dtype = np.dtype(object)
    else:
        dtype = leaf.dtype if isinstance(leaf, np.generic) else np.asarray(leaf).dtype
    return TargetLeaf("scalar", (), dtype, scalar_type=type(leaf), is_param=is_param, is_variable=is_variable)


# -- typed keys


def _describe_key(
    name: str, leaf: Any, sharding: jax.sharding.Sharding | None, is_variable: bool
) -> TargetLeaf | Problem:
    impl = key_impl_of(leaf.dtype)
    if impl is None:
        known = ", ".join(_KEY_IMPLEMENTATIONS)
        return _unknown(name, leaf, f"its PRNG key type {leaf.dtype} is unknown; known are {known}")
    shape = key_data_shape(leaf.shape, leaf.dtype)
    return TargetLeaf("key", shape, np.dtype(np.uint32), sharding, key_impl=impl, is_variable=is_variable)


def is_key_dtype(dtype: Any) -> bool:
    """Returns True for the dtype of typed PRNG keys."""
    return not isinstance(dtype, np.dtype) and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl_of(dtype: Any) -> str | None:
    """Returns a typed key dtype's implementation, or None."""
    return next((name for name in _KEY_IMPLEMENTATIONS if _key_dtype(name) == dtype), None)


def key_data_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Returns the shape of the uint32 data of typed keys."""
    return tuple(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype)).shape)


def impls_of_data(shape: tuple[int, ...]) -> list[str]:
    """Returns the implementations with key data of this shape."""
    return [impl for impl in _KEY_IMPLEMENTATIONS if key_data_shape((), _key_dtype(impl)) == shape]


@functools.cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


# -- placing


def _on_mesh_in_use(name: str, sharding: NamedSharding) -> NamedSharding | Problem:
    """Moves an abstract sharding to the mesh in use."""
    mesh = jax.sharding.get_mesh()
    wanted, in_use = dict(sharding.mesh.shape), dict(mesh.shape)
    if wanted == in_use:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    used = f"the mesh in use has axes {in_use}" if in_use else "no mesh is in use"
    message = f"its sharding is over an abstract mesh with axes {wanted}, which has no devices, and {used}"
    return Problem("sharding", name, message, Fix.in_program(_GIVE_MESH))


def _special_layout(leaf: Any, sharding: jax.sharding.Sharding | None) -> Format | None:
    """Returns the leaf's Format if it is special, else None.

    A layout is special if not row-major: passing the default costs more.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct) or isinstance(leaf, jax.Array):  # the check of jax.Array is slow
        layout = getattr(getattr(leaf, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(len(order))):
            return Format(layout, sharding)
    return None


def is_parameter_name(name: str) -> bool:
    """Tests for a model parameter's name in a train state."""
    return name.partition("/")[0] in _MODEL_PARAMETERS


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A flattened target.

    Attributes:
      leaves: by '/'-joined name, in the target's order.
      original: the target's own leaves by name: what transforms see and what a "keep" leaf stays.
      rebuild: puts values by name into the target's structure.
      kind: "tree", or "everything" for a target of None.
      problems: names that collide and leaves of unknown type.
      train_states: the names of T5X train states, "" for the target itself.
      inference_states: the same of those without an optimizer (`InferenceState`).
    """

    leaves: Mapping[str, TargetLeaf]
    original: Mapping[str, Any]
    rebuild: Rebuild
    kind: Literal["tree", "everything"] = "tree"
    problems: tuple[Problem, ...] = ()
    train_states: tuple[str, ...] = ()
    inference_states: tuple[str, ...] = ()

    @functools.cached_property
    def kept(self) -> frozenset[str]:
        """Names of the placeholders."""
        return frozenset(name for name, leaf in self.leaves.items() if leaf.kind == "keep")

    def is_kept(self, name: str) -> bool:
        """Tests if a name or its container is a placeholder."""
        return not self.kept.isdisjoint(("", *parents(name), name))


def require_finite(tree: Any, kind: ProblemKind = "target") -> None:
    """Refuses a recursive or too deep tree."""
    try:
        require_levels(tree)
    except EndlessTreeError as error:
        fix = Fix.in_program("pass a tree of arrays, whose containers hold none of those above them")
        raise RestorePlanError([Problem(kind, None, f"the tree {error}", fix)]) from None


def flatten_target(target: Any, kind: ProblemKind = "target") -> Target:
    """Flattens any target of `orbax_t5x.restore`; see the contract there."""
    require_finite(target, kind)
    if target is None:
        # A TF bundle may hold both `a` and `a/b`.
        return Target({}, {}, functools.partial(unflatten, join_clashes=True), "everything")
    found = _Flattening()
    rebuild = found.add_node("", target)
    states, inference_states = tuple(found.train_states), tuple(found.inference_states)
    return Target(found.leaves, found.original, rebuild, "tree", tuple(found.problems), states, inference_states)


def _has_optimizer(train_state: Any) -> bool:
    try:
        _ = train_state.param_states
    except (NotImplementedError, AttributeError):
        return False
    return True


def _in_structure_of(target: Any, restored: Any) -> Any:
    """Puts a restored train state into the target's containers."""
    treedef = jax.tree_util.tree_structure(target)
    leaves = jax.tree_util.tree_leaves(restored)
    # A target without parameters takes any.
    return treedef.unflatten(leaves) if len(leaves) == treedef.num_leaves else restored


class _Flattening:
    """Builder of a `Target`."""

    def __init__(self) -> None:
        self.leaves: dict[str, TargetLeaf] = {}
        self.original: dict[str, Any] = {}
        self._described: dict[tuple[Any, bool, bool], TargetLeaf] = {}
        self.problems: list[Problem] = []
        self.train_states: list[str] = []
        self.inference_states: list[str] = []

    def add_node(self, name: str, node: Any) -> Rebuild:
        """Adds the leaves of any pytree; returns its rebuilder."""
        names, leaves, treedef = _open_pytree(node, f"{name}/" if name else "")
        own: dict[int, Rebuild] = {}
        for position, (leaf_path, leaf) in enumerate(zip(names, leaves, strict=True)):
            if type(leaf) is not jax.ShapeDtypeStruct and (type(leaf) is dict or names_itself(leaf)):
                own[position] = self._add_own(leaf_path, leaf)
            else:
                self._add_leaf(leaf_path, leaf, leaf_path.partition("/")[0] in _MODEL_PARAMETERS)

        def rebuild(values: Mapping[str, Any]) -> Any:
            made = [own[at](values) if at in own else values[leaf] for at, leaf in enumerate(names)]
            return jax.tree_util.tree_unflatten(treedef, made)

        return rebuild

    def _add_own(self, name: str, node: Any) -> Rebuild:
        """Adds the leaves of a node that names them itself."""
        if type(node) is dict:
            return self._add_dict(name, node)
        start = f"{name}/" if name else ""
        if is_train_state(node):
            leaves, put_together = self._open_train_state(name, node)
        else:
            leaves, put_together = flatten_node(node)
        is_variable = is_nnx_node(node)
        for leaf, value, is_param in leaves:
            self._add_leaf(start + leaf, value, is_param, is_variable)
        return lambda values: put_together({leaf: values[start + leaf] for leaf, *_ in leaves})

    def _open_train_state(self, name: str, state: Any) -> tuple[list[NamedLeaf], Rebuild]:
        (self.train_states if _has_optimizer(state) else self.inference_states).append(name)
        flat = flatten(state.state_dict())
        leaves = [(leaf, value, is_parameter_name(leaf)) for leaf, value in flat.items()]
        return leaves, lambda values: _in_structure_of(state, state.restore_state(unflatten(values)))

    def _add_dict(self, name: str, node: dict[Any, Any]) -> Rebuild:
        """Adds a dict's leaves in its own order."""
        start = f"{name}/" if name else ""
        rebuilds = {key: self.add_node(f"{start}{key}", child) for key, child in node.items() if child is not None}
        return lambda values: {key: rebuilds[key](values) if key in rebuilds else None for key in node}

    def _add_leaf(self, name: str, leaf: Any, is_param: bool, is_variable: bool = False) -> None:
        if name in self.leaves:
            fix = Fix.by_target("rename one of the target's keys")
            self.problems.append(Problem("duplicate", name, "two leaves of the target have this name", fix))
            return
        # Descriptions do not depend on the name, and most leaves are like another one.
        kind = (leaf, is_param, is_variable) if type(leaf) is jax.ShapeDtypeStruct else None
        try:
            described = None if kind is None else self._described.get(kind)
        except (TypeError, ValueError):  # its sharding is a PartitionSpec that does not fit the mesh in use
            described = kind = None
        if described is None:
            described = describe_leaf(name, leaf, is_param=is_param, is_variable=is_variable)
            if isinstance(described, Problem):
                self.problems.append(described)
                return
            if kind is not None:
                self._described[kind] = described
        self.leaves[name] = described
        self.original[name] = leaf


def _open_pytree(node: Any, start: str) -> tuple[list[str], list[Any], Any]:
    """Returns names that begin with `start`, leaves and structure."""
    if (names := names_in_dicts(node, start)) is not None:
        return names, *jax.tree_util.tree_flatten(node)
    try:
        paths, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=names_itself)
    except ValueError:
        # JAX sorts the keys of a dict, and refuses keys of several types.
        paths, treedef = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda x: names_itself(x) or _is_unsortable(x)
        )
    names = [start + leaf_name(path) if path else start.removesuffix("/") for path, _ in paths]
    return names, [leaf for _, leaf in paths], treedef


def _is_unsortable(node: Any) -> bool:
    if type(node) is not dict:
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False
