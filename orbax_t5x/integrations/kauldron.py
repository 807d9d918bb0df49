"""Kauldron's `init_transform` with values of a checkpoint of any format."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

from orbax_t5x.restoring.api import restore
from orbax_t5x.restoring.sources import AnySource, Transforms
from orbax_t5x.transforms.patterns.table import Pattern

InitTransform: Any = object
# Kauldron is an optional package. Without it the class has no base; Kauldron calls the methods by name.
with contextlib.suppress(ImportError):
    InitTransform = importlib.import_module("kauldron.checkpoints.partial_loader").InitTransform

_State = TypeVar("_State")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbaxT5X(InitTransform):
    """Transform of Kauldron's initial state.

    It fills the parameters, and on request the optimizer's state, from a checkpoint. Values change; structure, shapes,
    dtypes and shardings stay those of the state, as Kauldron demands. Names of leaves are those of the state:
    `params/…`, `opt_state/…`.

    Attributes:
      path: what to restore: a source of `orbax_t5x.restore`, of any format.
      transforms: from the checkpoint's names to the state's, as `orbax_t5x.restore` takes them: `"auto"` finds a pack.
      fallback_for: patterns of the leaves that may stay as they were initialised, such as `["params/head/.*"]`. Any
        other leaf that the checkpoint lacks is a problem. None: all may stay, with a warning.
      optimizer: whether the optimizer's state is restored, too, once it is made.
      strict: whether leaves of the checkpoint that have no place in the state are a problem.
      is_resuming: as in `orbax_t5x.restore`.

    Example:
      >>> from orbax_t5x.integrations.kauldron import OrbaxT5X
      >>> init_transform = OrbaxT5X(path=bundle, transforms="auto", fallback_for=["params/head/.*"])
      >>> init_transform.fallback_for
      ['params/head/.*']
    """

    path: AnySource
    transforms: Transforms = ()
    fallback_for: Sequence[Pattern] | None = None
    optimizer: bool = False
    strict: bool = False
    is_resuming: bool | None = None

    def transform(self, state: _State) -> _State:
        """Returns the state with the checkpoint's parameters.

        Kauldron calls it before it makes the optimizer.
        """
        return self._restored(state, ("params",), ("params",))

    def transform_after_optimizer(self, state: _State) -> _State:
        """Returns the state with the checkpoint's optimizer state, if that is wanted."""
        if not self.optimizer:
            return state
        return self._restored(state, ("params", "opt_state"), ("opt_state",))

    def _restored(self, state: Any, names: tuple[str, ...], replaced: tuple[str, ...]) -> Any:
        # With the parameters, whose names tell which rules the optimizer's follow.
        target = {name: getattr(state, name) for name in names}
        restored = restore(
            self.path,
            target,
            self.transforms,
            fallback=target,
            fallback_for=self.fallback_for,
            strict=self.strict,
            is_resuming=self.is_resuming,
        )
        return dataclasses.replace(state, **{name: restored[name] for name in replaced})
