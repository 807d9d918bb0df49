"""From what a caller wants saved to what Orbax is given: names, dtypes, and all that cannot be stored, beforehand.

Orbax finds out while it writes that it cannot store a leaf, and lets one leaf overwrite another whose dots and
slashes join to the same name. Here every leaf is looked at first, all problems are raised together, and what is
given to Orbax can be written. No array is copied, except a computed view of arrays in memory: the caller may
overwrite those as soon as an asynchronous save returns.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_t5x import provenance
from orbax_t5x._dtypes import kind_of
from orbax_t5x.errors import Problem, RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.handlers._stream import ChunkWriter
from orbax_t5x.handlers.args import TrainStateSave
from orbax_t5x.handlers.type_handlers import StreamedLeaf
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.targets import flatten_target, is_train_state, leaf_name
from orbax_t5x.transforms import Notes, run_transforms, unflatten

# More names than this in one error hide the first.
_SHOWN_LEAVES = 10
_MODEL_PARAMETERS = ("target", "params")
_SKIPPED = object()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A tree that Orbax can write.

    Attributes:
      tree: its leaves are Orbax's own types, or streamed leaves.
      save_args: a tree of `ocp.SaveArgs` like it.
      custom_metadata: what goes into the item's metadata, or None.
      writer: writes the streamed leaves.
    """

    tree: Any
    save_args: Any
    custom_metadata: dict[str, Any] | None
    writer: ChunkWriter


def prepare(args: TrainStateSave, records: Sequence[Mapping[str, Any]], registry: Any, *, deferred: bool) -> Prepared:
    """Checks what is to be saved and makes it ready for Orbax; writes nothing.

    Args:
      args: of the save.
      records: the provenance to write.
      registry: the type handlers that will write.
      deferred: whether streamed leaves wait for `ChunkWriter.run_deferred`.

    Raises:
      UnsupportedCheckpointError: leaves that Orbax cannot store, by name.
      RestorePlanError: transforms that do not fit, or a `dtype` that applies to nothing.
    """
    if args.on_unsupported not in ("error", "skip"):
        raise ValueError(f"on_unsupported must be 'error' or 'skip', not {args.on_unsupported!r}")
    tree = _named_tree(args)
    writer = ChunkWriter(args.memory_limit_bytes, args.progress, deferred=deferred)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [leaf_name(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    skipped = _check(names, leaves, registry, skip=args.on_unsupported == "skip")
    _check_names(paths, skipped)
    cast = _casts(args.dtype, tree, names, leaves)
    ready = [
        _SKIPPED if name in skipped else _ready(leaf, name, cast.get(name), writer)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    save_args = [ocp.SaveArgs(dtype=_orbax_cast(leaf, cast.get(name))) for name, leaf in zip(names, ready, strict=True)]
    metadata = {**(args.custom_metadata or {}), **provenance.to_metadata([dict(record) for record in records], skipped)}
    return Prepared(
        _put_together(treedef, ready, ready),
        _put_together(treedef, save_args, ready),
        metadata or None,
        writer,
    )


def _named_tree(args: TrainStateSave) -> Any:
    """The tree to save: the item, a T5X train state's state dict, or what transforms make of either."""
    item = args.item
    transforms = (args.transforms,) if callable(args.transforms) else tuple(args.transforms or ())
    if not transforms:
        return item.state_dict() if is_train_state(item) else item
    flattened = flatten_target(item)
    notes = Notes(problems=list(flattened.problems))
    flat = run_transforms(transforms, flattened.original, {}, is_resuming=False, notes=notes)
    if notes.problems:
        raise RestorePlanError(notes.problems)
    return unflatten(flat)


# -- what cannot be stored


def _check(names: Sequence[str], leaves: Sequence[Any], registry: Any, *, skip: bool) -> dict[str, tuple[Any, str]]:
    """The leaves to leave out, with shape and dtype; all of them together are one error unless they may be skipped."""
    reasons: dict[str, str] = {}
    skipped: dict[str, tuple[Any, str]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        reason = _why_not(leaf, registry)
        if reason is None:
            continue
        reasons[name] = reason
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            skipped[name] = tuple(leaf.shape), str(leaf.dtype)
        else:
            skip = False
    if not reasons or (skip and len(reasons) < len(names)):
        return skipped
    shown = "; ".join(f"{name!r} {reason}" for name, reason in list(reasons.items())[:_SHOWN_LEAVES])
    more = f"; and {len(reasons) - _SHOWN_LEAVES} more" if len(reasons) > _SHOWN_LEAVES else ""
    fix = "" if skip else '; nothing was written. Leave them out of the tree, or pass on_unsupported="skip"'
    first = next(iter(reasons))
    raise UnsupportedCheckpointError(
        f"{len(reasons)} of {len(names)} leaves cannot be stored by Orbax: {shown}{more}{fix}",
        leaf=first if len(reasons) == 1 else None,
    )


def _why_not(leaf: Any, registry: Any) -> str | None:
    """Why Orbax cannot store a leaf, or None if it can."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is abstract: it has no values"
    if leaf is Ellipsis or isinstance(leaf, str):
        return None
    if not isinstance(leaf, LazyArray) and not registry.has(type(leaf)):
        fix = ": make it an array with np.asarray" if isinstance(leaf, np.generic | complex) else ""
        return f"is a {type(leaf).__name__}, which Orbax does not store{fix}"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        if not isinstance(leaf, bool | int | float | bytes):
            return None
        shape, dtype = (), np.asarray(leaf).dtype
    if 0 in shape:
        return f"has no elements (shape {tuple(shape)})"
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or storable(np.dtype(dtype)):
        return None
    what = "holds text" if kind_of(np.dtype(dtype)) == "object" else "has a dtype that Orbax does not store"
    return f"{what} ({np.dtype(dtype).name})"


@functools.cache
def storable(dtype: np.dtype) -> bool:
    """Whether the array formats that Orbax writes have this dtype; TensorStore is asked, which writes them."""
    name = dtype.newbyteorder("=").name
    spec = {"driver": "zarr", "kvstore": "memory://", "dtype": name, "schema": {"domain": {"shape": [1]}}}
    try:
        ts.open(spec, create=True).result()
    except ValueError:
        return False
    return True


def _check_names(paths: Sequence[tuple[Any, Any]], skipped: Mapping[str, Any]) -> None:
    """Orbax joins a leaf's keys with dots: two leaves that then have one name would be written over each other."""
    stored: dict[str, str] = {}
    problems = []
    for path, _ in paths:
        name = leaf_name(path)
        if name in skipped:
            continue
        joined = ".".join(leaf_name((key,)) for key in path)
        other = stored.setdefault(joined, name)
        if other is not name:
            problems.append(
                Problem(
                    "duplicate", name, f"Orbax would store it under {joined!r}, as {other!r}", "rename one of the two"
                )
            )
    if problems:
        raise RestorePlanError(problems)


# -- dtypes


def _casts(dtype: Any, tree: Any, names: Sequence[str], leaves: Sequence[Any]) -> dict[str, np.dtype]:
    """The dtype to write for each floating-point model parameter that has another."""
    if dtype is None:
        return {}
    wanted = np.dtype(dtype)
    if kind_of(wanted) != "float" or not storable(wanted):
        raise RestorePlanError([Problem("dtype", None, f"{wanted.name} is no floating-point type that Orbax stores")])
    nnx_parameters = _nnx_parameters(tree)
    parameters = {
        name: leaf
        for name, leaf in zip(names, leaves, strict=True)
        if (name.split("/", 1)[0] in _MODEL_PARAMETERS or name in nnx_parameters) and _is_float(leaf)
    }
    if not parameters:
        raise RestorePlanError(
            [
                Problem(
                    "dtype",
                    None,
                    f"dtype={wanted.name} applies to floating-point model parameters (under target/ or params/, or "
                    "nnx.Param), and there are none in this tree",
                    "use transforms=[ot.transforms.Cast(pattern, dtype)]",
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
    """Names of the leaves inside `nnx.Param`s; Flax NNX is never imported for anyone who has not done so."""
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


def _orbax_cast(leaf: Any, dtype: np.dtype | None) -> np.dtype | None:
    """Orbax casts what it writes itself; a streamed leaf is cast already."""
    return None if isinstance(leaf, StreamedLeaf) else dtype


# -- putting the tree together


def _ready(leaf: Any, name: str, dtype: np.dtype | None, writer: ChunkWriter) -> Any:
    """A leaf as Orbax, or our handler for streamed leaves, takes it."""
    if not isinstance(leaf, LazyArray):
        return leaf
    view = as_view(leaf, name=name)
    if not view.is_value:
        return StreamedLeaf(view if dtype is None else view.astype(dtype), name, writer)
    if view.inputs and any(_spans_processes(part) for part in view.leaves()):
        raise UnsupportedCheckpointError(
            "is computed from an array that spans processes; apply the transform under jax.jit before saving", leaf=name
        )
    value = view.value
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _spans_processes(leaf: Any) -> bool:
    value = getattr(leaf, "value", None)
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def _put_together(treedef: Any, leaves: Sequence[Any], ready: Sequence[Any]) -> Any:
    """The tree of `leaves` without those that are skipped; below anything but plain dicts, None stands for them."""
    gone = [leaf is _SKIPPED for leaf in ready]
    if not any(gone):
        return jax.tree_util.tree_unflatten(treedef, leaves)
    kept = [None if skipped else leaf for leaf, skipped in zip(leaves, gone, strict=True)]
    return _without(jax.tree_util.tree_unflatten(treedef, kept), jax.tree_util.tree_unflatten(treedef, gone))


def _without(tree: Any, gone: Any) -> Any:
    if type(tree) is not dict:
        return tree
    return {key: _without(value, gone[key]) for key, value in tree.items() if gone[key] is not True}
