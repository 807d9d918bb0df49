"""T5X's importer of Mesh TensorFlow T5 bundles, without TensorFlow.

The lazy arrays are those of `orbax_t5x.lazy`, the rules those of `orbax_t5x.mesh_tf.rules`, and what is done with names
that of `transforms.Translate`, and names and shapes are checked by the plan of any restore; here they only have T5X's
names. Opening reads the bundle's index. Arrays are read at the end, each once, after all names and shapes have been
checked, or not at all (`lazy_parameters`).

Example:
  >>> state = ot.checkpoint_importer.load_tf_ckpt(bundle)
  >>> state["shared/embedding"]
  View(shape=(128, 16), dtype=float32, of='shared/embedding')
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import CheckpointError, Fix, LeafMismatchError, Problem, RestorePlanError
from orbax_t5x.lazy import LazyArray, LazyAwaitableArray, LazyThreadPoolArray, View, as_view, full_box, read_views
from orbax_t5x.mesh_tf.rules import (
    SLOT_MAP,
    TOWER_MAP,
    adafactor_placeholders,
    attention_layers,
    final_layernorms,
    final_logits,
    global_step,
    layernorms,
    mlpblock,
    place_relative_bias,
    rel_embeddings,
    separate_embeddings,
    shared_embeddings,
    t5_importer,
)
from orbax_t5x.mesh_tf.translator import CheckpointTranslator
from orbax_t5x.provenance.decision import Decision
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.planner import build_plan, plan_inputs
from orbax_t5x.restoring.sources import OpenSources
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.names import Drop
from orbax_t5x.transforms.translate import Translate
from orbax_t5x.trees.flat import FlatState, flatten, unflatten

__all__ = [
    "SLOT_MAP",
    "TOWER_MAP",
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
_PARAMETERS = "target/"
_STEP = "state/step"
# Names shown of a list that may hold every leaf of a model.
_SHOWN_NAMES = 10


def load_tf_ckpt(path: str | os.PathLike[str]) -> dict[str, View]:
    """Opens the variables of a TensorFlow V2 checkpoint, by name.

    Only its index is read. Files stay open for as long as one of the arrays is there.

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
    """Fills a T5X state dict from a Mesh TensorFlow checkpoint.

    The dtypes are the checkpoint's. Relative biases are shared or per layer as the state names them, and Adafactor's
    placeholders are added where the state has them. A state without Adafactor's slots (an `InferenceState`'s) leaves
    those of the file unread.

    Args:
      state_dict: what a T5X train state's `state_dict()` gives; leaves have shapes, their values are not used. None, or
        an empty one, for everything the file has.
      path: as for `load_tf_ckpt`.
      lazy_parameters: leave `LazyArray`s in place of arrays; the step is read all the same.
      strict: whether names that the file has and the state lacks are an error; they are dropped otherwise.
      translator: other rules than T5's.

    Returns:
      Nested dicts with sorted keys and NumPy arrays (NumPy scalars for rank 0), or lazy arrays.

    Raises:
      RestorePlanError: names that no rule knows, that the state has and the file lacks, or, with `strict`, the reverse;
        together with all else that is wrong.
      LeafMismatchError: nothing but shapes differ.
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    state = flatten(state_dict or {})
    checkpoint = open_tf_bundle(path)
    # The state's dtypes do not count, and a target has dtypes: so the names are translated once to learn the file's.
    translated = Translate(translator).apply(checkpoint.leaves, state, Diagnostics()) if state else {}
    transforms: list[Transform] = [Translate(translator)]
    slots = {name for name in translated if name.startswith(_SLOTS)}
    if slots and slots.isdisjoint(state):
        transforms.append(Drop((f"{_SLOTS}.*",)))
    try:
        target = _target(state, translated) if state else None
        # No proposals: callers of this module cannot pass transforms.
        inputs = plan_inputs(OpenSources({"": checkpoint}), target, transforms, RestoreOptions(strict=strict))
        plan = build_plan(inputs, Decision(), proposes=False)
    except RestorePlanError as error:
        raise _in_words_of_a_state(error, state, translated, path) from None
    for warning in plan.warnings:
        _logger.warning("%s", warning)
    if plan.unused:
        _logger.info("left out, because the state lacks them: %s", ", ".join(plan.unused))
    views = {entry.name: entry.view for entry in plan.entries}
    read_now = {_STEP} & views.keys() if lazy_parameters else views.keys()
    values = {**views, **_read({name: views[name] for name in read_now})}
    restored = flatten(plan.target.rebuild(values))
    return unflatten({name: restored[name] for name in sorted(restored, key=lambda name: name.split("/"))})


def _target(state: FlatState, translated: FlatState) -> dict[str, Any]:
    """Makes the plan's target: names, shapes and the file's dtypes.

    It has `...` for a None of the state.
    """
    target: dict[str, Any] = {}
    for name, leaf in state.items():
        if leaf is None:
            target[name] = ...
            continue
        value = translated.get(name)
        view = None if value is None else as_view(value)
        shape = view.shape if view is not None and leaf is ... else np.shape(leaf)
        # An array of any shape that takes no memory.
        target[name] = np.broadcast_to(np.zeros((), np.float32 if view is None else view.dtype), shape)
    return target


def _in_words_of_a_state(
    error: RestorePlanError, state: FlatState, translated: FlatState, path: str | os.PathLike[str]
) -> CheckpointError:
    """Rewords the plan's problems for callers of this module.

    They give a state and `strict`, and no rules.
    """
    missing = [name for name, leaf in state.items() if leaf is not None and translated.get(name) is None]
    extra = sorted(translated.keys() - state.keys())
    problems: list[Problem] = []
    if missing:
        problems.append(Problem("missing", None, f"the state has {_names_text(missing)}, which the checkpoint lacks"))
    shapes: list[Problem] = []
    for problem in error.problems:
        if problem.kind == "leftover":
            message = f"the checkpoint has {_names_text(extra)}, which the state lacks"
            problems.append(Problem("leftover", None, message, Fix.setting("pass {} to leave them out", strict=False)))
        elif problem.kind == "shape" and problem.leaf is not None:
            found, wanted = as_view(translated[problem.leaf]).shape, tuple(np.shape(state[problem.leaf]))
            shapes.append(Problem("shape", problem.leaf, f"has shape {found}, the state's is {wanted}"))
        elif problem.kind != "missing":
            problems.append(problem)
    if problems:
        return RestorePlanError([*problems, *shapes], path=path)
    text = listed([f"{problem.leaf!r} {problem.message}" for problem in shapes], _SHOWN_NAMES, separator="; ")
    return LeafMismatchError(text, path=path, leaf=shapes[0].leaf)


def _maybe_correct_relpos_bias(t5_data: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the tower the relative bias of block 0.

    Under T5X's name.
    """
    renamed = place_relative_bias(t5_data, ())
    return {renamed.get(name, name): value for name, value in t5_data.items()}


def _add_missing_param_states(t5_data: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the (1,) zeros of unused slots and momenta.

    A momentum gets them even without slots. Under T5X's name.
    """
    momenta = [f"{_SLOTS}{name.removeprefix(_PARAMETERS)}/m" for name in t5_data if name.startswith(_PARAMETERS)]
    zeros = {name: np.zeros((1,), np.float32) for name in momenta}
    return {**zeros, **adafactor_placeholders(t5_data, None), **t5_data}


def _update_state_dict(
    state_dict: Mapping[str, Any], t5_data: Mapping[str, Any], strict: bool = True
) -> dict[str, Any]:
    """Puts translated values into the structure of a state dict.

    The values may be lazy. Under T5X's name.

    Raises:
      ValueError: names of the state dict are missing, with `strict` others are there, or shapes differ.
    """
    state = flatten(state_dict)
    missing, extra = sorted(state.keys() - t5_data.keys()), sorted(t5_data.keys() - state.keys())
    if missing:
        raise ValueError(f"the state has {_names_text(missing)}, which the checkpoint lacks")
    if extra and strict:
        raise ValueError(f"the checkpoint has {_names_text(extra)}, which the state lacks")
    for name, leaf in state.items():
        found, wanted = np.shape(t5_data[name]), np.shape(leaf)
        if found != wanted:
            raise LeafMismatchError(f"has shape {found}, the state's is {wanted}", leaf=name)
    return unflatten({name: t5_data[name] for name in state})


def _names_text(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'name')}: {listed(map(repr, names), _SHOWN_NAMES)}"


def _read(views: Mapping[str, View | None]) -> dict[str, Any]:
    """Reads all arrays together, each stored byte once.

    Rank 0 gives NumPy scalars, as TensorFlow's reader gives the step. Not by executing the plan, which waits for the
    other processes of a job: T5X's function does not.
    """
    wanted = {name: view for name, view in views.items() if view is not None}
    buffers = {name: view.allocate() for name, view in wanted.items()}
    read_views((view, full_box(view.shape), buffers[name]) for name, view in wanted.items())
    arrays = {name: buffer if buffer.ndim else buffer[()] for name, buffer in buffers.items()}
    return {name: arrays.get(name) for name in views}
