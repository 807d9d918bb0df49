"""Mesh TensorFlow T5 bundles as T5X state dicts: T5X's importer, without TensorFlow.

The lazy arrays are those of `orbax_t5x.lazy`, the rules those of `orbax_t5x.mesh_tf.rules`, and what is done with names
that of `transforms.Translate`; here they only have T5X's names. Opening reads the bundle's index. Arrays are read at
the end, each once, after all names and shapes have been checked, or not at all (`lazy_parameters`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import LeafMismatchError, Problem, RestorePlanError
from orbax_t5x.lazy import (
    LazyArray,
    LazyAwaitableArray,
    LazyThreadPoolArray,
    View,
    as_view,
    full_box,
    read_views,
)
from orbax_t5x.mesh_tf.rules import (
    attention_layers,
    final_layernorms,
    final_logits,
    global_step,
    layernorms,
    mlpblock,
    rel_embeddings,
    separate_embeddings,
    shared_embeddings,
    t5_importer,
)
from orbax_t5x.mesh_tf.translator import CheckpointTranslator
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.translate import Translate
from orbax_t5x.trees.flat import flatten, unflatten

__all__ = [
    "CheckpointTranslator",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "attention_layers",
    "final_layernorms",
    "final_logits",
    "global_step",
    "layernorms",
    "load_tf_ckpt",
    "mlpblock",
    "rel_embeddings",
    "restore_from_t5_checkpoint",
    "separate_embeddings",
    "shared_embeddings",
    "t5_importer",
]

_logger = logging.getLogger(__name__)

_SLOTS = "state/param_states/"
# Names shown of a list that may hold every leaf of a model.
_SHOWN_NAMES = 10


def load_tf_ckpt(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """The variables of a TensorFlow V2 checkpoint by name; only its index is read.

    Files stay open for as long as one of the arrays is there.

    Args:
      path: the prefix (`…/model.ckpt-1000000`), its `.index` file, or the directory whose `checkpoint` file names it.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    return dict(open_tf_bundle(path).leaves)


def restore_from_t5_checkpoint(
    state_dict: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    lazy_parameters: bool = False,
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
) -> dict[str, Any]:
    """A T5X state dict with the values of a Mesh TensorFlow T5 checkpoint, in its dtypes.

    Relative biases are shared or per layer as the state names them, and Adafactor's placeholders are added where the
    state has them. A state without Adafactor's slots (an `InferenceState`'s) leaves those of the file unread.

    Args:
      state_dict: what a T5X train state's `state_dict()` gives; leaves have shapes, their values are not used. None, or
        an empty one, for everything the file has.
      path: as for `load_tf_ckpt`.
      lazy_parameters: leave `LazyArray`s in place of arrays.
      strict: whether names that the file has and the state lacks are an error; they are dropped otherwise.
      translator: other rules than T5's.

    Returns:
      Nested dicts with sorted keys and NumPy arrays (NumPy scalars for rank 0), or lazy arrays.

    Raises:
      RestorePlanError: names that no rule knows, that the state has and the file lacks, or, with `strict`, the reverse.
      LeafMismatchError: shapes differ.
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    target = flatten(state_dict or {})
    diagnostics = Diagnostics()
    values = Translate(translator).apply(load_tf_ckpt(path), target, diagnostics)
    if diagnostics.problems:
        raise RestorePlanError(diagnostics.problems, path=path)
    for warning in diagnostics.warnings:
        _logger.warning("%s", warning)
    if target:
        values = _fit(values, target, strict, path)
    else:
        _raise_broken(values)
    names = sorted(values, key=lambda name: name.split("/"))
    lazy = {name: None if values[name] is None else _as_lazy(values[name]) for name in names}
    return unflatten(lazy if lazy_parameters else _read(lazy))


def _fit(
    values: Mapping[str, Any], target: Mapping[str, Any], strict: bool, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """The values that the target names; None stays None."""
    wanted = {name for name, leaf in target.items() if leaf is not None}
    missing = sorted(wanted - values.keys())
    extra = sorted(values.keys() - target.keys())
    if not any(name.startswith(_SLOTS) and name in target for name in values):
        extra = [name for name in extra if not name.startswith(_SLOTS)]
    problems = []
    if missing:
        problems.append(Problem("missing", None, f"the state has {_names_text(missing)}, which the checkpoint lacks"))
    if extra and strict:
        problems.append(
            Problem(
                "leftover",
                None,
                f"the checkpoint has {_names_text(extra)}, which the state lacks",
                "pass strict=False to leave them out",
            )
        )
    if problems:
        raise RestorePlanError(problems, path=path)
    if extra:
        _logger.info("left out, because the state lacks them: %s", ", ".join(extra))
    _raise_broken({name: values[name] for name in wanted})
    shapes = [(name, tuple(values[name].shape), _shape(target[name])) for name in sorted(wanted)]
    wrong = [(name, found, shape) for name, found, shape in shapes if shape is not None and found != shape]
    if wrong:
        texts = [f"{name!r} has shape {found}, the state's is {shape}" for name, found, shape in wrong]
        raise LeafMismatchError(listed(texts, _SHOWN_NAMES, separator="; "), path=path, leaf=wrong[0][0])
    return {name: None if leaf is None else values[name] for name, leaf in target.items()}


def _raise_broken(values: Mapping[str, Any]) -> None:
    """What its reader could not make sense of has no shape to compare: it fails with the reader's own error."""
    for value in values.values():
        for leaf in value.leaves() if isinstance(value, View) else ():
            leaf.raise_error()


def _names_text(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'name')}: {listed(map(repr, names), _SHOWN_NAMES)}"


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape that a leaf of the state asks for; None where it asks for none."""
    return None if leaf is ... else tuple(np.shape(leaf))


def _as_lazy(value: Any) -> LazyArray:
    return value if isinstance(value, LazyArray) else as_view(value)


def _read(lazy: Mapping[str, LazyArray | None]) -> dict[str, Any]:
    """All arrays at once, so that each stored byte is read once and reads overlap."""
    views = {name: view for name, view in lazy.items() if isinstance(view, View)}
    buffers = {name: np.empty(view.shape, view.dtype) for name, view in views.items()}
    read_views((view, full_box(view.shape), buffers[name]) for name, view in views.items())
    arrays: dict[str, Any] = {}
    for name, array in lazy.items():
        value = buffers[name] if name in buffers else None if array is None else array.get()
        # A NumPy scalar for rank 0, as TensorFlow's reader gives the step.
        arrays[name] = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    return arrays
