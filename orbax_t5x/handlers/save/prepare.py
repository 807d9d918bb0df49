"""Prepares a tree for Orbax: names, dtypes, and early errors.

Everything that cannot be stored is an error beforehand. Orbax notices only while it writes that it cannot store a leaf,
and lets a leaf overwrite another one if their dots and slashes join to the same name. Here every leaf is checked first,
and all problems are raised together. Nothing is computed: views are written chunk by chunk, also those of arrays in
memory.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.errors import Fix, Problem, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.save.key_checks import check_names
from orbax_t5x.handlers.type_handlers.checksums import SaveSums
from orbax_t5x.handlers.type_handlers.lazy_array import StreamedLeaf
from orbax_t5x.handlers.type_handlers.snapshot_leaf import snapshot_values, spans_processes
from orbax_t5x.handlers.type_handlers.stream import ChunkWriter
from orbax_t5x.handlers.type_handlers.unsupported import check_leaves, is_storable
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.lazy.chunks import ChunkPreferences
from orbax_t5x.provenance import records as provenance
from orbax_t5x.restoring.sources import saved_chain
from orbax_t5x.restoring.targets import flatten_target, is_parameter_name, require_finite
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.dtype_names import as_dtype
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.dtypes import kind_of
from orbax_t5x.trees.flat import unflatten, unwrapped
from orbax_t5x.trees.named_leaves import is_train_state
from orbax_t5x.trees.pytree_names import leaf_name

# More names than this in one error hide the first.
_SHOWN_NAMES = 10


def save_options(given: Any, names: Sequence[str], casts: Mapping[str, np.dtype]) -> list[ocp.SaveArgs]:
    """Returns the options of each saved leaf.

    `casts` are for leaves that `given` gives no dtype.
    """
    by_name = _by_name(given, names)
    # Orbax takes only an `np.dtype`.
    dtypes = {name: np.dtype(option.dtype) for name, option in by_name.items() if option.dtype is not None}
    problems = [
        Problem("dtype", name, f"{dtype.name} is not a dtype that Orbax stores")
        for name, dtype in dtypes.items()
        if not is_storable(dtype)
    ]
    if problems:
        raise RestorePlanError(problems)
    dtypes = {**casts, **dtypes}
    without = functools.cache(lambda dtype: ocp.SaveArgs(dtype=dtype))  # nearly all leaves have the same
    return [
        dataclasses.replace(by_name[name], dtype=dtypes.get(name)) if name in by_name else without(dtypes.get(name))
        for name in names
    ]


def _by_name(given: Any, names: Sequence[str]) -> dict[str, ocp.SaveArgs]:
    tree = given.state_dict() if is_train_state(given) else given
    options = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    for name, option in options.items():
        if not isinstance(option, ocp.SaveArgs):
            raise ValueError(f"save_args has a {type(option).__name__} at {name!r}; pass ocp.SaveArgs(…) or None there")
    unknown = sorted(options.keys() - set(names))
    if unknown:
        shown = listed([repr(name) for name in unknown], _SHOWN_NAMES)
        raise ValueError(f"save_args has {shown}, and the tree that is saved has no such leaf")
    return options


_SKIPPED = object()


@dataclasses.dataclass(frozen=True)
class PreparedSave:
    """Tree of Orbax's types and streamed leaves.

    `writer` writes the streamed leaves.
    """

    tree: Any
    save_args: Any
    custom_metadata: dict[str, Any] | None
    writer: ChunkWriter
    lineage: Sequence[Mapping[str, Any]]


def prepare_save(
    args: TrainStateSave,
    records: Sequence[Mapping[str, Any]],
    registry: Any,
    *,
    deferred: bool,
    sums: SaveSums | None = None,
    processes: Collection[int] | None = None,
    in_directories: bool = False,
) -> PreparedSave:
    """Checks a tree and prepares it for Orbax; writes nothing.

    Raises an UnsupportedCheckpointError for leaves that Orbax cannot store, and a RestorePlanError for transforms that
    do not fit, a `dtype` that applies to nothing, or names with which the tree could not be opened.
    """
    if args.on_unsupported not in ("error", "skip"):
        raise ValueError(f"on_unsupported must be 'error' or 'skip', not {args.on_unsupported!r}")
    require_finite(args.item)
    require_finite(args.custom_metadata)
    tree, nnx_parameters = _named_tree(args)
    writer = ChunkWriter(args.memory_limit_bytes, args.progress, deferred=deferred, sums=sums, processes=processes)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [leaf_name(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    skipped = check_leaves(names, leaves, registry, skip=args.on_unsupported == "skip")
    check_names(tree, skipped, in_directories=in_directories)
    options = save_options(args.save_args, names, _written_dtypes(args.dtype, nnx_parameters, names, leaves))
    ready = [
        _SKIPPED if name in skipped else _savable(leaf, name, option, writer)
        for name, leaf, option in zip(names, leaves, options, strict=True)
    ]
    if any(isinstance(leaf, StreamedLeaf) for leaf in ready):
        writer.check_processes()
    # A streamed leaf is cast already.
    save_args = [
        dataclasses.replace(option, dtype=None) if isinstance(leaf, StreamedLeaf) else option
        for leaf, option in zip(ready, options, strict=True)
    ]
    metadata = {**(args.custom_metadata or {}), **provenance.to_metadata([dict(record) for record in records], skipped)}
    tree, options = _put_together(treedef, ready, ready), _put_together(treedef, save_args, ready)
    return PreparedSave(tree, options, metadata or None, writer, records)


def _named_tree(args: TrainStateSave) -> tuple[Any, Collection[str]]:
    """Returns the tree to save and its names.

    Of a T5X state it is the transformed state dict; names are of or from an `nnx.Param`.
    """
    item = args.item
    transforms = saved_chain(args.transforms)
    if not transforms:
        tree = item.state_dict() if is_train_state(item) else item
        return tree, () if args.dtype is None else _nnx_parameters(tree)
    flattened = flatten_target(item)
    diagnostics = Diagnostics(problems=list(flattened.problems))
    flat = run_transforms(transforms, flattened.original, {}, is_resuming=False, diagnostics=diagnostics)
    if diagnostics.problems:
        raise diagnostics.error()
    parameters = {name for name, leaf in flattened.leaves.items() if leaf.is_param and leaf.is_variable}
    return unwrapped(unflatten(flat)), {name for name in flat if diagnostics.origin_of.get(name, name) in parameters}


# -- dtypes


def _written_dtypes(
    dtype: Any, nnx_parameters: Collection[str], names: Sequence[str], leaves: Sequence[Any]
) -> dict[str, np.dtype]:
    """Returns the dtypes of floating-point parameters to cast."""
    if dtype is None:
        return {}
    wanted = as_dtype(dtype)
    if kind_of(wanted) != "float" or not is_storable(wanted):
        raise RestorePlanError([Problem("dtype", None, f"{wanted.name} is no floating-point type that Orbax stores")])
    parameters = {
        name: leaf
        for name, leaf in zip(names, leaves, strict=True)
        if (is_parameter_name(name) or name in nnx_parameters) and _is_float(leaf)
    }
    if not parameters:
        raise RestorePlanError(
            [
                Problem(
                    "dtype",
                    None,
                    f"dtype={wanted.name} applies to floating-point model parameters (under target/ or params/, or "
                    "nnx.Param), and there are none in this tree",
                    Fix.in_program("use transforms=[ot.transforms.Cast(pattern, dtype)]"),
                )
            ]
        )
    return {name: wanted for name, leaf in parameters.items() if leaf.dtype != wanted}


def _is_float(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return False
    return kind_of(np.dtype(dtype)) == "float"


def _nnx_parameters(tree: Any) -> set[str]:
    """Lists the names of leaves inside `nnx.Param`s.

    Flax NNX is never imported for anyone who has not done so.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    found: set[str] = set()
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for path, node in nodes:
        if isinstance(node, nnx.Param):
            below, _ = jax.tree_util.tree_flatten_with_path(node)
            found.update(leaf_name((*path, *rest)) for rest, _ in below)
    return found


# -- putting the tree together


def _savable(leaf: Any, name: str, option: ocp.SaveArgs, writer: ChunkWriter) -> Any:
    """Converts a leaf for Orbax or our streaming handler."""
    if not isinstance(leaf, LazyArray):
        return leaf
    view = as_view(leaf, name=name)
    if view.leaf is not None and view.is_value:
        value = view.value
        return value if isinstance(value, jax.Array) else np.asarray(value)
    if spans_processes(view):
        raise UnsupportedCheckpointError(
            "is computed from an array that spans processes; apply the transform under jax.jit before saving", leaf=name
        )
    if view.is_value and jax.process_count() > 1:
        # What is in memory may differ between processes, and then the primary one's counts.
        return np.asarray(view.value)
    if not writer.deferred:
        snapshot_values(view, writer.snapshots)
    wishes = ChunkPreferences(option.chunk_byte_size, tuple(option.shard_axes))
    return StreamedLeaf(view if option.dtype is None else view.astype(option.dtype), name, writer, wishes)


def _put_together(treedef: Any, leaves: Sequence[Any], ready: Sequence[Any]) -> Any:
    """Builds the tree of `leaves` without skipped leaves.

    They are None below anything but plain dicts.
    """
    is_skipped = [leaf is _SKIPPED for leaf in ready]
    if not any(is_skipped):
        return jax.tree_util.tree_unflatten(treedef, leaves)
    kept = [None if skipped else leaf for leaf, skipped in zip(leaves, is_skipped, strict=True)]
    return _without_skipped(
        jax.tree_util.tree_unflatten(treedef, kept), jax.tree_util.tree_unflatten(treedef, is_skipped)
    )


def _without_skipped(tree: Any, is_skipped: Any) -> Any:
    if type(tree) is not dict:
        return tree
    return {key: _without_skipped(value, is_skipped[key]) for key, value in tree.items() if is_skipped[key] is not True}
