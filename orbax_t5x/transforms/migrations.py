"""Migrations: named transforms of a model whose code changes; each is applied once.

`orbax_t5x.provenance.decision` decides which of them a checkpoint has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from orbax_t5x.text.code import code_of
from orbax_t5x.transforms.base import AnyTransform, describe_transform
from orbax_t5x.transforms.run import Steps

NamedTransforms: TypeAlias = "tuple[str, Sequence[AnyTransform] | AnyTransform]"
"""A name, and transforms in order."""


@dataclasses.dataclass(frozen=True)
class Migration(Steps):
    """Named part of a `Migrations` list.

    Attributes:
      migration_name: Name in the list, and in records.
      steps: Transforms in order.
      is_assumed: Whether a checkpoint without a record has it.
    """

    migration_name: str
    steps: tuple[AnyTransform, ...]
    _is_assumed: bool = dataclasses.field(default=False, repr=False, compare=False)

    @property
    def is_assumed(self) -> bool:
        """True if a checkpoint without a record has it."""
        return self._is_assumed

    def describe(self) -> str:
        return f"{self.migration_name}: {', '.join(map(describe_transform, self.steps)) or 'nothing'}"


@dataclasses.dataclass(frozen=True, init=False)
class Migrations:
    r"""List of named transforms that grows with the model's code.

    Pass it as `transforms`. A save records names and digests, and each migration is applied once, in order. It is a
    problem if the rules of a recorded name have changed, or if it stands elsewhere than recorded. All migrations are
    applied to a checkpoint without a record; `since` says which of them it has.

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
            name, transforms = item
            if not name:
                raise ValueError("a migration's name is text that is not empty")
            if name in [step.migration_name for step in steps]:
                raise ValueError(f"two migrations are named {name!r}; records tell them apart by their names")
            chain = (transforms,) if callable(transforms) else tuple(transforms)
            wrong = [transform for transform in chain if not callable(transform) or isinstance(transform, type)]
            if wrong or isinstance(transforms, str):
                raise TypeError(f"migration {name!r}: {(wrong or [transforms])[0]!r} is no transform")
            steps.append(Migration(name, chain))
        object.__setattr__(self, "steps", tuple(steps))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order."""
        return tuple(step.migration_name for step in self.steps)

    def as_code(self) -> str:
        """Returns the Python call of the list."""
        return (
            f"ot.Migrations([{', '.join(f'({step.migration_name!r}, {code_of(step.steps)})' for step in self.steps)}])"
        )

    def since(self, name: str) -> Migrations:
        """Returns the list for checkpoints without a record that have the migrations up to a name.

        A record counts more than this answer.

        Args:
          name: of the last migration that the checkpoint has.

        Raises:
          ValueError: no migration has this name.
        """
        if name not in self.names:
            raise ValueError(f"no migration is named {name!r}; the names are {', '.join(self.names)}")
        last = self.names.index(name)
        steps = (dataclasses.replace(step, _is_assumed=at <= last) for at, step in enumerate(self.steps))
        migrations = Migrations()
        object.__setattr__(migrations, "steps", tuple(steps))
        return migrations


def expanded(chain: Iterable[Any]) -> list[Callable[..., Any]]:
    """Replaces a `Migrations` at the end of a chain by its migrations.

    Raises:
      TypeError: other transforms follow it.
    """
    transforms = list(chain)
    if any(isinstance(transform, Migrations) for transform in transforms[:-1]):
        raise TypeError("other transforms follow Migrations; give them as a migration at its end")
    last = transforms[-1:]
    return [*transforms[:-1], *last[0].steps] if last and isinstance(last[0], Migrations) else transforms
