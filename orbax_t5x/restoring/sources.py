"""Sources of a restore: checkpoints, and a single chain of transforms.

The sources' own transforms come first; `"auto"` becomes rules. Provenance records the chain, so it has to hold all that
is applied: `"auto"` is replaced by the rules that it finds before it is decided whether the transforms were applied
already, and the transforms of a source are in the chain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.detect import UserPath
from orbax_t5x.readers.formats import open_checkpoint
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.transforms.base import AnyTransform, Transform, describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.migrations import Migration, Migrations, expanded
from orbax_t5x.transforms.run import Steps, run_transforms
from orbax_t5x.trees.flat import FlatState, prefixed
from orbax_t5x.trees.narrow import is_sequence

PASS_RULES = Fix.in_program(
    "pass the rules: a pack of ot.rules, transforms of ot.transforms, or what a plan with a target has as found_rules"
)

AUTO = "auto"
Listed = Callable[..., Any] | Migrations | Literal["auto"]
Transforms = Sequence[Listed] | Listed
# Only calls that went wrong need the packs.
_PACKAGE_OF_PACKS = "orbax_t5x.rules"
_pack_names = on_demand.function(f"{_PACKAGE_OF_PACKS}.graph", "pack_names")
_of_type = on_demand.function("orbax_t5x.restoring.wrong_transforms", "of_type")
_instead_of = on_demand.function("orbax_t5x.restoring.wrong_transforms", "instead_of")
_call_of = on_demand.function("orbax_t5x.restoring.wrong_transforms", "call_of")
# Of "auto" only.
_find_mapping = on_demand.function("orbax_t5x.restoring.auto", "find_mapping")

_SAVED_WHOLE = "_optimizer/"
_AXES = ("params_axes/", "flax_mutables_axes/")


@dataclasses.dataclass(frozen=True)
class FoundRules(Transform):
    """Place of `"auto"` in a chain, until `written_out` replaces it by the rules that it finds.

    Attributes:
      given: pairs of names that a user knows, of the checkpoint and of the target.
    """

    given: tuple[tuple[str, str], ...] = ()
    # On a step of a run: for the rules that its record marks as found.
    stands_for_found: ClassVar[bool] = True

    def describe(self) -> str:
        return self.as_code()

    def as_code(self) -> str:
        return repr(AUTO)


@dataclasses.dataclass(frozen=True)
class OneSource(Steps):
    """Transforms of a named source, on its own leaves.

    They see the names that the source gives them. In a state that was made of it, its leaves are those below its name.

    Attributes:
      source: its name.
      steps: in order.
    """

    source: str
    steps: tuple[AnyTransform, ...]
    # Names of its leaves: those of the sources `a` and `a/b` both begin with `a/`.
    _names: frozenset[str] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def rules_of_source(self) -> str:
        """The source's name, for records."""
        return self.source

    def describe(self) -> str:
        return f"{self.source}: {', '.join(map(describe_transform, self.steps))}"

    def own(self, state: FlatState) -> dict[str, Any]:
        """Returns the source's leaves, by its own names."""
        start = f"{self.source}/"
        own = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        if self.source in state:  # an array without a tree
            own[""] = state[self.source]
        return own if self._names is None else {name: value for name, value in own.items() if name in self._names}

    def target_below(self, target: FlatState) -> FlatState:
        """Returns the target below the source's name, or all of it."""
        start = f"{self.source}/"
        below = {name[len(start) :]: leaf for name, leaf in target.items() if name.startswith(start)}
        return below or target

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        joined = functools.partial(prefixed, self.source)
        own, below, found = self.own(state), self.target_below(target), diagnostics.settings()
        taken = set(map(joined, own))
        transformed = run_transforms(self.steps, own, below, is_resuming=False, diagnostics=found)
        result = NewState(diagnostics)
        # Where the source's first leaf was: the order of leaves is that of the sources.
        pending = {joined(name): value for name, value in transformed.items()}
        for name, value in state.items():
            if name in taken:
                for new, leaf in pending.items():
                    result.put(new, leaf, new)
                pending = {}
            else:
                result.put(name, value, name)
        for new, leaf in pending.items():
            result.put(new, leaf, new)
        diagnostics.rule_for.update({joined(name): rule for name, rule in found.rule_for.items()})
        diagnostics.origin_of.update({joined(name): joined(origin) for name, origin in found.origin_of.items()})
        diagnostics.fidelity.update({joined(name): fidelity for name, fidelity in found.fidelity.items()})
        diagnostics.explained.update(map(joined, found.explained))
        diagnostics.raised.extend(found.raised)
        diagnostics.warnings.extend(f"source {self.source!r}: {warning}" for warning in found.warnings)
        diagnostics.problems.extend(
            dataclasses.replace(
                problem,
                leaf=None if problem.leaf is None else joined(problem.leaf),
                message=f"source {self.source!r}: {problem.message}",
            )
            for problem in found.problems
        )
        return result.finish()


def chain_of(transforms: Transforms, *, has_target: bool = True) -> tuple[Callable[..., Any], ...]:
    """Checks transforms and returns them as a tuple, with a `FoundRules` in place of `"auto"`.

    Text and functions that make rule packs are refused. With `has_target` an error may advise `"auto"`.
    """
    if isinstance(transforms, str):
        if transforms == AUTO:
            return (FoundRules(),)
        auto = f"{AUTO!r}, " if has_target else ""
        instead = _call_of(transforms) or f"{auto}transforms of ot.transforms, or functions"
        raise TypeError(f"transforms={transforms!r} is text; pass {instead}")
    is_single = callable(transforms) or isinstance(transforms, Migrations)
    chain = (transforms,) if is_single else () if transforms is None else transforms
    if not is_sequence(chain):  # nor a generator
        raise TypeError(f"transforms is {_of_type(chain)}; pass a list of transforms of ot.transforms, or functions")
    steps: list[Any] = [FoundRules() if isinstance(step, str) and step == AUTO else step for step in expanded(chain)]
    if sum(isinstance(step, FoundRules) for step in steps) > 1:
        raise TypeError(f"{AUTO!r} stands twice in a list of transforms; it finds all rules where it stands once")
    for transform in steps:
        if isinstance(transform, type) and issubclass(transform, Transform):
            raise TypeError(f"{transform.__name__} is a class; pass an instance of it: {transform.__name__}(…)")
        if (pack := _pack_of(transform)) is not None:
            raise TypeError(f"{pack} is a function that makes a rule pack; pass what it makes: {_call_of(pack)}")
        if not callable(transform):
            raise TypeError(f"{transform!r} is no transform; {_instead_of(transform)}")
    return tuple(steps)


def saved_chain(transforms: Transforms) -> tuple[Callable[..., Any], ...]:
    """Returns the transforms of a save; without a target for `"auto"`."""
    if AUTO in [one for one in [transforms, *(transforms if is_sequence(transforms) else ())] if isinstance(one, str)]:
        what = f"transforms={AUTO!r} finds rules between a checkpoint and a target, and a save has no target"
        raise RestorePlanError([Problem("rule", None, what, PASS_RULES)])
    chain = chain_of(transforms, has_target=False)
    if any(isinstance(one, Migration) for one in chain):
        raise TypeError("Migrations are for restores: a save writes the state of the newest")
    return chain


def _pack_of(something: object) -> str | None:
    """Returns the name of a rule pack's function, or None."""
    if not inspect.isfunction(something) or not str(something.__module__).startswith(f"{_PACKAGE_OF_PACKS}."):
        return None
    return something.__name__ if something.__name__ in _pack_names() else None


def names_of_migrations(transforms: Iterable[AnyTransform]) -> tuple[str, ...]:
    """Lists the names of migrations; of a named source with its name."""
    names: list[str] = []
    for one in transforms:
        if isinstance(one, OneSource):
            names += (f"{one.source}/{name}" for name in names_of_migrations(one.steps))
        elif isinstance(one, Migration):
            names.append(one.migration_name)
    return tuple(names)


def asks_for_rules(transform: AnyTransform) -> bool:
    """Tests for `"auto"`, also of a source."""
    return any(isinstance(step, FoundRules) for step in _own_steps(transform))


def rules_found(given: Sequence[AnyTransform], written: Sequence[AnyTransform]) -> tuple[AnyTransform, ...]:
    """Returns the rules in a chain in place of `"auto"`."""
    ids = {id(step) for transform in given for step in _own_steps(transform)}
    return tuple(step for transform in written for step in _own_steps(transform) if id(step) not in ids)


def _own_steps(transform: AnyTransform) -> Sequence[AnyTransform]:
    """Returns the transforms of a named source, or the transform itself."""
    return transform.steps if isinstance(transform, OneSource) else (transform,)


def written_out(
    transforms: Iterable[AnyTransform],
    source: FlatState,
    target: Mapping[str, Any],
    path: str | None,
    *,
    fillable: Collection[str] = (),
    settings: Diagnostics | None = None,
    why: dict[str, Any] | None = None,
) -> tuple[AnyTransform, ...]:
    """Replaces `"auto"` in the chain by rules.

    They lead from the source's leaves to the target's, as these are before the transforms that follow `"auto"`. Leaves
    of the target that are `fillable` need no rule. With the `settings` of the restore it need not apply the rule packs
    again. The reasons for the target's leaves are added to `why`.
    """
    settings, why = settings or Diagnostics(), {} if why is None else why
    steps = tuple(transforms)
    chain: list[AnyTransform] = []
    for at, transform in enumerate(steps):
        if isinstance(transform, FoundRules):
            before = run_transforms(chain, source, target, is_resuming=False, diagnostics=settings.settings())
            mapping = _find_mapping(transform, before, target, path, fillable, settings, steps[at + 1 :])
            chain.extend(mapping.parts)
            why.update(mapping.why)
        elif isinstance(transform, OneSource):
            below = transform.target_below(target)
            new = {name for name in below if name in fillable or prefixed(transform.source, name) in fillable}
            own, reasons = transform.own(source), {}
            steps = written_out(transform.steps, own, below, path, fillable=new, settings=settings, why=reasons)
            start = "" if below is target else f"{transform.source}/"
            why.update((start + name, reason) for name, reason in reasons.items())
            chain.extend([dataclasses.replace(transform, steps=steps)] if steps else [])
        else:
            chain.append(transform)
    return tuple(chain)


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
    """Open sources of a restore.

    Attributes:
      checkpoints: Checkpoints by the prefix of their leaf names.
      chain: Transforms of the sources.
      latest_steps: Steps that were chosen as the latest of a root.
    """

    checkpoints: Mapping[str, Checkpoint]
    chain: tuple[Callable[..., Any], ...] = ()
    latest_steps: tuple[int, ...] = ()

    @property
    def path(self) -> str | None:
        """The paths of the checkpoints, for errors."""
        return ", ".join(checkpoint.path for checkpoint in self.checkpoints.values()) or None

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
                    message = f"the sources {prefix_of[name]!r} and {prefix!r} both have a leaf of this name"
                    diagnostics.problem("duplicate", name, message, Fix("give one of the sources another name"))
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
    checkpoints: dict[str, Checkpoint] = {}
    chain: list[Callable[..., Any]] = []
    for name, one in sources.items():
        checkpoints[name] = _opened(one, options, stack)
        chain += _own_chain(name, one, checkpoints[name])
    latest = [_latest_step(one.path, checkpoints[name]) for name, one in sources.items()]
    return OpenSources(checkpoints, tuple(chain), tuple([step for step in latest if step is not None]))


def _latest_step(path: Any, checkpoint: Checkpoint) -> int | None:
    """Returns the step that opening a root has chosen, or None if the path names its checkpoint."""
    if checkpoint.step is None or not isinstance(path, str | os.PathLike):
        return None
    root = os.fspath(path)
    root = root if url_scheme(root) else os.path.abspath(os.path.expanduser(root))
    is_below = checkpoint.path.startswith(f"{root}/") and str(checkpoint.step) in checkpoint.path[len(root) :]
    return checkpoint.step if is_below else None


def _sources_by_name(source: AnySource) -> dict[str, Source]:
    several = source if isinstance(source, Mapping) else {"": source}
    return {name: one if isinstance(one, Source) else Source(one) for name, one in several.items()}


def _opened(source: Source, options: RestoreOptions, stack: contextlib.ExitStack) -> Checkpoint:
    if isinstance(source.path, Checkpoint):
        return source.path
    item = options.item if source.item is None else source.item
    return stack.enter_context(open_checkpoint(source.path, format=source.format, item=item, limits=options.limits))


def _own_chain(name: str, source: Source, checkpoint: Checkpoint | None = None) -> tuple[Callable[..., Any], ...]:
    steps = chain_of(source.transforms)
    if not steps or not name:
        return steps
    names = None if checkpoint is None else frozenset((*checkpoint.leaves, *checkpoint.empties))
    return (OneSource(name, steps, names),)


def unopened_chain(source: AnySource | None, transforms: Transforms) -> tuple[Callable[..., Any], ...]:
    """Returns the chain of sources that are not opened, with `FoundRules` in place of `"auto"`."""
    sources = {} if source is None else _sources_by_name(source)
    own = [step for name, one in sources.items() for step in _own_chain(name, one)]
    return (*own, *chain_of(transforms))


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
