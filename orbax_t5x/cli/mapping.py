"""Options that `plan`, `convert` and `diff` share.

They are `--translate`, `--rules`, `--map` and the target.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from orbax_t5x import transforms
from orbax_t5x.cli.arguments import checked_rules, json_kind, read_map, resuming_argument
from orbax_t5x.cli.fixes import given_options
from orbax_t5x.cli.rule_packs import AUTO, pack_argument
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import FoundRules
from orbax_t5x.rules.alignment.given import GivenError
from orbax_t5x.text.output import UsageError
from orbax_t5x.transforms import AssignmentMap, Rename, Transform, Translate
from orbax_t5x.transforms.migrations import Migrations
from orbax_t5x.trees.flat import unflatten


class RuleOptions:
    """The options for the names of leaves.

    Attributes:
      is_auto: whether rules are to be found.

    Raises:
      UsageError: two options contradict each other.
    """

    def __init__(self, options: argparse.Namespace):
        self._translate: bool | None = options.translate
        named: list[str] = options.rules or []
        self.is_auto: bool = AUTO in named
        if self.is_auto and (len(named) > 1 or self._translate is not None):
            raise UsageError("--rules auto finds everything by itself: give no other --rules and no --translate")
        self._given: dict[str, str] = {}
        for text in options.given or []:
            source, sign, target = text.partition("=")
            if not (sign and source and target):
                raise UsageError(f"--given {text}: expected SOURCE=TARGET, two names of one leaf")
            self._given[source] = target
        if self._given and not self.is_auto:
            raise UsageError("--given needs --rules auto, which asks for what it does not know")
        self._packs = [] if self.is_auto else [pack_argument(text) for text in named]
        self._rules = None if options.map is None else _map_of(options.map)

    @property
    def needs_target(self) -> bool:
        """Truth of this: the file's patterns match the target's names."""
        return isinstance(self._rules, AssignmentMap)

    def transforms(self, source: Checkpoint, *, is_bundle: bool = False) -> list[Transform | Migrations]:
        """Returns the transforms in order: the translation, rule packs, the file's rules."""
        chain: list[Transform | Migrations] = [Translate()] if self._is_translated(source, is_bundle) else []
        chain += [FoundRules(tuple(self._given.items()))] if self.is_auto else self._packs
        return chain if self._rules is None else [*chain, self._rules]

    def _is_translated(self, source: Checkpoint, is_bundle: bool) -> bool:
        """Returns True for bundles, unless an option or a pack decides otherwise."""
        if self._translate is not None:
            return self._translate
        is_done = self.is_auto or any(pack.name.startswith("mesh_tf_to_t5x") for pack in self._packs)
        return source.format == "tf_bundle" and not is_done and not is_bundle


@contextlib.contextmanager
def answers_as_options() -> Iterator[None]:
    """Turns errors of `--given` into errors of usage."""
    try:
        yield
    except GivenError as error:
        raise UsageError(f"{given_options(error.answers)}: {error.reason}") from error


class MappingOptions(RuleOptions):
    """The same options, and a target."""

    def __init__(self, options: argparse.Namespace):
        self._target_path: str | None = options.target
        self._target_item: str | None = options.target_item
        if self._target_path is None and AUTO in (options.rules or []):
            raise UsageError("--rules auto needs --target: it finds what leads from the source's names to the target's")
        super().__init__(options)
        if self._target_path is None and self.needs_target:
            raise UsageError("--map needs --target: its patterns match the target's names")

    def target(self) -> dict[str, Any] | None:
        """Returns the target's leaves as arrays without memory, or None."""
        if self._target_path is None:
            return None
        with open_checkpoint(self._target_path, item=self._target_item) as checkpoint:
            leaves = {
                name: np.broadcast_to(np.empty((), np.dtype(view.dtype)), view.shape)
                for name, view in checkpoint.leaves.items()
            }
        return unflatten(leaves, join_clashes=True)


def plan_options(options: argparse.Namespace) -> RestoreOptions:
    """Returns the keywords of a plan that both commands have."""
    return RestoreOptions(
        item=options.item,
        is_resuming=resuming_argument(options.resuming),
        strict=options.strict,
        allow_lossy_cast=options.allow_lossy_cast,
    )


def _map_of(path: str) -> AssignmentMap | Migrations:
    """Reads assignment rules or migrations from a JSON file.

    Rules are a list of [pattern, replacement]; null leaves a leaf out. Migrations are {"migrations": [[name, rules]]};
    their rules rename, or are {"transform": name, …} with the keywords of a transform.
    """
    given = read_map(path)
    if isinstance(given, dict) and set(given) == {"migrations"} and isinstance(given["migrations"], list):
        try:
            return Migrations([(name, _migration_steps(path, rules)) for name, rules in given["migrations"]])
        except (TypeError, ValueError) as error:
            raise UsageError(f"--map {path}: {error}") from error
    if not isinstance(given, list):
        wanted = 'a JSON list of [pattern, replacement], or {"migrations": [[name, rules], …]}'
        raise UsageError(f"--map {path}: must be {wanted}, not {json_kind(given)}")
    return AssignmentMap(checked_rules(path, given))


def _migration_steps(path: str, rules: Any) -> list[Transform]:
    """Makes the transforms of a migration; adjacent renames are one."""
    if not isinstance(rules, list):
        raise UsageError(f"--map {path}: the rules of a migration must be a JSON list, not {json_kind(rules)}")
    steps: list[Transform] = []
    for is_transform, group in itertools.groupby(rules, lambda rule: isinstance(rule, dict)):
        if not is_transform:
            steps.append(Rename(checked_rules(path, list(group))))
            continue
        for rule in group:
            name = rule.get("transform")
            if name not in transforms.MODULE_OF or not name[0].isupper() or name.isupper():
                raise UsageError(f"--map {path}: {name!r} is no transform of ot.transforms")
            steps.append(getattr(transforms, name)(**{key: value for key, value in rule.items() if key != "transform"}))
    return steps
