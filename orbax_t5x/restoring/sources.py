"""Sources of a restore: checkpoints, transforms, leaves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.detect import UserPath
from orbax_t5x.readers.formats import open_checkpoint
from orbax_t5x.restoring.chains import FoundRules, OneSource, Transforms, chain_of
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import prefixed

_open_together = on_demand.function("orbax_t5x.readers.together", "open_together")  # several processes only


_SAVED_WHOLE = "_optimizer/"
_AXES = ("params_axes/", "flax_mutables_axes/")


@dataclasses.dataclass(frozen=True)
class Source:
    """Checkpoint that a restore takes from, with transforms of its own.

    Give it wherever a path of a checkpoint can be given, also as a value of a mapping of several sources.

    Attributes:
      path: of the checkpoint, or an open one.
      transforms: run on this source alone, before its names get a prefix and before the transforms of the restore; in a
        mapping they see the part of the target below the source's name where it has one, else the whole target;
        `"auto"` as in `orbax_t5x.restore`.
      item: which item of an Orbax step; None: that of the restore.
      format: as `orbax_t5x.open_checkpoint` takes it.

    Raises:
      TypeError: `transforms` holds something else.

    Example:
      >>> tuned = ot.Source(bundle, [ot.transforms.Keep(["shared/.*"])])
      >>> sorted(ot.restore({"tuned": tuned, "base": bundle}, None))
      ['base', 'tuned']
    """

    path: UserPath | Checkpoint
    transforms: Transforms = ()
    item: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        chain_of(self.transforms)


OneOrPath = UserPath | Checkpoint | Source
AnySource = OneOrPath | Mapping[str, OneOrPath]


@dataclasses.dataclass(frozen=True, eq=False)
class OpenSources:
    """Open sources of a restore."""

    checkpoints: Mapping[str, Checkpoint]
    chain: tuple[Callable[..., Any], ...] = ()

    @property
    def path(self) -> str | None:
        """The paths of the checkpoints, for errors."""
        return ", ".join(checkpoint.path for checkpoint in self.checkpoints.values()) or None

    @property
    def single(self) -> Checkpoint | None:
        """The only checkpoint."""
        return next(iter(self.checkpoints.values())) if len(self.checkpoints) == 1 else None

    def leaves(self, diagnostics: Diagnostics) -> dict[str, Any]:
        """Returns all leaves by prefixed name."""
        if "" in self.checkpoints:
            return _leaves_of(self.checkpoints[""])
        leaves: dict[str, Any] = {}
        prefix_of: dict[str, str] = {}
        for prefix, checkpoint in self.checkpoints.items():
            for short, value in _leaves_of(checkpoint).items():
                name = prefixed(prefix, short)
                if name in leaves:
                    diagnostics.problem(
                        "duplicate",
                        name,
                        f"the sources {prefix_of[name]!r} and {prefix!r} both have a leaf of this name",
                        Fix("give one of the sources another name"),
                    )
                leaves[name] = value
                prefix_of[name] = prefix
        return leaves


def open_sources(source: AnySource, options: RestoreOptions, stack: contextlib.ExitStack) -> OpenSources:
    """Opens the sources of a restore."""
    sources = _sources_by_name(source)
    if not sources:
        raise ValueError("no source was given: the mapping is empty")
    for name in source if isinstance(source, Mapping) else ():
        if not isinstance(name, str) or not name:
            raise ValueError(f"a source's name is text that is not empty, not {name!r}: leaf names start with it")
    checkpoints = {name: _opened(one, options, stack) for name, one in sources.items()}
    return OpenSources(checkpoints, _own_chain(sources, checkpoints))


def _sources_by_name(source: AnySource) -> dict[str, Source]:
    several = source if isinstance(source, Mapping) else {"": source}
    return {name: one if isinstance(one, Source) else Source(one) for name, one in several.items()}


def _opened(source: Source, options: RestoreOptions, stack: contextlib.ExitStack) -> Checkpoint:
    if isinstance(source.path, Checkpoint):
        return source.path
    item = options.item if source.item is None else source.item
    opener = _open_together if jax.distributed.is_initialized() else open_checkpoint
    return stack.enter_context(opener(source.path, format=source.format, item=item, limits=options.limits))


def _own_chain(sources: Mapping[str, Source], checkpoints: Mapping[str, Checkpoint]) -> tuple[Callable[..., Any], ...]:
    chain: list[Callable[..., Any]] = []
    for name, source in sources.items():
        steps = chain_of(source.transforms)
        if steps and name:
            checkpoint = checkpoints.get(name)
            names = None if checkpoint is None else frozenset((*checkpoint.leaves, *checkpoint.empties))
            chain.append(OneSource(name, steps, names))
        else:
            chain.extend(steps)
    return tuple(chain)


def unopened_chain(source: AnySource | None, transforms: Transforms) -> tuple[Callable[..., Any], ...]:
    """Returns the chain of unopened sources."""
    own = () if source is None else _own_chain(_sources_by_name(source), {})
    chain = (*own, *chain_of(transforms))
    is_known = all(
        not isinstance(step, FoundRules)
        for transform in chain
        for step in (transform.steps if isinstance(transform, OneSource) else (transform,))
    )
    return chain if is_known else ()


def _leaves_of(checkpoint: Checkpoint) -> dict[str, Any]:
    leaves: dict[str, Any] = dict(checkpoint.leaves)
    if checkpoint.empties:
        leaves.update((name, None) for name, empty in checkpoint.empties.items() if empty is None)
    return leaves


def without_saved_whole_prefix(source: dict[str, Any], start: str) -> dict[str, Any]:
    """Renames the leaves of a train state that Orbax saved whole."""
    saved_whole = start + _SAVED_WHOLE
    if not any(name.startswith(saved_whole) for name in source):
        return source
    axes = tuple(start + name for name in _AXES)
    return {
        start + name.removeprefix(saved_whole) if name.startswith(saved_whole) else name: value
        for name, value in source.items()
        if not name.startswith(axes)
    }
