"""Restores by Orbax itself.

Whole items without a target, and leaves of types that only a type handler knows. The handler that saves does it, with
all its options. Stock `PyTreeRestore` would warn that it must look up the shardings in the item, and `StandardRestore`
makes a handler that knows no other type handlers than Orbax's; so the shardings are looked up here first. No array is
read but those that are restored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.handlers.type_handlers.numpy_or_lazy import stock_handler
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.readers.orbax.steps import MSGPACK_FILE
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.targets import describe_leaf, require_finite
from orbax_t5x.trees.pytree_names import leaf_name

_JAX_ARRAY = "jax.Array"
# What Orbax records for the types that it knows by itself. It records all else by the name that a user's type handler
# gives, and only that handler knows what to restore.
_STANDARD_TYPES = (_JAX_ARRAY, "np.ndarray", "scalar", "string")
_PLACEHOLDER = "placeholder"
_PASS_TARGET = Fix.by_target("pass a target with shardings on the devices here")


def read_metadata(directory: epath.Path) -> Mapping[str, Any]:
    """Reads an item's metadata file.

    Items of early versions have no such file: an empty mapping.
    """
    file = directory / METADATA_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def restore_whole(handler: ocp.PyTreeCheckpointHandler, directory: epath.Path, metadata: Mapping[str, Any]) -> Any:
    """Restores an item as saved, onto its original devices.

    These must be here.
    """
    types = value_types(metadata)
    # Values in a msgpack file, and placeholders, have no metadata that Orbax could give.
    if not metadata or (directory / MSGPACK_FILE).exists() or _PLACEHOLDER in types.values():
        arrays = [name for name, of_type in types.items() if of_type == _JAX_ARRAY]
        try:
            return handler.restore(directory, args=ocp.args.PyTreeRestore())
        except ValueError as error:
            if not arrays:
                raise
            message = (
                f"without a target Orbax restores it only by a recorded sharding onto devices that are here: {error}"
            )
            raise RestorePlanError(
                [Problem("sharding", name, message, _PASS_TARGET) for name in arrays], path=directory
            ) from error
    tree = handler.metadata(directory).tree
    problems: list[Problem] = []

    def restore_args(path: Any, leaf: Any) -> Any:
        name = leaf_name(path)
        return _restore_args(name, leaf, types.get(name), problems)

    tree_args = jax.tree_util.tree_map_with_path(restore_args, tree)
    if problems:
        raise RestorePlanError(problems, path=directory)
    return handler.restore(directory, args=ocp.args.PyTreeRestore(restore_args=tree_args))


def value_types(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the recorded type of each leaf by name."""
    return {
        "/".join(key["key"] for key in entry["key_metadata"]): entry["value_metadata"]["value_type"]
        for entry in metadata.get("tree_metadata", {}).values()
    }


def _restore_args(name: str, leaf: Any, value_type: str | None, problems: list[Problem]) -> Any:
    if value_type not in _STANDARD_TYPES:
        return ocp.RestoreArgs()
    sharding = None
    recorded = leaf.sharding if isinstance(leaf, ocp.metadata.ArrayMetadata) else None
    if recorded is not None:
        try:
            sharding = recorded.to_jax_sharding()
        except ValueError as error:
            message = f"it was saved from devices that are not here: {error}"
            problems.append(Problem("sharding", name, message, _PASS_TARGET))
    return ocp.checkpoint_utils.construct_restore_args(leaf, sharding)


class HandledLeaves:
    """Leaves of a target that type handlers restore.

    They are of other types than arrays, or stored by a user's handler. The others are restored by a plan, which reads
    what is stored as it is. `target` has a placeholder for each.
    """

    def __init__(self, target: Any, registry: Any, own_types: Mapping[str, str]):
        """Finds the leaves by type handlers and recorded types."""
        self.target = target
        self._own_types = own_types
        self._leaves: dict[int, tuple[str, Any]] = {}
        if registry is None:
            return
        require_finite(target)
        try:
            paths, treedef = jax.tree_util.tree_flatten_with_path(target)
        except ValueError:  # keys that JAX cannot sort: Orbax takes no such tree
            return
        for index, (path, leaf) in enumerate(paths):
            name = leaf_name(path)
            stored_so = name in own_types and leaf is not ocp.PLACEHOLDER
            if stored_so or (isinstance(describe_leaf(name, leaf), Problem) and registry.has(type(leaf))):
                self._leaves[index] = name, leaf
        if self._leaves:
            kept = [ocp.PLACEHOLDER if index in self._leaves else leaf for index, (_, leaf) in enumerate(paths)]
            self.target = jax.tree_util.tree_unflatten(treedef, kept)

    def restore(self, handler: ocp.PyTreeCheckpointHandler, directory: epath.Path) -> dict[int, Any]:
        """Restores these leaves of an item by target index.

        It restores nothing else of it.
        """
        if not self._leaves:
            return {}
        wanted = dict(self._leaves.values())
        missing = sorted(wanted.keys() - value_types(read_metadata(directory)).keys())
        if missing:
            message = "the checkpoint has no such leaf, and a type handler restores leaves under their own names"
            raise RestorePlanError([Problem("missing", name, message) for name in missing], path=directory)
        stored, treedef = jax.tree_util.tree_flatten_with_path(handler.metadata(directory).tree)
        names = [leaf_name(path) for path, _ in stored]
        item = [leaf if name in wanted else ocp.PLACEHOLDER for name, (_, leaf) in zip(names, stored, strict=True)]
        args = [_args_for(wanted[name]) if name in wanted else ocp.RestoreArgs() for name in names]
        tree, tree_args = jax.tree_util.tree_unflatten(treedef, item), jax.tree_util.tree_unflatten(treedef, args)
        restored = handler.restore(directory, args=ocp.args.PyTreeRestore(item=tree, restore_args=tree_args))
        # A restored leaf may be a pytree itself.
        values = dict(zip(names, treedef.flatten_up_to(restored), strict=True))
        return {index: values[name] for index, (name, _) in self._leaves.items()}

    def check_plan(self, plan: RestorePlan, directory: epath.Path) -> None:
        """Refuses a plan that reads users' leaves as arrays.

        A user's handler stored them; raises RestorePlanError.
        """
        problems = [
            Problem(
                "target",
                entry.name,
                f"{name!r} is stored by the type handler for {self._own_types[name]!r}, and only that can restore it",
                Fix.by_target("keep its name in the target, and leave out the transforms that change it"),
            )
            for entry in plan.entries
            for name in entry.sources
            if name in self._own_types
        ]
        if problems:
            raise RestorePlanError(problems, path=directory)

    def put_into(self, restored: Any, values: Mapping[int, Any]) -> Any:
        """Puts the values into the placeholders of the target.

        By index, after the restore.
        """
        if not values:
            return restored
        leaves, treedef = jax.tree_util.tree_flatten(restored)
        return jax.tree_util.tree_unflatten(treedef, [values.get(index, leaf) for index, leaf in enumerate(leaves)])


def types_of_users(types: Mapping[str, str], registry: Any) -> dict[str, str]:
    """Selects the recorded types that users' own handlers take.

    The handlers are in a user's table, and not Orbax's.
    """
    return {name: recorded for name, recorded in types.items() if _is_of_user(recorded, registry)}


def _is_of_user(recorded: str, registry: Any) -> bool:
    return registry.has(recorded) and not type(stock_handler(registry.get(recorded))).__module__.startswith("orbax.")


def _args_for(leaf: Any) -> Any:
    """Returns Orbax's arguments for restoring a leaf.

    The recorded type decides if the target's leaf is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray | bool | int | float | str):
        return ocp.checkpoint_utils.construct_restore_args(leaf)
    return ocp.RestoreArgs()
