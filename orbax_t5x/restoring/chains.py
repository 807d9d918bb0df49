"""Makes a single chain of a restore's transforms.

The sources' own transforms come first; `"auto"` becomes rules. Provenance records the chain, so it has to hold all that
is applied: `"auto"` is replaced by the rules that it finds before it is decided whether the transforms were applied
already, and the transforms of a source are in the chain.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.transforms.base import AnyTransform, Transform, describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.run import Migration, Migrations, Steps, expanded, run_transforms
from orbax_t5x.trees.flat import FlatState, prefixed
from orbax_t5x.trees.narrow import is_sequence

PASS_RULES = Fix.in_program(
    "pass the rules: a pack of ot.rules, transforms of ot.transforms, or what a plan with a target has as found_rules"
)

_logger = logging.getLogger(__name__)

AUTO = "auto"
Transforms = Sequence[Callable[..., Any] | Migrations] | Callable[..., Any] | Migrations | Literal["auto"]
_adopt_orbax = on_demand.function("orbax_t5x.transforms.model_surgery", "adopt_orbax")
# Only calls that went wrong need the packs.
_PACKAGE_OF_PACKS = "orbax_t5x.rules"
_pack_names = on_demand.function(f"{_PACKAGE_OF_PACKS}.graph", "pack_names")
_of_type = on_demand.function("orbax_t5x.restoring.wrong_transforms", "of_type")
_instead_of = on_demand.function("orbax_t5x.restoring.wrong_transforms", "instead_of")
_call_of = on_demand.function("orbax_t5x.restoring.wrong_transforms", "call_of")
# Of "auto" only.
_find_mapping = on_demand.function("orbax_t5x.restoring.auto", "find_mapping")


@dataclasses.dataclass(frozen=True)
class FoundRules(Transform):
    """Placeholder for the rules that are found, until `written_out` replaces it.

    Attributes:
      given: pairs of names that a user knows, of the checkpoint and of the target.
    """

    given: tuple[tuple[str, str], ...] = ()


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

    def _joined_name(self, name: str) -> str:
        """Returns the name of a leaf among all sources' leaves."""
        return prefixed(self.source, name)

    def own(self, state: FlatState) -> dict[str, Any]:
        """Returns the source's leaves, by its own names."""
        start = f"{self.source}/"
        own = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        if self.source in state:  # an array without a tree
            own[""] = state[self.source]
        return own if self._names is None else {name: value for name, value in own.items() if name in self._names}

    def target_below(self, target: FlatState) -> FlatState:
        """Returns the target below the source's name, or all of it.

        By the names in it; all if there is no such part.
        """
        start = f"{self.source}/"
        below = {name[len(start) :]: leaf for name, leaf in target.items() if name.startswith(start)}
        return below or target

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        own = self.own(state)
        taken = {self._joined_name(name) for name in own}
        found = diagnostics.settings()
        below = self.target_below(target)
        transformed = run_transforms(self.steps, own, below, is_resuming=False, diagnostics=found)
        result = NewState(diagnostics)
        # Where the source's first leaf was: the order of leaves is that of the sources.
        pending = {self._joined_name(name): value for name, value in transformed.items()}
        for name, value in state.items():
            if name in taken:
                for new, leaf in pending.items():
                    result.put(new, leaf, new)
                pending = {}
            else:
                result.put(name, value, name)
        for new, leaf in pending.items():
            result.put(new, leaf, new)
        diagnostics.rule_for.update({self._joined_name(name): rule for name, rule in found.rule_for.items()})
        diagnostics.origin_of.update(
            {self._joined_name(name): self._joined_name(origin) for name, origin in found.origin_of.items()}
        )
        diagnostics.fidelity.update({self._joined_name(name): fidelity for name, fidelity in found.fidelity.items()})
        diagnostics.explained.update(map(self._joined_name, found.explained))
        diagnostics.raised.extend(found.raised)
        diagnostics.warnings.extend(f"source {self.source!r}: {warning}" for warning in found.warnings)
        diagnostics.problems.extend(
            dataclasses.replace(
                problem,
                leaf=None if problem.leaf is None else self._joined_name(problem.leaf),
                message=f"source {self.source!r}: {problem.message}",
            )
            for problem in found.problems
        )
        return result.finish()


def chain_of(transforms: Transforms, *, has_target: bool = True) -> tuple[Callable[..., Any], ...]:
    """Checks transforms and returns them as a tuple.

    Text and functions that make rule packs are refused.

    `has_target` where rules can be found, so that an error may advise `"auto"`.
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
    chain = expanded(chain)
    for transform in chain:
        if isinstance(transform, type) and issubclass(transform, Transform):
            raise TypeError(f"{transform.__name__} is a class; pass an instance of it: {transform.__name__}(…)")
        if (pack := _pack_of(transform)) is not None:
            raise TypeError(f"{pack} is a function that makes a rule pack; pass what it makes: {_call_of(pack)}")
        if not callable(transform):
            raise TypeError(f"{transform!r} is no transform; {_instead_of(transform)}")
    return tuple(one if isinstance(one, Transform) else _adopt_orbax(one) for one in chain)


def saved_chain(transforms: Transforms) -> tuple[Callable[..., Any], ...]:
    """Returns the transforms of a save.

    It has no target, so that no rules can be found for `"auto"`.
    """
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


def without_parts(transforms: Sequence[AnyTransform], parts: Mapping[int, Collection[int]]) -> tuple[AnyTransform, ...]:
    """Returns transforms without some of those of named sources, by position."""
    return tuple(
        dataclasses.replace(one, steps=tuple(step for index, step in enumerate(one.steps) if index not in parts[at]))
        if isinstance(one, OneSource) and parts.get(at)
        else one
        for at, one in enumerate(transforms)
    )


def names_of_migrations(transforms: Iterable[AnyTransform]) -> tuple[str, ...]:
    """Lists the names of migrations; of a named source with its name."""
    names: list[str] = []
    for one in transforms:
        if isinstance(one, OneSource):
            names += (f"{one.source}/{name}" for name in names_of_migrations(one.steps))
        elif isinstance(one, Migration):
            names.append(one.migration_name)
    return tuple(names)


def rules_found(given: Sequence[AnyTransform], written: Sequence[AnyTransform]) -> tuple[AnyTransform, ...]:
    """Returns the rules in a chain in place of `"auto"`."""
    asked = {
        one.source
        for one in given
        if isinstance(one, OneSource) and any(isinstance(step, FoundRules) for step in one.steps)
    }
    found: list[AnyTransform] = []
    for one in written:
        if isinstance(one, OneSource):
            found += one.steps if one.source in asked else ()
        elif not any(one is other for other in given):
            found.append(one)
    return tuple(found)


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

    They lead from the source's leaves to the target's. Leaves of the target that are `fillable` need no rule. With
    the `settings` of the restore it need not apply the rule packs again. The reasons for the target's leaves are added
    to `why`.
    """
    settings, why = settings or Diagnostics(), {} if why is None else why
    chain: list[AnyTransform] = []
    for transform in transforms:
        if isinstance(transform, FoundRules):
            before = run_transforms(chain, source, target, is_resuming=False, diagnostics=settings.settings())
            mapping = _find_mapping(transform, before, target, path, fillable, settings)
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
