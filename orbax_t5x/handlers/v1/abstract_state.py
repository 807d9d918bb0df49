"""Orbax v1's load target, with the options of the restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as v1

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.handlers.v1.orbax_v1_names import active_context, calls_handlers
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import AnySource, Transforms, chain_of
from orbax_t5x.restoring.targets import require_finite

_WHERE = "loaded inside `with ot.v1.context():`"
# Orbax names the key in its error where the state is loaded without our handler.
_KEY = jax.tree_util.DictKey(f"AbstractTrainState is {_WHERE}")


# Not compared by value: the target may hold arrays.
@dataclasses.dataclass(eq=False, repr=False)
class AbstractTrainState(RestoreOptions):
    """Target with the keywords of `orbax_t5x.restore`, for `ocp.load` of Orbax v1.

    A pytree with the target as its only child. It is loaded inside `with ot.v1.context():`, and the result has the
    type, the structure, the dtypes and the shardings of the target.

    Attributes:
      target: the tree to load into, or what `ocp.metadata` returned, whole or its `metadata`; types such as `int` and
        `str` are leaves as in Orbax. None: everything, as NumPy.
      transforms: called in order on the state dict of the checkpoint.
      source: loaded from instead of the path that Orbax is given, which must be an Orbax checkpoint all the same: any
        path or format, an opened checkpoint, an `orbax_t5x.Source`, or a mapping of several.
      item: which item of a `source` with several; Orbax names those of its own path by `checkpointable_name`.

    Raises:
      TypeError: the target is an `AbstractTrainState` itself, `transforms` holds no transforms, or another keyword has
        a value of another type.
      ValueError: an unknown `verify` or `progress`, or a limit below one byte.
    """

    target: Any
    transforms: Transforms = ()
    _: dataclasses.KW_ONLY
    source: AnySource | None = None

    def __post_init__(self) -> None:
        self.target = plain_target(self.target)
        chain_of(self.transforms)
        super().__post_init__()

    def __repr__(self) -> str:
        return f"AbstractTrainState({type(self.target).__name__}, transforms={self.transforms!r}; {_WHERE})"


def plain_target(target: Any) -> Any:
    """Converts a target of Orbax v1 for `orbax_t5x.restore`.

    Raises:
      TypeError: it is an `AbstractTrainState`.
    """
    if isinstance(target, AbstractTrainState):
        raise TypeError("the target is an AbstractTrainState; pass its own target, and its keywords beside it")
    require_finite(target)
    return target.metadata if isinstance(target, v1.CheckpointMetadata) else target


def _keywords(state: AbstractTrainState) -> tuple[tuple[str, Any], ...]:
    names = [field.name for field in dataclasses.fields(state) if field.name != "target"]
    return tuple((name, getattr(state, name)) for name in names)


def _flatten(state: AbstractTrainState) -> tuple[Iterable[tuple[Any, Any]], tuple[tuple[str, Any], ...]]:
    # Orbax flattens what it loads into, and then says only that it is no flat dictionary.
    if not calls_handlers(active_context()):
        what = "Orbax loads this checkpoint layout without handlers, and an AbstractTrainState is loaded by ours"
        fix = Fix.in_program("call ot.v1.load_and_transform(path, target, transforms)")
        raise RestorePlanError([Problem("target", None, what, fix)])
    return ((_KEY, state.target),), _keywords(state)


def _unflatten(keywords: tuple[tuple[str, Any], ...], children: Iterable[Any]) -> AbstractTrainState:
    # JAX puts anything in place of leaves: nothing is checked again.
    state = object.__new__(AbstractTrainState)
    (state.target,) = children
    for name, value in keywords:
        setattr(state, name, value)
    return state


jax.tree_util.register_pytree_with_keys(AbstractTrainState, _flatten, _unflatten)
