"""T5X's `state_utils`: functions on state dicts with T5X's answers.

The transforms of the same name share the implementation; these are for code that calls them by hand. Errors are
`ValueError`s with T5X's text, and advice in a note; where T5X's answer is an accident of Python (`re.error`, a
`TypeError` from a dict) the text names rule or names.

Example:
  >>> ot.state_utils.flatten_state_dict({"encoder": {"w": 1}})
  {'encoder/w': 1}
  >>> ot.state_utils.apply_assignment_map({"old": 1}, {"new": ...}, [("new", "old")])
  {'new': 1}
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax.traverse_util import empty_node

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.transforms.assignment_map import AssignmentMap
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.names import Intersect, Merge
from orbax_t5x.trees.flat import flatten, is_tensorstore_spec, unflatten

_logger = logging.getLogger(__name__)

__all__ = [
    "apply_assignment_map",
    "flatten_state_dict",
    "get_name_tree",
    "intersect_state",
    "merge_state",
    "tensorstore_leaf",
]


def tensorstore_leaf(_: Any, value: Any) -> bool:
    """Tests if a value is a serialized TensorStore spec.

    It is the `is_leaf` for Flax's `flatten_dict`.
    """
    return is_tensorstore_spec(value)


def flatten_state_dict(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Returns the leaves by '/'-joined name.

    A serialized TensorStore spec is a leaf.

    Args:
      state_dict: nested.
      keep_empty_nodes: whether empty mappings appear, as Flax's `empty_node`.
    """
    flat = flatten(state_dict, keep_empty_nodes)
    if keep_empty_nodes:
        return {name: empty_node if isinstance(value, Mapping) and not value else value for name, value in flat.items()}
    return flat


def get_name_tree(state_dict: Mapping[str, Any], keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Returns the tree with each leaf replaced by its name.

    Names are '/'-joined; TensorStore specs are looked into.

    Args:
      state_dict: nested.
      keep_empty_nodes: whether empty mappings count as leaves: their names are in their places. They are dropped
        otherwise.
    """
    return _name_tree(state_dict, "", keep_empty_nodes)


def _name_tree(node: Mapping[Any, Any], prefix: str, keep_empty_nodes: bool) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for key, value in node.items():
        if not isinstance(value, Mapping):
            names[key] = f"{prefix}{key}"
        elif value:
            below = _name_tree(value, f"{prefix}{key}/", keep_empty_nodes)
            if below or keep_empty_nodes:
                names[key] = below
        elif keep_empty_nodes:
            names[key] = f"{prefix}{key}"
    return names


def intersect_state(state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the leaves that the other state dict lacks.

    Each is logged as a warning.

    Args:
      state_dict: nested.
      intersect_state_dict: nested; only its names count.
    """
    flat = flatten(state_dict)
    kept = Intersect().apply(flat, flatten(intersect_state_dict), Diagnostics())
    for name in sorted(flat.keys() - kept.keys()):
        _logger.warning("Ignoring param=%s from checkpoint: the state to intersect with does not have it", name)
    return unflatten(kept)


def merge_state(
    state_dict: Mapping[str, Any], from_scratch_state: Mapping[str, Any], overwrite: bool = False
) -> Mapping[str, Any]:
    """Adds the leaves that the first state dict lacks.

    Args:
      state_dict: nested.
      from_scratch_state: nested.
      overwrite: whether its leaves win where both have the name.

    Raises:
      ValueError: a leaf of one is a subtree of the other.
    """
    with _in_t5xs_words():
        return Merge(from_scratch_state, overwrite=overwrite)(state_dict, {})


def apply_assignment_map(
    ckpt_optimizer_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    assignment_map: Sequence[tuple[Any, str | None]],
    require_all_rules_match: bool = True,
    *,
    is_resuming: bool = False,
) -> Mapping[str, Any]:
    """Renames a state dict's leaves by rules.

    The rules are on the names of the state to restore. For every name of `optimizer_state` the first rule that matches
    it fully decides: with None the name is left out, otherwise the expanded replacement is the name of the checkpoint
    leaf that it gets. Used names go away, others stay, as in T5X: with `[("a", "b")]` alone, a checkpoint that has both
    names keeps its own `a`, which no rule takes, and a warning says so. `("b", "a")` beside it swaps the two. In a
    restore the rule wins.

    Args:
      ckpt_optimizer_state: nested; of the checkpoint.
      optimizer_state: nested; only its names count.
      assignment_map: pairs (regex, replacement or None).
      require_all_rules_match: whether a rule that decides nothing is an error.
      is_resuming: whether the run goes on from its own checkpoint, which is returned unchanged.

    Raises:
      ValueError: a name that the checkpoint lacks, or unused patterns.
    """
    transform = AssignmentMap(tuple(assignment_map), require_all_rules_match)
    with _in_t5xs_words():
        return transform(ckpt_optimizer_state, optimizer_state, is_resuming=is_resuming)


@contextlib.contextmanager
def _in_t5xs_words() -> Iterator[None]:
    """Rewords a transform's error as T5X does.

    The advice becomes a note.
    """
    try:
        yield
    except RestorePlanError as error:
        (problem,) = error.problems
        error.args = (problem.message,)
        if problem.fix is not None:
            error.add_note(str(problem.fix))
        raise
