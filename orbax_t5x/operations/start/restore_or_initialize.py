"""`restore_or_initialize`: a training job's only start.

It is for the first time and after every preemption. Three ways, in this order: the newest good step of the manager's
own root; a checkpoint to begin with, mapped by transforms; the functions that initialise a model. The manager lists the
steps and their directories; they are opened and read by our own readers, so that it does not matter which handler wrote
them. Over several processes all take the same step: the primary's list of steps counts, and after each attempt all
receive the outcomes of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Unpack, overload

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
from etils import epath

from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    RestorePlanError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.places import files_at
from orbax_t5x.handlers.args import TrainStateRestore, TrainStateSave
from orbax_t5x.handlers.checkpoint_handler import TrainStateHandler
from orbax_t5x.handlers.orbax_names import processes_of, registry_of, step_directory
from orbax_t5x.handlers.run_lineage import EVERY_ITEM, RestoredHistory
from orbax_t5x.handlers.v1.contexts import handler_of
from orbax_t5x.handlers.v1.orbax_v1_names import context_of, manager_of
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.operations.start.advice import damage_of, with_init_fn
from orbax_t5x.provenance.decision import Decision
from orbax_t5x.provenance.records import Lineage, Records, union
from orbax_t5x.provenance.steps import steps_of
from orbax_t5x.readers import Limits
from orbax_t5x.readers.orbax.steps import item_names, lost_items, recorded_items
from orbax_t5x.restoring.api import decided_inputs, open_for
from orbax_t5x.restoring.fallback import abstract_tree
from orbax_t5x.restoring.lineage import Caller, CallerKind
from orbax_t5x.restoring.options import BroadcastMode, ExecuteKeywords, RestoreOptions, SourceKeywords
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.planner import PlanInputs, build_plan, plan_inputs
from orbax_t5x.restoring.processes import ProcessGroup
from orbax_t5x.restoring.sources import AnySource, OpenSources, Transforms, asks_for_rules, chain_of, unopened_chain
from orbax_t5x.restoring.unfit import UnfitStep, explain_unfit_source
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.text.wording import counted, listed, with_full_stop
from orbax_t5x.transforms.patterns.table import Pattern

# Orbax's name for the item of a manager that has one item without a name.
_DEFAULT_ITEM = "default"
_FIRST_STEP = 0
_SHOWN_NAMES = 5
# Of a state from scratch: the function fills all leaves, which is no reason to warn.
_ANY_NAME = ("(?s:.*)",)

# Errors of a step that nothing can restore. All others mean that this restore, or this installation, is not the right
# one for it, and an older step would only hide that.
_DAMAGE = (CorruptCheckpointError, CheckpointGoneError, CheckpointIOError, CheckpointNotFoundError, LeafMismatchError)


_logger = logging.getLogger(__name__)

_State = TypeVar("_State")


class TrainingStart(NamedTuple, Generic[_State]):
    """Start of a training job: state, step, and their origin.

    Attributes:
      state: the target's structure, filled.
      step: the step of the manager's root that was resumed; 0 where the run begins.
      how: "resumed" (from a step of the manager's root), "initialized" (from `init_from`) or "scratch" (by `init_fn`).
    """

    state: _State
    step: int
    how: Literal["resumed", "initialized", "scratch"]


class _StartKeywords(SourceKeywords, ExecuteKeywords, total=False):
    """Keywords of `restore_or_initialize` for type checkers."""

    init_from: AnySource | None
    transforms: Transforms
    init_fn: Callable[[], Any] | None


@overload
def restore_or_initialize(
    manager: ocp.CheckpointManager | v1.training.Checkpointer, target: dict[Any, Any], **options: Unpack[_StartKeywords]
) -> TrainingStart[Any]: ...
@overload
def restore_or_initialize(
    manager: ocp.CheckpointManager | v1.training.Checkpointer, target: _State, **options: Unpack[_StartKeywords]
) -> TrainingStart[_State]: ...
@guarded
def restore_or_initialize(
    manager: ocp.CheckpointManager | v1.training.Checkpointer,
    target: Any,
    *,
    init_from: AnySource | None = None,
    transforms: Transforms = (),
    init_fn: Callable[[], Any] | None = None,
    item: str | None = RestoreOptions.item,
    is_resuming: bool | None = RestoreOptions.is_resuming,
    strict: bool = RestoreOptions.strict,
    dtype: Any = RestoreOptions.dtype,
    allow_lossy_cast: bool = RestoreOptions.allow_lossy_cast,
    verify: Verify = RestoreOptions.verify,
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
    progress: Progress | None = RestoreOptions.progress,
    limits: Limits | None = RestoreOptions.limits,
    broadcast: BroadcastMode = RestoreOptions.broadcast,
    fallback_for: Sequence[Pattern] | None = RestoreOptions.fallback_for,
) -> TrainingStart[Any]:
    """Starts a training job.

    From its own newest step, else from a checkpoint to begin with, else from scratch. Call it at every start, with the
    same arguments. What was applied when the run began is recorded by the first save of an
    `orbax_t5x.TrainStateHandler` below the manager's root, or in an `orbax_t5x.v1.context`, and no rule is applied
    twice.

    Args:
      manager: any `ocp.CheckpointManager`, with whichever handlers, or Orbax v1's `training.Checkpointer`; steps that
        others than this package wrote are resumed too.
      target: as `orbax_t5x.restore` takes it.
      init_from: what a new run begins with: a source of `orbax_t5x.restore`, of any format.
      transforms: of `init_from`. To a step of the manager's root those are applied that its record lacks, where the
        list has grown at its end; any other difference is a problem. There `"auto"` stands for the rules that it found
        when the run began. A step of another writer is resumed as it is; only `Migrations` are applied to it.
      init_fn: a function of no arguments that returns a tree like the target or its state dict, or such a tree: the
        state where there is no `init_from`, else the values of the leaves that it lacks, as `fallback` of
        `orbax_t5x.restore` gives them.
      item: which item of the manager's steps is the state, where they have several.
      is_resuming: of `init_from`, as in `orbax_t5x.restore`; of a step of the manager's root where its record leaves
        a question.
      strict, dtype, allow_lossy_cast, verify, memory_limit_bytes, progress, limits, broadcast: as in
        `orbax_t5x.restore`.
      fallback_for: regexes of the target leaves that `init_fn` may fill, beside `init_from` and beside a step of the
        manager's root, to which they may be new, such as the state of another optimizer; see `orbax_t5x.restore`. A
        step has to have all others.

    Returns:
      The state, the step, and how it came about.

    Warns:
      UserWarning: a step is damaged, and an older one is taken. Orbax saves no step up to a damaged one that is the
        newest until `manager.delete(step)`.

    Raises:
      RestorePlanError: the step, the checkpoint or the function does not fit the target.
      CheckpointNotFoundError: there are neither steps nor `init_from` nor `init_fn`; or the steps have no such item.
      CheckpointIOError: none of the steps can be read, and it is the operating system or the store that refuses.
      CheckpointError: `init_from` cannot be opened or read.

    Example:
      >>> target = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
      >>> with ocp.CheckpointManager(directory, item_handlers=ot.TrainStateHandler()) as manager:
      ...     state, step, how = ot.restore_or_initialize(manager, target, init_fn=lambda: {"w": jnp.ones(3)})
      ...     step, how
      (0, 'scratch')
    """
    histories: list[RestoredHistory] = []
    if isinstance(manager, v1.training.Checkpointer):
        manager.wait()
        histories = [handler_of(context_of(manager).checkpointables.registry).history]
        manager = manager_of(manager)
    if not hasattr(manager, "all_steps"):
        what = "an ocp.CheckpointManager, such as ocp.CheckpointManager(path), or Orbax v1's training.Checkpointer"
        raise TypeError(f"manager is {manager!r}; pass {what}")
    options = dataclasses.replace(RestoreOptions.among(locals()), fallback=init_fn)
    start = _JobStart(manager, target, transforms, options, histories or _histories_of(manager))
    resumed = start.resume(unopened_chain(init_from, transforms))
    if resumed is not None:
        return resumed
    if init_from is not None:
        return start.initialize(init_from)
    if init_fn is not None:
        return start.from_scratch()
    found = "each of its steps is damaged" if start.skipped else "it has no step"
    message = f"{found}, and neither init_from= nor init_fn= is given to begin the run"
    raise CheckpointNotFoundError(message, path=os.fspath(manager.directory))


class _Damage(NamedTuple):
    """Reason why a step cannot be restored.

    `is_refusal`: the operating system or the store refused to read it.
    """

    reason: str
    is_refusal: bool


@dataclasses.dataclass(frozen=True)
class _RestoreResult:
    """Result of a restore: filled target, plan, and items' records."""

    state: Any
    plan: RestorePlan
    records: Records

    def lineages(self, single: str) -> dict[str, Lineage]:
        """Returns each item's lineage, this restore included.

        `single` is the name of a single item.
        """
        if len(self.records) == 1:
            return {item or single: self.plan.provenance for item in self.records}
        added = self.plan.provenance[len(union(self.records.values())) :]
        return {item: (*(record or ()), *added) for item, record in self.records.items()}


class _JobStart:
    """A start of a job.

    `skipped` are the damaged steps, which were passed over.
    """

    def __init__(
        self,
        manager: ocp.CheckpointManager,
        target: Any,
        transforms: Transforms,
        options: RestoreOptions,
        histories: Sequence[RestoredHistory],
    ):
        self._manager = manager
        self._root = os.fspath(manager.directory)
        self._target = target
        self._transforms: Transforms = transforms
        self._histories = histories
        self._processes = processes_of(manager)
        self._options = dataclasses.replace(options, multiprocessing_options=self._processes)
        self.skipped: list[int] = []

    # -- the run's own steps

    def resume(self, chain: tuple[Callable[..., Any], ...]) -> TrainingStart | None:
        """Resumes from the newest good step, or returns None."""
        refused = ""
        for step in self._own_steps():
            directory = step_directory(self._manager, step)
            attempt = self._attempt(step, directory, chain)
            if isinstance(attempt, _RestoreResult):
                for item, lineage in attempt.lineages(single=self._item_in(directory)).items():
                    state = attempt.state[item] if len(attempt.records) > 1 else attempt.state
                    for history in self._histories:
                        history.note(directory / item, lineage, state)
                return TrainingStart(attempt.state, step, "resumed")
            self.skipped.append(step)
            refused = refused or (attempt.reason if attempt.is_refusal else "")
            advice = f"No step up to {step} is saved before manager.delete({step})."
            warnings.warn(f"step {step} is skipped: {with_full_stop(attempt.reason)} {advice}", stacklevel=4)
        if refused:
            message = f"none of the run's steps can be read, so the run is not begun anew: {refused}"
            raise CheckpointIOError(message, path=self._root)
        return None

    def _own_steps(self) -> list[int]:
        """Lists the steps that have the item, newest first.

        The primary process lists them for all.
        """
        self._manager.wait_until_finished()
        self._manager.reload()
        group = ProcessGroup.of(self._processes)
        with group.sharing_errors():
            steps = sorted(self._manager.all_steps(), reverse=True)
            having = [step for step in steps if self._has_item(step)]
            steps, having = group.of_primary([steps, having], self._root)
        if steps and not having:
            message = f"none of the steps here has an item {self._options.item!r}; the newest is {steps[0]}"
            raise CheckpointNotFoundError(message, path=self._root)
        return having

    def _has_item(self, step: int) -> bool:
        """Tests if a step has the item, or lost it by damage."""
        item, directory = self._options.item, step_directory(self._manager, step)
        if item is None or (directory / item).exists():
            return True
        recorded = _recorded_items(directory)
        return recorded is None or item in recorded

    def _item_in(self, directory: epath.Path) -> str:
        """Names the single item to restore, or "" for several."""
        if self._options.item is not None:
            return self._options.item
        if (directory / _DEFAULT_ITEM).is_dir():
            return _DEFAULT_ITEM
        step = files_at(os.fspath(directory))
        names = item_names(step)
        lost = lost_items(step, _recorded_items(directory) or {}, names)
        return names[0] if len(names) == 1 and not lost else ""

    def _attempt(
        self, step: int, directory: epath.Path, chain: tuple[Callable[..., Any], ...]
    ) -> _RestoreResult | _Damage:
        """Restores a step on all processes, or on no process."""
        options = dataclasses.replace(self._options, item=None)
        if options.fallback_for is None:  # then the step has to be complete
            options = dataclasses.replace(options, fallback=None)
        path = os.fspath(directory / self._item_in(directory))
        group = ProcessGroup.of(self._processes)
        restored: _RestoreResult | None = None
        damage: _Damage | None = None
        refusal: CheckpointError | None = None
        with group.sharing_errors():
            try:
                restored = self._restore(path, chain, options, "start", step)
            except _DAMAGE as error:
                damage = _Damage(str(error), isinstance(error, CheckpointIOError))
            except UnsupportedCheckpointError as error:
                if epath.Path(path).is_dir():
                    refusal = error
                else:  # an item is a directory
                    damage = _Damage(str(error), False)
            except RestorePlanError as error:
                corruption = damage_of(path, options.limits)
                if corruption is None:
                    refusal = error
                else:
                    damage = _Damage(str(corruption), False)
            # What is damage here may be a refusal on a process whose own copy is whole.
            damages = [_Damage(*outcome) for outcome in group.of_all(damage, path) if outcome is not None]
        if refusal is not None and not damages:
            raise refusal
        if restored is not None and not damages:
            return restored
        return next((damage for damage in damages if not damage.is_refusal), damages[0])

    # -- a new run

    def initialize(self, source: AnySource) -> TrainingStart:
        """Starts from another checkpoint."""
        options = dataclasses.replace(self._options, item=None)
        try:
            restored = self._restore(source, chain_of(self._transforms), options, "restore")
        except RestorePlanError as error:
            raise with_init_fn(error) from error.__cause__
        self._begin(restored.plan.provenance)
        return TrainingStart(restored.state, _FIRST_STEP, "initialized")

    def from_scratch(self) -> TrainingStart:
        """Starts from the function only, by a plan without checkpoint.

        Its state is of the newest model: no transform is for it, not at a restart either.
        """
        init_fn, target = self._options.fallback, self._target
        if target is None:  # everything
            target = abstract_tree(init_fn)
        options = dataclasses.replace(self._options, fallback_for=_ANY_NAME)
        with ProcessGroup.of(self._processes).sharing_errors():
            try:
                inputs = plan_inputs(OpenSources({}), target, (), options)
                plan = build_plan(inputs, Decision(), proposes=False)
            except RestorePlanError as error:
                raise with_init_fn(error) from error.__cause__
        state = plan.run(self._options)
        rules = [rule for rule in chain_of(self._transforms) if not asks_for_rules(rule)]
        self._begin(tuple(step.entry for step in steps_of(rules)))
        return TrainingStart(state, _FIRST_STEP, "scratch")

    def _begin(self, lineage: Lineage) -> None:
        for history in self._histories:
            history.begin(self._root, EVERY_ITEM if self._options.item is None else self._options.item, lineage)

    def _restore(
        self,
        source: AnySource,
        chain: Sequence[Callable[..., Any]],
        options: RestoreOptions,
        kind: CallerKind,
        step: int | None = None,
    ) -> _RestoreResult:
        """Restores on all processes together; `step` is that of the run, where it is one."""
        with contextlib.ExitStack() as stack:
            with ProcessGroup.of(self._processes).sharing_errors():
                sources = open_for(self._target, source, options, stack)
                caller = Caller(kind, keeps_lineage=True)
                inputs, decision, records = decided_inputs(sources, self._target, chain, options, caller)
                try:
                    plan = build_plan(inputs, decision)
                except RestorePlanError as error:
                    if step is None:
                        better = explain_unfit_source(error, inputs, self._target, chain, self._transforms)
                    else:
                        better = self._unfit(step, inputs, decision, records).explain(error)
                    raise better from error.__cause__
            if step is not None and plan.filled:
                names = listed(plan.filled, _SHOWN_NAMES)
                count = counted(len(plan.filled), "leaf is", "leaves are")
                lines = (f"{count} new to this step and given by init_fn: {names}", *plan.warnings)
                _logger.warning("%s: %s", plan.path, "; ".join(lines))
            return _RestoreResult(plan.run(options), plan, records)

    def _unfit(self, step: int, inputs: PlanInputs, decision: Decision, records: Records) -> UnfitStep:
        directory = step_directory(self._manager, step)
        return UnfitStep(
            f"step {step} of the run",
            target=self._target,
            given=self._transforms,
            inputs=inputs,
            decision=decision,
            is_foreign=all(record is None for record in records.values()),
            has_values=self._options.fallback is not None,
            keyword="init_fn",
            items=() if self._item_in(directory) else item_names(files_at(os.fspath(directory))),
        )


def _histories_of(manager: ocp.CheckpointManager) -> list[RestoredHistory]:
    """Returns the histories of a manager's handlers of train states.

    A manager that makes its handlers later gets a handler here.
    """
    registry = registry_of(manager)
    handlers = {id(one): one for one in registry.get_all_entries().values() if isinstance(one, TrainStateHandler)}
    if not handlers:
        handler = TrainStateHandler(multiprocessing_options=processes_of(manager))
        for args in (TrainStateSave, TrainStateRestore):
            registry.add(None, args, handler)
        return [handler.history]
    return [handler.history for handler in handlers.values()]


def _recorded_items(directory: epath.Path) -> Mapping[str, Any] | None:
    """Lists the items in a step's metadata, or returns None.

    None: they cannot be read.
    """
    try:
        return recorded_items(files_at(os.fspath(directory)))
    except CheckpointError:
        return None
