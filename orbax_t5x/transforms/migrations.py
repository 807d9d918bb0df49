"""Named transforms of a model's code that changes, each applied once.

`orbax_t5x.provenance.versions` decides how many of them a checkpoint has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from orbax_t5x.transforms.base import AnyTransform, Transform
from orbax_t5x.transforms.describe import describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import FlatState

NamedTransforms: TypeAlias = "tuple[str, Sequence[AnyTransform] | AnyTransform]"
"""A name, and transforms in order."""


@dataclasses.dataclass(frozen=True)
class Migration(Transform):
    """Named part of a `Migrations` list.

    Attributes:
      migration_name: its name.
      steps: the transforms in order.
      is_assumed: a checkpoint without a record has it.
    """

    migration_name: str
    steps: tuple[AnyTransform, ...]
    _is_assumed: bool = dataclasses.field(default=False, repr=False, compare=False)

    @property
    def is_assumed(self) -> bool:
        """True if a checkpoint without a record has it."""
        return self._is_assumed

    @property
    def only_selects(self) -> bool:
        return all(getattr(step, "only_selects", False) is True for step in self.steps)

    def describe(self) -> str:
        return f"{self.migration_name}: {', '.join(map(describe_transform, self.steps)) or 'nothing'}"

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return run_transforms(self.steps, state, target, is_resuming=False, diagnostics=diagnostics)


@dataclasses.dataclass(frozen=True, init=False)
class Migrations:
    r"""List of named transforms that grows with the model's code.

    Pass it as `transforms`. A save records the names and digests, and each name is applied once, in order. A checkpoint
    without a record has the version whose remaining migrations lead to the target, by names and shapes.

    Attributes:
      steps: the migrations in order.

    Raises:
      ValueError: two migrations have a name, or a name is empty.
      TypeError: an item is not a pair of a name and transforms.

    Example:
      >>> history = ot.Migrations([
      ...     ("rename-heads", [ot.transforms.Rename([("heads/(.*)", r"head/\1")])]),
      ...     ("transpose-head", [ot.transforms.Transpose("head/w")]),
      ... ])
      >>> history.names
      ('rename-heads', 'transpose-head')
    """

    steps: tuple[Migration, ...]

    def __init__(self, migrations: Iterable[NamedTransforms] = ()):
        steps: list[Migration] = []
        for item in migrations:
            if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
                raise TypeError(f"{item!r} is no migration; pass (name, transforms)")
            name, given = item
            if not name:
                raise ValueError("a migration's name is text that is not empty")
            if name in [step.migration_name for step in steps]:
                raise ValueError(f"two migrations are named {name!r}; records tell them apart by their names")
            chain = (given,) if callable(given) else tuple(given)
            wrong = [one for one in chain if not callable(one) or isinstance(one, type)]
            if wrong or isinstance(given, str):
                raise TypeError(f"migration {name!r}: {(wrong or [given])[0]!r} is no transform")
            steps.append(Migration(name, chain))
        object.__setattr__(self, "steps", tuple(steps))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order."""
        return tuple(step.migration_name for step in self.steps)

    def since(self, name: str) -> Migrations:
        """Answers for checkpoints without a record: applied up to a name.

        A record counts more than this answer.

        Args:
          name: of the last migration that the checkpoint has.

        Raises:
          ValueError: no migration has this name.
        """
        if name not in self.names:
            raise ValueError(f"no migration is named {name!r}; the names are {', '.join(self.names)}")
        made = Migrations()
        last = self.names.index(name)
        steps = (dataclasses.replace(step, _is_assumed=at <= last) for at, step in enumerate(self.steps))
        object.__setattr__(made, "steps", tuple(steps))
        return made


def expanded(chain: Iterable[Any]) -> list[Callable[..., Any]]:
    """Replaces a `Migrations` at the end of a chain by its migrations.

    Raises:
      TypeError: other transforms follow it.
    """
    given = list(chain)
    if any(isinstance(one, Migrations) for one in given[:-1]):
        raise TypeError("other transforms follow Migrations; give them as a migration at its end")
    return [*given[:-1], *given[-1].steps] if given and isinstance(given[-1], Migrations) else given
