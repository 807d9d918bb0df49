"""Sources of a restore: one checkpoint or several by name, each with transforms of its own, and their leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.readers import Checkpoint, Limits
from orbax_t5x.readers.together import open_together
from orbax_t5x.restoring.chains import FoundRules, OneSource, Transforms, chain_of
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import prefixed

Path = str | os.PathLike[str]

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

    path: Path | Checkpoint
    transforms: Transforms = ()
    item: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        chain_of(self.transforms)

    def opened(self, options: PlanOptions, stack: contextlib.ExitStack) -> Source:
        """Returns the same with an open checkpoint; the stack closes it if it was opened here."""
        if isinstance(self.path, Checkpoint):
            return self
        item = options.item if self.item is None else self.item
        limits = Limits() if options.limits is None else options.limits
        checkpoint = open_together(self.path, format=self.format, item=item, limits=limits)
        return dataclasses.replace(self, path=stack.enter_context(checkpoint))


OneOrPath = Path | Checkpoint | Source
AnySource = OneOrPath | Mapping[str, OneOrPath]


def open_sources(source: AnySource, options: PlanOptions, stack: contextlib.ExitStack) -> dict[str, Source]:
    """Opens the sources; returns them by name, a single one under "".

    Args:
      source: as `orbax_t5x.restore` takes it.
      options: `item` and `limits` are for sources without their own.
      stack: closes those that were opened here.
    """
    if not isinstance(source, Mapping):
        return {"": _as_source(source).opened(options, stack)}
    if not source:
        raise ValueError("no source was given: the mapping is empty")
    for name in source:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a source's name is text that is not empty, not {name!r}: leaf names start with it")
    return {name: _as_source(one).opened(options, stack) for name, one in source.items()}


def _as_source(one: OneOrPath) -> Source:
    return one if isinstance(one, Source) else Source(one)


def checkpoints_of(sources: Mapping[str, Source]) -> dict[str, Checkpoint]:
    """Returns the open checkpoints by name."""
    return {name: source.path for name, source in sources.items() if isinstance(source.path, Checkpoint)}


def own_chain(sources: Mapping[str, Source]) -> tuple[Callable[..., Any], ...]:
    """Returns the sources' own transforms as they begin the chain of the restore."""
    chain: list[Callable[..., Any]] = []
    for name, checkpoint in checkpoints_of(sources).items():
        steps = chain_of(sources[name].transforms)
        if steps and name:
            names = frozenset((*checkpoint.leaves, *checkpoint.empties))
            chain.append(OneSource(name, steps, names))
        else:
            chain.extend(steps)
    return tuple(chain)


def unopened_chain(source: AnySource | None, transforms: Transforms) -> tuple[Callable[..., Any], ...]:
    """Returns the chain of a restore whose sources are not opened: it has the right digest, and is not applied.

    Empty where `"auto"` stands in it: what that found at the time is not known without the source.

    Args:
      source: as `orbax_t5x.restore` takes it, or None.
      transforms: of the restore.
    """
    chain: list[Callable[..., Any]] = []
    for name, one in source.items() if isinstance(source, Mapping) else [("", source)]:
        steps = chain_of(one.transforms) if isinstance(one, Source) else ()
        chain.extend([OneSource(name, steps)] if steps and name else steps)
    chain.extend(chain_of(transforms))
    is_known = all(
        not isinstance(step, FoundRules)
        for transform in chain
        for step in (transform.steps if isinstance(transform, OneSource) else (transform,))
    )
    return tuple(chain) if is_known else ()


def source_leaves(checkpoints: Mapping[str, Checkpoint], diagnostics: Diagnostics) -> dict[str, Any]:
    """Returns all leaves by name, and None where a checkpoint has None; several sources are told apart by a prefix."""
    if len(checkpoints) == 1 and "" in checkpoints:
        return _leaves_of(checkpoints[""])
    source: dict[str, Any] = {}
    prefix_of: dict[str, str] = {}
    for prefix, checkpoint in checkpoints.items():
        for short, value in _leaves_of(checkpoint).items():
            name = prefixed(prefix, short)
            if name in source:
                diagnostics.problem(
                    "duplicate",
                    name,
                    f"the sources {prefix_of[name]!r} and {prefix!r} both have a leaf of this name",
                    Fix("give one of the sources another name"),
                )
            source[name] = value
            prefix_of[name] = prefix
    return source


def _leaves_of(checkpoint: Checkpoint) -> dict[str, Any]:
    leaves: dict[str, Any] = dict(checkpoint.leaves)
    leaves.update((name, None) for name, empty in checkpoint.empties.items() if empty is None)
    return leaves


def without_saved_whole_prefix(source: dict[str, Any], start: str) -> dict[str, Any]:
    """Renames the leaves of a train state that stock Orbax saved whole (`_optimizer/target/…`) as its state dict does.

    Args:
      source: by name.
      start: the name of the train state, with a trailing '/'; empty for the whole.
    """
    saved_whole = start + _SAVED_WHOLE
    if not any(name.startswith(saved_whole) for name in source):
        return source
    axes = tuple(start + name for name in _AXES)
    return {
        start + name.removeprefix(saved_whole) if name.startswith(saved_whole) else name: value
        for name, value in source.items()
        if not name.startswith(axes)
    }
